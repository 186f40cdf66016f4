"""What a region has put around its function, taken off for a while; what others have put there stays on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sac.region.parking import PackHooks, surrounding_hooks

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
