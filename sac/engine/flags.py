"""Autocast, torch-function modes and flags that select kernels: a recomputation finds those of the forward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sac.torch_private import (
    FUNCTIONS_ON,
    OpOverload,
    autocast_of_caller,
    count_function_modes,
    excluding,
    function_mode_at,
    get_function_state,
    get_precision,
    pop_function_mode,
    process_flags,
    push_function_mode,
    set_function_state,
    set_precision,
)

# Restored are those that a program may set around the forward only: the settings of `sdpa_kernel`, the callable at
# `torch.nn.functional.scaled_dot_product_attention` (context-parallel code replaces it), the default dtype, the
# settings of `torch.backends.cudnn.flags` and `torch.backends.mkldnn.flags`, deterministic algorithms, the precision of
# float32 products, and the attention backend that TransformerEngine chose last. All threads share these flags.

Flag = tuple[Callable[[], Any], Callable[[Any], Any]]


def _attention() -> Any:
    return functional.scaled_dot_product_attention


def _put_attention(function: Any) -> None:
    functional.scaled_dot_product_attention = function


def _flags() -> Iterator[Flag]:
    yield from process_flags()
    yield torch.get_default_dtype, torch.set_default_dtype
    yield _attention, _put_attention
    for name in (("cuda", "matmul"), ("mkldnn", "matmul"), ("cuda", "conv"), ("cuda", "rnn")):
        yield partial(get_precision, *name), partial(set_precision, *name)


_FLAGS = [*_flags()]

# Private to TransformerEngine (1.x to 2.x): a dict of the module, with the parameters of the last choice of an
# attention backend and that backend. A call with the same parameters does not choose again.
_TRANSFORMER_ENGINE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


def attention_choice() -> dict[Any, Any] | None:
    """Return TransformerEngine's dict with its last choice; None if it is not loaded."""
    choices = getattr(sys.modules.get(_TRANSFORMER_ENGINE), "_attention_backends", None)
    return choices if isinstance(choices, dict) else None


class BackendFlags:
    """The flags as they are now."""

    def __init__(self) -> None:
        self._then = [read() for read, _ in _FLAGS]
        self._choice = {**(attention_choice() or {})}

    def enter_on(self, stack: ExitStack) -> None:
        """Set the flags to these values, until ``stack`` is left."""
        before = [read() for read, _ in _FLAGS]
        for (_, put), now, then in zip(_FLAGS, before, self._then, strict=True) if before != self._then else ():
            if now != then:
                stack.callback(put, now)
                put(then)
        if (choices := attention_choice()) is not None and self._choice:
            stack.callback(choices.update, {**choices})
            choices.update(self._choice)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the body with the flags at these values."""
        with ExitStack() as stack:
            self.enter_on(stack)
            yield


# -- Autocast in the body of a custom op, where a dispatch mode would turn it off

# torch (2.11 to 2.13) excludes the autocast dispatch key while a mode's handler runs, which turns autocast off. Then a
# custom op whose body relies on autocast would compute in another precision than without the mode. The state at the
# op's call is in the snapshot that torch takes for reentrant dispatch. If an op has its own autocast kernel, its casts
# are done before the mode sees it, and its body runs without autocast, with or without the mode.

_BUILT_IN = frozenset({"aten", "prim", "prims", "_c10d_functional", "c10d", "fsdp", "profiler", "inductor"})


def is_custom_op(op: Any) -> bool:
    """Return whether ``op`` comes from a library, so that its body may call ops to which autocast applies."""
    return isinstance(op, OpOverload) and op.namespace not in _BUILT_IN


def as_called(op: Any, args: Any) -> AbstractContextManager[Any]:
    """Return a context in which the body of ``op`` has the autocast state of its caller."""
    return as_then(callers_autocast(op, args))


def callers_autocast(op: Any, args: Any) -> tuple[Any, bool] | None:
    """Return the autocast key and whether the caller of ``op`` excluded it; None if the op's body does not need it."""
    tensor = next((value for value in args if isinstance(value, torch.Tensor)), None)
    return autocast_of_caller(op, "cpu" if tensor is None else tensor.device.type)


@contextmanager
def as_then(found: tuple[Any, bool] | None) -> Iterator[None]:
    """Run the body in the state that ``callers_autocast`` returned."""
    if found is None:
        yield
    else:
        with _autocast_level(), excluding(*found):
            yield


@contextmanager
def _autocast_level() -> Iterator[None]:
    # After the outermost autocast, the cached casts of weights are dropped: the weights will change. This is also so in
    # a replay, whose casts the next forward would find in place of those of its own weights.
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


# -- Autocast


class Autocast:
    """Autocast as it is now, for the CPU, the accelerator and the devices of ``tensors``."""

    # It is not set by `torch.autocast`, which chooses dtypes itself.

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._devices = _device_types(frozenset(tensor.device.type for tensor in tensors))
        self._then = self._now()

    def now(self) -> Autocast:
        """Return autocast as it is now, for the same devices."""
        then = self._now()
        if then == self._then:
            return self
        now = copy(self)
        now._then = then
        return now

    def _now(self) -> Any:
        states = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in self._devices]
        return states, torch.is_autocast_cache_enabled()

    def enter_on(self, stack: ExitStack) -> None:
        """Set this state, until ``stack`` is left."""
        now = self._now()
        if now != self._then:
            stack.callback(_set_autocast, now)
            stack.enter_context(_autocast_level())
            _set_autocast(self._then)


def _set_autocast(state: Any) -> None:
    for name, enabled, dtype in state[0]:
        torch.set_autocast_enabled(name, enabled)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(state[1])


@cache
def _device_types(types: frozenset[str]) -> Sequence[str]:
    accelerator = torch.accelerator.current_accelerator()
    names = {"cpu", *types} if accelerator is None else {"cpu", accelerator.type, *types}
    return sorted(filter(torch.amp.is_autocast_available, names))


# -- Torch-function modes (`with torch.device(...)` is one), and whether modes and subclasses are on at all

# `loss.backward()` itself is called through the innermost mode, with that mode off, or through the class of the loss,
# with subclasses off; another thread has no modes. What sac calls around the region's function sees no mode.

NO_MODES: tuple[Sequence[Any], Any] = (), FUNCTIONS_ON


def function_modes() -> tuple[Sequence[Any], Any]:
    """Return the active torch-function modes, outermost first, and torch's value for whether they are on."""
    return [function_mode_at(index) for index in range(count_function_modes())], get_function_state()


@contextmanager
def under_function_modes(modes: tuple[Sequence[Any], Any]) -> Iterator[None]:
    """Run the body under what ``function_modes`` returned, and only that."""
    before = function_modes()
    _set_function_modes(*modes)
    try:
        yield
    finally:
        _set_function_modes(*before)


def _set_function_modes(modes: Sequence[Any], state: Any) -> None:
    # Directly on the stack: entering a mode may do more than activate it (a device looks up its position).
    for _ in range(count_function_modes()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
    set_function_state(state)


# -- Whether the current thread runs the Python of a region again


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def is_recomputing() -> bool:
    """Return whether a region's Python, or an autograd Function of a replay, runs again for backward in this thread.

    For code that keeps logs or counters of its own, which would otherwise count a layer twice. Under ``torch.compile``
    no Python runs again, so it is False there.
    """
    return _depth.value > 0


@contextmanager
def recomputing() -> Iterator[None]:
    """Run the body as a recomputation."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1
