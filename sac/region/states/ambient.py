"""What a region's ops met on the thread of its forward: autocast, and torch-function modes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

Setting = tuple[str, bool, torch.dtype]


class AutocastState:
    """Autocast as it was in the forward, for the CPU, the accelerator and the devices of the region's inputs.

    The dtype counts where autocast is off too: a ``torch.autocast`` inside the region takes it over.
    """

    __slots__ = ("_cache", "_settings")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._settings = _settings_now(_device_types(tensors))
        self._cache = torch.is_autocast_cache_enabled()

    def enter_on(self, stack: ExitStack) -> None:
        """Set autocast as recorded, and as it is now when ``stack`` is left; nothing happens where it is the same.

        Not by ``torch.autocast``, which torch-function modes would see, and which has its own mind about dtypes.
        """
        now = _settings_now([name for name, _, _ in self._settings]), torch.is_autocast_cache_enabled()
        if now != (self._settings, self._cache):
            torch.autocast_increment_nesting()
            stack.callback(_leave_autocast, *now)
            _set_autocast(self._settings, self._cache)


def _settings_now(names: Sequence[str]) -> list[Setting]:
    return [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in names]


def _set_autocast(settings: list[Setting], cache: bool) -> None:
    for name, enabled, dtype in settings:
        torch.set_autocast_enabled(name, enabled)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(cache)


def _leave_autocast(settings: list[Setting], cache: bool) -> None:
    # Casts of weights made since are let go with the outermost autocast: the weights will change.
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    _set_autocast(settings, cache)


def _device_types(tensors: Sequence[torch.Tensor]) -> Sequence[str]:
    usual = _usual_types()
    for tensor in tensors:
        if not (tensor.is_cpu or tensor.is_cuda):
            types = {tensor.device.type for tensor in tensors}.difference(usual)
            return [*usual, *sorted(filter(torch.amp.is_autocast_available, types))]
    return usual


@functools.cache
def _usual_types() -> tuple[str, ...]:
    """Return the CPU and the accelerator that this torch is built for: asked once, that cannot change."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.amp.is_autocast_available(accelerator.type):
        return ("cpu",)
    return tuple(dict.fromkeys(("cpu", accelerator.type)))


# All private to torch (2.11 to 2.13), as is every way to see the modes that are on. Without one of them modes are not
# put back: a recomputation then runs under those of backward. See test_the_names_of_torch_are_there.
_length: Any = getattr(torch._C, "_len_torch_function_stack", None)
_mode_at: Any = getattr(torch._C, "_get_function_stack_at", None)
_push: Any = getattr(torch._C, "_push_on_torch_function_stack", None)
_pop: Any = getattr(torch._C, "_pop_torch_function_stack", None)
_is_on: Any = getattr(torch._C, "_is_torch_function_enabled", None)
_get_state: Any = getattr(torch._C, "_get_torch_function_state", None)
_set_state: Any = getattr(torch._C, "_set_torch_function_state", None)
_HAS_MODES = None not in (_length, _mode_at, _push, _pop)
_ENABLED: Any = getattr(getattr(torch._C, "_TorchFunctionState", None), "ENABLED", None)
_HAS_STATE = None not in (_is_on, _get_state, _set_state, _ENABLED)


class FunctionModes:
    """The torch-function modes of the forward, ``with torch.device(...)`` being one, and whether they are on at all.

    Backward may see others without anybody's doing: on another thread there are none, and ``loss.backward()`` itself is
    called through the innermost mode, without that mode, or through the class of the loss, with subclasses off.
    """

    __slots__ = ("_stack", "_state")

    def __init__(self) -> None:
        self._stack = _stack_now()
        self._state = _state_now()

    def enter_on(self, stack: ExitStack) -> None:
        """Put exactly these modes on, and those of now when ``stack`` is left."""
        now = _stack_now()
        if len(now) != len(self._stack) or any(a is not b for a, b in zip(now, self._stack, strict=True)):
            stack.callback(_exchange, now)
            _exchange(self._stack)
        state = _state_now()
        if state != self._state:
            stack.callback(_put_state, state)
            _put_state(self._state)


def _stack_now() -> Sequence[Any]:
    """Return the modes that are on, the outermost first."""
    if not _HAS_MODES:
        return ()
    return [_mode_at(place) for place in range(length)] if (length := _length()) else ()


def _exchange(modes: Sequence[Any]) -> None:
    # On the bare stack: to enter a mode means more to it than to be on (a device context looks for its place).
    for _ in range(_length()):
        _pop()
    for mode in modes:
        _push(mode)


def _state_now() -> Any:
    """Return None for the usual state, in which modes and subclasses are heard, else torch's name for it."""
    return None if not _HAS_STATE or _is_on() else _get_state()


def _put_state(state: Any) -> None:
    _set_state(state if state is not None else _ENABLED)


@contextmanager
def subclasses_on() -> Iterator[None]:
    """Let subclasses be heard, so that what is made of one is one; ``loss.backward()`` of a subclass turns that off."""
    state = _state_now()
    if state is None:
        yield
        return
    _put_state(None)
    try:
        yield
    finally:
        _put_state(state)
