"""State of the forward's thread that a recomputation finds again: autocast and torch-function modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import Tensor

from sac.torch_private import (
    FUNCTIONS_ON,
    count_function_modes,
    function_mode_at,
    functions_are_on,
    get_function_state,
    pop_function_mode,
    push_function_mode,
    set_function_state,
)


class Autocast:
    """Autocast as it is now, for the CPU, the accelerator and the devices of ``tensors``."""

    # It is not set by `torch.autocast`, which chooses dtypes itself.

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._devices = _device_types(tensors)
        self._then = self._now()

    def _now(self) -> Any:
        states = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in self._devices]
        return states, torch.is_autocast_cache_enabled()

    def enter_on(self, stack: ExitStack) -> None:
        """Set this state, until ``stack`` is left."""
        now = self._now()
        if now != self._then:
            torch.autocast_increment_nesting()
            stack.callback(_leave, now)
            _set(self._then)


def _set(state: Any) -> None:
    for name, enabled, dtype in state[0]:
        torch.set_autocast_enabled(name, enabled)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(state[1])


def _leave(state: Any) -> None:
    # Leaving the outermost autocast clears the cached casts of weights: the weights will change.
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    _set(state)


@cache
def _usual_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.amp.is_autocast_available(accelerator.type):
        return ("cpu",)
    return tuple(dict.fromkeys(("cpu", accelerator.type)))


def _device_types(tensors: Sequence[Tensor]) -> Sequence[str]:
    usual = _usual_types()
    if all(tensor.is_cpu or tensor.is_cuda for tensor in tensors):
        return usual
    others = {tensor.device.type for tensor in tensors}.difference(usual)
    return [*usual, *sorted(filter(torch.amp.is_autocast_available, others))]


# -- Torch-function modes (`with torch.device(...)` is one), and whether modes and subclasses are on at all

# `loss.backward()` itself is called through the innermost mode, with that mode off, or through the class of the loss,
# with subclasses off; another thread has no modes. What sac calls around the region's function sees no mode.


class FunctionModes:
    """The torch-function modes that are active now."""

    def __init__(self) -> None:
        self._modes, self._state = _modes_now(), _state_now()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the body under these modes, and only these."""
        with ExitStack() as stack:
            _put_on(stack, self._modes, self._state)
            yield


def leave_function_modes(stack: ExitStack) -> None:
    """Run what follows under no mode, with subclasses on, until ``stack`` is left."""
    _put_on(stack, (), None)


def _put_on(stack: ExitStack, modes: Sequence[Any], state: Any) -> None:
    modes_now, state_now = _modes_now(), _state_now()
    if len(modes_now) != len(modes) or not all(map(is_, modes_now, modes)):
        stack.callback(_set_modes, modes_now)
        _set_modes(modes)
    if state_now != state:
        stack.callback(_set_state, state_now)
        _set_state(state)


def _modes_now() -> Sequence[Any]:
    """Return the active modes, outermost first."""
    length = count_function_modes()
    return [function_mode_at(index) for index in range(length)] if length else ()


def _set_modes(modes: Sequence[Any]) -> None:
    # Directly on the stack: entering a mode may do more than activate it (a device looks up its position).
    for _ in range(count_function_modes()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def _state_now() -> Any:
    """Return None if modes and subclasses are on; otherwise torch's value for the state."""
    return None if functions_are_on() else get_function_state()


def _set_state(state: Any) -> None:
    set_function_state(FUNCTIONS_ON if state is None else state)
