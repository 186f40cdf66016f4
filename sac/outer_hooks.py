"""Saved-tensor hooks and dispatch modes that are active around a region, and taking ours off for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sac.torch_private import (
    count_dispatch_modes,
    pop_dispatch_mode,
    pop_hooks,
    push_dispatch_mode,
    push_hooks,
    top_hooks,
)

# -- Handing what a region holds to the saved-tensor hooks that stand around it

PackHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_FRAMES = ("sac.region.frame", "sac.recompute.replay", "sac.recompute.torch_checkpoint", "torch.utils.checkpoint")


@dataclass(frozen=True, slots=True)
class OuterPacked:
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


def pack_with_outer_hooks(tensor: torch.Tensor, hooks: PackHooks | None) -> torch.Tensor | OuterPacked:
    """Return ``tensor`` itself, or what the surrounding saved-tensor hooks made of it."""
    return tensor if hooks is None else OuterPacked(hooks[0](tensor), hooks[1])


def fetch(kept: torch.Tensor | OuterPacked) -> torch.Tensor:
    """Return the tensor behind ``kept``."""
    return kept.fetch() if isinstance(kept, OuterPacked) else kept


def active_hooks() -> PackHooks | None:
    """Return the innermost saved-tensor hooks now active (``save_on_cpu``, an outer region).

    None if there are none, and if torch does not tell: the hooks around a region then do not see what it keeps, as in
    ``torch.utils.checkpoint``.
    """
    return top_hooks(False) if top_hooks is not None else None


# -- What a region has put around its function, taken off for a while; what others have put there stays on

# Modes and hooks are stacks of each thread. Without HAS_STACKS no module can be saved as a whole, which is an error
# where a policy asks for it.

Pack = Callable[[torch.Tensor], Any]


def active_packs(count: int) -> tuple[Pack, ...]:
    """Return the pack functions of the ``count`` innermost saved-tensor hooks."""
    pairs: list[PackHooks] = []
    while len(pairs) < count and (top := active_hooks()) is not None:
        pairs.append(top)
        pop_hooks()
    for pair in reversed(pairs):
        push_hooks(*pair)
    return tuple(pack for pack, _ in pairs)


class without_hooks:  # noqa: N801
    """Takes the saved-tensor hooks with these pack functions off for a while, wherever they are among others."""

    __slots__ = ("_others", "_packs", "_taken")

    def __init__(self, packs: Sequence[Pack]) -> None:
        self._packs = packs

    def __enter__(self) -> None:
        self._taken: list[PackHooks] = []
        self._others: list[PackHooks] = []
        missing = len(self._packs)
        while missing and (top := top_hooks(False)) is not None:
            pop_hooks()
            self._taken.append(top)
            if any(top[0] is pack for pack in self._packs):
                missing -= 1
            else:
                self._others.append(top)
        for pair in reversed(self._others):
            push_hooks(*pair)

    def __exit__(self, *error: Any) -> None:
        for _ in self._others:
            pop_hooks()
        for pair in reversed(self._taken):
            push_hooks(*pair)


class without_mode:  # noqa: N801
    """Takes one dispatch mode off for a while, wherever it is among others; nothing happens for None."""

    __slots__ = ("_above", "_mode")

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._above: list[Any] = []
        if self._mode is None:
            return
        while count_dispatch_modes():
            top = pop_dispatch_mode(None)
            if top is self._mode:
                break
            self._above.append(top)
        for mode in reversed(self._above):
            push_dispatch_mode(mode)

    def __exit__(self, *error: Any) -> None:
        if self._mode is None:
            return
        for _ in self._above:
            pop_dispatch_mode(None)
        push_dispatch_mode(self._mode)
        for mode in reversed(self._above):
            push_dispatch_mode(mode)
