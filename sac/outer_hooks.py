"""Saved-tensor hooks and dispatch modes that are active around a region, and taking ours off for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# -- Handing what a region holds to the saved-tensor hooks that stand around it

PackHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_FRAMES = ("sac.region.frame", "sac.recompute.replay", "sac.recompute.torch_checkpoint", "torch.utils.checkpoint")


@dataclass(frozen=True, slots=True)
class Parked:
    """A tensor handed to the saved-tensor hooks that stood around the region: they decide where it lies."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]

    def fetch(self) -> torch.Tensor:
        """Return the tensor again."""
        return self.unpack(self.packed)

    @property
    def is_recomputed(self) -> bool:
        """Whether an outer region has it, ours or torch's, and runs again to give it back."""
        unpack = getattr(self.unpack, "func", self.unpack)  # that of ``sac.context_fn`` is a partial
        return getattr(unpack, "__module__", "") in _FRAMES


def park(tensor: torch.Tensor, hooks: PackHooks | None) -> torch.Tensor | Parked:
    """Return ``tensor`` itself, or what the surrounding saved-tensor hooks made of it."""
    return tensor if hooks is None else Parked(hooks[0](tensor), hooks[1])


def fetch(kept: torch.Tensor | Parked) -> torch.Tensor:
    """Return the tensor behind ``kept``."""
    return kept.fetch() if isinstance(kept, Parked) else kept


def surrounding_hooks() -> PackHooks | None:
    """Return the innermost saved-tensor hooks now active (``save_on_cpu``, an outer region), if torch tells them.

    Private name ``_top_saved_tensors_default_hooks`` (torch 2.4 to 2.13): its absence means that the hooks around a
    region do not see what the region keeps, as in ``torch.utils.checkpoint``.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(False) if top is not None else None


# -- What a region has put around its function, taken off for a while; what others have put there stays on

# Private to torch (2.0 to 2.13). Without them no module can be saved as a whole, which is an error where a policy asks
# for it. Modes and hooks are stacks of each thread.
_pop_hooks: Any = getattr(torch._C._autograd, "_pop_saved_tensors_default_hooks", None)
_push_hooks: Any = getattr(torch._C._autograd, "_push_saved_tensors_default_hooks", None)
_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_pop_mode: Any = getattr(torch._C, "_pop_torch_dispatch_stack", None)
_push_mode: Any = getattr(torch._C, "_push_on_torch_dispatch_stack", None)
_modes_on: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
CAN_TAKE_OFF = None not in (_pop_hooks, _push_hooks, _top_hooks, _pop_mode, _push_mode, _modes_on)

Pack = Callable[[torch.Tensor], Any]


def surrounding_packs(count: int) -> tuple[Pack, ...]:
    """Return the pack functions of the ``count`` innermost saved-tensor hooks."""
    pairs: list[PackHooks] = []
    while len(pairs) < count and (top := surrounding_hooks()) is not None:
        pairs.append(top)
        _pop_hooks()
    for pair in reversed(pairs):
        _push_hooks(*pair)
    return tuple(pack for pack, _ in pairs)


class hooks_off:  # noqa: N801
    """Takes the saved-tensor hooks with these pack functions off for a while, wherever they are among others."""

    __slots__ = ("_others", "_packs", "_taken")

    def __init__(self, packs: Sequence[Pack]) -> None:
        self._packs = packs

    def __enter__(self) -> None:
        self._taken: list[PackHooks] = []
        self._others: list[PackHooks] = []
        missing = len(self._packs)
        while missing and (top := _top_hooks(False)) is not None:
            _pop_hooks()
            self._taken.append(top)
            if any(top[0] is pack for pack in self._packs):
                missing -= 1
            else:
                self._others.append(top)
        for pair in reversed(self._others):
            _push_hooks(*pair)

    def __exit__(self, *error: Any) -> None:
        for _ in self._others:
            _pop_hooks()
        for pair in reversed(self._taken):
            _push_hooks(*pair)


class mode_off:  # noqa: N801
    """Takes one dispatch mode off for a while, wherever it is among others; nothing happens for None."""

    __slots__ = ("_above", "_mode")

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._above: list[Any] = []
        if self._mode is None:
            return
        while _modes_on():
            top = _pop_mode(None)
            if top is self._mode:
                break
            self._above.append(top)
        for mode in reversed(self._above):
            _push_mode(mode)

    def __exit__(self, *error: Any) -> None:
        if self._mode is None:
            return
        for _ in self._above:
            _pop_mode(None)
        _push_mode(self._mode)
        for mode in reversed(self._above):
            _push_mode(mode)
