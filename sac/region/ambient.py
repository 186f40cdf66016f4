"""Ambient state of a forward (autocast, modes, flags of the process, user state), restored for recomputation."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from sac.config_keys import StateProvider
from sac.native.load import library
from sac.region.fp8_state import fp8_state_of
from sac.region.holders import restored_value, stand_in
from sac.region.module_state import ModuleState, UnseenWriteError
from sac.region.python_state import ReachableState
from sac.region.rng import HostRandomState, RngSnapshot, places, state_of
from sac.region.settings import Settings
from sac.region.tables import ModuleTables
from sac.region.undo import UndoStack
from sac.tensors import STORAGE_WATCHERS, storage_address
from sac.torch_private import (
    FUNCTIONS_ON,
    HAS_FUNCTION_MODES,
    HAS_FUNCTION_STATE,
    HAS_PRECISIONS,
    count_function_modes,
    function_mode_at,
    functions_are_on,
    get_function_state,
    get_precision,
    keep_graphs_in_order_of_making,
    pop_function_mode,
    process_flags,
    push_function_mode,
    set_cudnn_tf32,
    set_function_state,
    set_matmul_precision,
    set_precision,
)

# -- State that one function reads and another one sets


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the ambient state: how it is read, set for a recomputation, and taken back afterwards.

    ``same``: whether two states are the same, so that nothing has to be set.
    """

    read: Callable[[], Any]
    put: Callable[[Any], None]
    take_back: Callable[[Any], None]
    same: Callable[[Any, Any], bool] = operator.eq


class Snapshot:
    """The states of some parts in the forward, read in order."""

    __slots__ = ("_forward",)

    def __init__(self, parts: Iterable[Part]) -> None:
        self._forward = [(part, part.read()) for part in parts]

    def enter_on(self, stack: UndoStack) -> None:
        """Set each part as it was in the forward; take it back, in reverse order, when ``stack`` is left."""
        for part, forward in self._forward:
            now = part.read()
            if not part.same(now, forward):
                stack.callback(part.take_back, now)  # registered first: a `put` that raises may be half done
                part.put(forward)


# -- State of the forward's thread: autocast and torch-function modes

# Autocast is read for the CPU, the accelerator and the devices of the region's inputs, the dtype also where it is off:
# a `torch.autocast` inside the region inherits it. It is not set by `torch.autocast`, which chooses dtypes itself, and
# which torch-function modes see.
#
# Torch-function modes (`with torch.device(...)` is one), and whether they are on at all: backward may run under other
# modes even if the user changes none. Another thread has no modes. `loss.backward()` itself is called through the
# innermost mode, with that mode off, or through the class of the loss, with subclasses off.

Setting = tuple[str, bool, torch.dtype]


def thread_parts(tensors: Sequence[torch.Tensor]) -> tuple[Part, ...]:
    """Return autocast, for the devices of ``tensors`` too, and the torch-function modes, which come last."""
    return _thread_parts(tuple(_device_types(tensors)))


@functools.cache
def _thread_parts(device_types: tuple[str, ...]) -> tuple[Part, ...]:
    autocast = Part(functools.partial(_autocast_now, device_types), _enter_autocast, _leave_autocast)
    return autocast, FUNCTION_MODES, FUNCTION_STATE


def _autocast_now(names: Sequence[str]) -> tuple[list[Setting], bool]:
    settings = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in names]
    return settings, torch.is_autocast_cache_enabled()


def _set_autocast(state: tuple[list[Setting], bool]) -> None:
    for name, enabled, dtype in state[0]:
        torch.set_autocast_enabled(name, enabled)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(state[1])


def _enter_autocast(state: tuple[list[Setting], bool]) -> None:
    torch.autocast_increment_nesting()
    _set_autocast(state)


def _leave_autocast(state: tuple[list[Setting], bool]) -> None:
    # Leaving the outermost autocast clears the cached casts of weights: the weights will change.
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    _set_autocast(state)


def _device_types(tensors: Sequence[torch.Tensor]) -> Sequence[str]:
    usual = _usual_types()
    for tensor in tensors:
        if not (tensor.is_cpu or tensor.is_cuda):
            types = {tensor.device.type for tensor in tensors}.difference(usual)
            return [*usual, *sorted(filter(torch.amp.is_autocast_available, types))]
    return usual


@functools.cache
def _usual_types() -> tuple[str, ...]:
    """Return the CPU and the accelerator that this torch is built for. Cached, because this cannot change."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.amp.is_autocast_available(accelerator.type):
        return ("cpu",)
    return tuple(dict.fromkeys(("cpu", accelerator.type)))


def _stack_now() -> Sequence[Any]:
    """Return the active modes, outermost first."""
    if not HAS_FUNCTION_MODES:
        return ()
    return [function_mode_at(index) for index in range(length)] if (length := count_function_modes()) else ()


def _exchange(modes: Sequence[Any]) -> None:
    # Directly on the stack: entering a mode may do more than activate it (a device context looks up its position).
    for _ in range(count_function_modes()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def _state_now() -> Any:
    """Return None for the usual state, in which modes and subclasses are on; otherwise torch's value for the state."""
    return None if not HAS_FUNCTION_STATE or functions_are_on() else get_function_state()


def _put_state(state: Any) -> None:
    set_function_state(state if state is not None else FUNCTIONS_ON)


def _are_same_objects(modes: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(modes) == len(others) and all(map(operator.is_, modes, others))


FUNCTION_MODES = Part(_stack_now, _exchange, _exchange, _are_same_objects)
FUNCTION_STATE = Part(_state_now, _put_state, _put_state)


class subclasses_on:  # noqa: N801
    """Turns subclasses on: ops on a subclass return that subclass. ``loss.backward()`` of one turns them off."""

    __slots__ = ("_state",)

    def __enter__(self) -> None:
        self._state = _state_now()
        if self._state is not None:
            _put_state(None)

    def __exit__(self, *error: Any) -> None:
        if self._state is not None:
            _put_state(self._state)


# -- Flags of the process that select kernels

# Note [Flags of the process]
#
# Recomputation has to run the same kernels as the forward. The choice of a kernel depends on the tensors and on flags
# of the process, which the program may have set around the forward only. Recomputation restores these: the settings of
# `sdpa_kernel` (backends and their order), the callable at `torch.nn.functional.scaled_dot_product_attention`
# (context-parallel code replaces it during the forward), the attention backend that TransformerEngine chose last, the
# default dtype, the settings of `torch.backends.cudnn.flags` and `torch.backends.mkldnn.flags`, deterministic
# algorithms, and the precision of float32 products.
#
# It does not restore these, since a program sets them at most once: reductions in half precision, preferred BLAS and
# linear algebra libraries, the number of threads, flushing of denormals (which cannot be read), filling of
# uninitialised memory, and precisions set for a whole backend by `torch.backends.fp32_precision`.
#
# All threads share these flags. A thread that runs other ops during a recomputation sees the changed flags, as it would
# see a change by the user. sac only promises that recomputations on several threads do not corrupt the flags: each one
# remembers the values that it found, and if it ends first, passes them on to the one that started next. So
# recomputations with the same forward settings do not disturb each other, and after the last one the flags are as they
# were before the first.

Flag = tuple[Callable[[], Any], Callable[[Any], Any]]


def _flags() -> Iterator[Flag]:
    """Yield a way to read and a way to set each flag that this torch has."""
    yield from process_flags()
    yield torch.get_default_dtype, torch.set_default_dtype
    yield _attention, _put_attention
    yield attention_choice, _put_attention_choice
    if HAS_PRECISIONS:
        yield _precision(*_PRODUCTS, _MATMUL_WORDS, set_matmul_precision)
        yield _precision(*_CONVOLUTIONS, _CUDNN_WORDS, set_cudnn_tf32)


def _questions() -> Iterator[tuple[Any, ...]]:
    """Yield the functions of torch that read the flags, with arguments; the rest is ``_attention`` and TE's choice."""
    yield from ((read,) for read, _ in process_flags())
    yield (torch.get_default_dtype,)
    if HAS_PRECISIONS:
        yield from ((get_precision, *one) for one in (*_PRODUCTS, *_CONVOLUTIONS))


def _attention() -> Any:
    return functional.scaled_dot_product_attention


def _put_attention(function: Any) -> None:
    functional.scaled_dot_product_attention = function


# Private to TransformerEngine (1.x to 2.x): a dict of the module, with the parameters of the last choice and the chosen
# backend. A call with the same parameters does not choose again, so without restoring the dict a recomputation could
# run other code than its forward. If the name is missing, nothing is restored.
_TRANSFORMER_ENGINE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


class AttentionChoice:
    """The contents of TransformerEngine's dict; equal if they are the same objects (which may hold tensors)."""

    __slots__ = ("values",)

    def __init__(self, values: dict[Any, Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttentionChoice) or self.values.keys() != other.values.keys():
            return False
        return all(value is other.values[key] for key, value in self.values.items())

    __hash__ = None  # type: ignore[assignment]


def _attention_choices() -> dict[Any, Any] | None:
    module = sys.modules.get(_TRANSFORMER_ENGINE)
    choices = getattr(module, "_attention_backends", None) if module is not None else None
    return choices if isinstance(choices, dict) else None


def attention_choice() -> AttentionChoice | None:
    """Return TransformerEngine's last choice; None if it is not loaded."""
    choices = _attention_choices()
    return None if choices is None else AttentionChoice(dict(choices))


def _put_attention_choice(wanted: AttentionChoice | None) -> None:
    choices = _attention_choices()
    if choices is not None and wanted is not None:
        choices.clear()
        choices.update(wanted.values)


# Precisions also have an older interface, `set_float32_matmul_precision` and `allow_tf32`, which sets the newer one
# too. torch raises if the older one is read while the two differ (2.13). sac reads the newer one, and updates the older
# one if it can express both the current value and the wanted value.
_Precisions = tuple[str, str]
_PRODUCTS = ("cuda", "matmul"), ("mkldnn", "matmul")
_CONVOLUTIONS = ("cuda", "conv"), ("cuda", "rnn")
_UNSET = ("none", "ieee")
_MATMUL_WORDS: dict[_Precisions, str] = {
    **{(cuda, cpu): "highest" for cuda in _UNSET for cpu in _UNSET},
    ("tf32", "tf32"): "high",
    ("tf32", "bf16"): "medium",
}
_CUDNN_WORDS: dict[_Precisions, bool] = {
    **{(convolution, rnn): False for convolution in _UNSET for rnn in _UNSET},
    ("tf32", "tf32"): True,
}


def _precision(first: tuple[str, str], second: tuple[str, str], words: dict[_Precisions, Any], put_older: Any) -> Flag:
    def read() -> _Precisions:
        return get_precision(*first), get_precision(*second)

    def put(wanted: _Precisions) -> None:
        if wanted in words and read() in words:
            put_older(words[wanted])
        set_precision(*first, wanted[0])
        set_precision(*second, wanted[1])

    return read, put


_READERS, _SETTERS = zip(*_flags(), strict=True)


def _read() -> list[Any]:
    return [read() for read in _READERS]


def _put(wanted: list[Any]) -> None:
    for put, value, present in zip(_SETTERS, wanted, _read(), strict=True):
        if value is not present and value != present:
            put(value)


class _Change:
    """The flags that one recomputation found when it changed them."""

    __slots__ = ("found",)

    def __init__(self, found: list[Any]) -> None:
        self.found = found


# The flags belong to the process, and so does this list of the recomputations that changed them, in order. The lock is
# held only while the flags are set.
_changes: list[_Change] = []
_lock = threading.Lock()
_NOTHING_TO_SET = nullcontext()


class BackendFlags:
    """The flags as they were in the forward; see Note [Flags of the process]."""

    __slots__ = ("_forward", "_record")

    def __init__(self, record: Any = None) -> None:
        """``record``: one of the C++ library that has been made just now."""
        self._record = record
        self._forward = _read()

    def have_changed(self) -> bool:
        """Return whether a flag is not as recorded."""
        return not self._are_known() and _read() != self._forward

    def are_set(self) -> bool:
        """Return whether the library says that all flags are as recorded, and no recomputation has changed them."""
        with _lock:
            return not _changes and self._are_known()

    def _are_known(self) -> bool:
        """Return whether the library says that all flags are as recorded."""
        return self._record is not None and not self._record.differences(FLAGS)

    def enter_on(self, stack: UndoStack) -> None:
        """Set the flags as recorded; restore the current ones when ``stack`` is left."""
        if self.are_set():
            return
        with _lock:
            found = _read()
            if found == self._forward and not _changes:
                return
            change = _Change(found)
            _changes.append(change)
            stack.callback(_take_back, change)
            _put(self._forward)


def _take_back(change: _Change) -> None:
    with _lock:
        index = _changes.index(change)
        if index == len(_changes) - 1:
            _put(change.found)
        else:
            _changes[index + 1].found = change.found
        del _changes[index]


# -- Context variables


class ContextVariables:
    """The values of all ``contextvars.ContextVar`` in the forward; a thread of backward may have others."""

    __slots__ = ("_forward",)

    def __init__(self) -> None:
        self._forward = [(variable, stand_in(value)) for variable, value in contextvars.copy_context().items()]

    def enter_on(self, stack: UndoStack) -> None:
        """Give the variables these values; when ``stack`` is left, all have the values from before."""
        now = contextvars.copy_context()
        values = [(variable, restored_value(value, now.get(variable))) for variable, value in self._forward]
        context = contextvars.Context()
        _enter_context(context)
        stack.callback(_exit_context, context)
        for variable, value in values:
            variable.set(value)

    def drop(self) -> None:
        """Release the values."""
        self._forward = []


# `Context.run` is the only way in that Python has; in C there is the pair of functions that it consists of.
def _context_function(name: str) -> Callable[[contextvars.Context], int]:
    function = getattr(ctypes.pythonapi, name)
    function.argtypes, function.restype = [ctypes.py_object], ctypes.c_int
    return cast("Callable[[contextvars.Context], int]", function)


_enter_context, _exit_context = _context_function("PyContext_Enter"), _context_function("PyContext_Exit")


# -- State of the user's state providers


def provider_parts(providers: Iterable[StateProvider]) -> list[Part]:
    """Return the state of each provider, which a recomputation always sets: states of the user are not compared."""
    return [Part(one.snapshot, one.restore, one.restore, lambda now, forward: False) for one in providers]


# -- What the C++ library compares

# Note [Surroundings]
#
# Most regions draw no random numbers, and most steps change no flag. So the surroundings of a region's forward are
# mostly those of the region before, and its recomputation has nothing to restore. With the C++ library one record has
# what shows that: the words of the default generator of the CPU, of Python's and of NumPy's; what torch's functions say
# of the flags; autocast, and that there are no torch-function modes. `differences` compares the record with what is
# there now, part by part. It is asked
#
#   when a forward begins      what is as in the last record is not read again, but for the state of the generator of
#                              the CPU: each call holds a copy, so that as many bytes are held as without the library
#   before a recomputation     what is as in the forward is not restored
#   after it                   the generators that are still in the state of the forward are not set back
#
# All that shows a change is compared each time, so the record saves time only: the classes above read, restore and undo
# what differs, and what the library does not know. Of that kind are torch-function modes, another attention function
# than torch's, TransformerEngine, NumPy's second number of a pair (`has_gauss`), and other generators than these three.
# Records never change. While a plan counts storages (`STORAGE_WATCHERS`) there are none, so that its figures are the
# same with and without the library.
#
# Example. A step of 32 blocks without dropout, whose batch was drawn from the default generator, makes one record. All
# 32 recomputations find that generator as it was in their forward, set nothing, and look once more when they end.

GENERATOR, HOST, FLAGS, THREAD = 1, 2, 4, 8  # `Part` in surroundings.h
_EVERY = GENERATOR | HOST | FLAGS | THREAD
_USUAL_ATTENTION = _attention()
_QUESTIONS = tuple(_questions())


class Surroundings:
    """A record of the C++ library, with the values that it stands for: all of them never change.

    ``before``: the record before this one, from which it ``differs`` in these parts.
    """

    __slots__ = ("flags", "host", "parts", "record", "thread")

    def __init__(self, native: Any, before: Surroundings | None, differs: int) -> None:
        types = tuple(_usual_types())
        earlier: Any = before.record if before is not None else None
        self.record: Any = native.Surroundings(
            earlier, *places(), _QUESTIONS, functional, _USUAL_ATTENTION, _TRANSFORMER_ENGINE, types
        )
        record = self.record
        if before is not None:  # another thread may have changed something since ``before`` was compared
            differs |= before.record.differences(_EVERY)
        self.host: HostRandomState = HostRandomState() if before is None or differs & HOST else before.host
        self.flags: BackendFlags = BackendFlags(record) if before is None or differs & FLAGS else before.flags
        self.parts = _thread_parts(types)
        self.thread: Snapshot = Snapshot(self.parts) if before is None or differs & THREAD else before.thread
        record.forget(record.differences(_EVERY))  # it has changed meanwhile
        if self.host.is_hidden:
            record.forget(HOST)

    def same(self, parts: int) -> int:
        """Return those of ``parts`` that are as recorded."""
        return parts & ~self.record.differences(parts) if parts else 0

    def put_back(self, parts: int, state: torch.Tensor | None) -> None:
        """Restore those of the random states in ``parts`` that have changed since they were ``same``.

        ``state``: that of the default generator; not needed if this is not in ``parts``.
        """
        changed = self.record.differences(parts)
        if changed & GENERATOR:
            assert state is not None
            torch.default_generator.set_state(state)
        if changed & HOST:
            self.host.put_back_moved()


class _Latest:
    """The last surroundings of a region of any thread."""

    def __init__(self) -> None:
        self._found: Surroundings | None = None

    def now(self) -> Surroundings | None:
        """Return the surroundings; None without the library."""
        native: Any = library()
        if native is None or STORAGE_WATCHERS:
            return None
        found = self._found
        differs = _EVERY if found is None else found.record.differences(_EVERY)
        if found is None or differs:
            self._found = found = Surroundings(native, found, differs)
        return found


_LATEST = _Latest()


def surroundings_now() -> Surroundings | None:
    """Return the record of what is there now; None without the library."""
    return _LATEST.now()


# -- The whole ambient state of a region call

# It does not include dispatch modes: the modes of backward stay on in recomputation, as in torch's own checkpoint, so
# that a mode that counts or traces the ops of a step sees all of them.


class AmbientState:
    """State at the start of one region call: random states, Python state, buffers, FP8 state, flags and modes.

    ``where`` names the region in errors. ``function``: the function that the region runs, in addition to its modules.
    ``held``: tensors that objects among its arguments hold. ``found``: see ``ReachableState``. ``recorded``:
    whether a recorder sees the ops of the forward. ``not_recomputed``: see ``ModuleState``. ``under_torch``: torch's
    checkpoint restores torch's random states. ``shared``: functions and generators among its arguments.
    """

    __slots__ = (
        "_known",
        "_knows_generator",
        "_recorded",
        "flags",
        "fp8",
        "host_rng",
        "module_state",
        "provided",
        "reachable",
        "rng",
        "thread",
        "variables",
    )

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        owners: tuple[nn.Module, ...],
        settings: Settings,
        function: Any = None,
        held: Iterable[torch.Tensor] = (),
        *,
        where: str = "region",
        found: ModuleTables | None = None,
        recorded: bool = True,
        not_recomputed: frozenset[int] = frozenset(),
        under_torch: bool = False,
        shared: Iterable[Any] = (),
    ) -> None:
        self._recorded = recorded
        self.reachable = reachable = ReachableState(owners, function, *shared, found=found)
        self.provided: Snapshot | None = Snapshot(provider_parts(settings.providers)) if settings.providers else None
        self._known = known = _LATEST.now()
        self.rng: RngSnapshot | None = None
        self.host_rng: HostRandomState | None = None
        if settings.preserve_rng_state and not under_torch:
            self.rng = RngSnapshot(tensors, settings, reachable.generators)
        # Another thread may have drawn since the record was made.
        self._knows_generator = self.rng is not None and known is not None and known.same(GENERATOR) != 0
        if settings.preserve_rng_state:
            is_known = known is not None and not reachable.others
            self.host_rng = known.host if known is not None and is_known else HostRandomState(reachable.others)
        self.fp8 = fp8 = fp8_state_of(owners, where)
        others: Iterable[torch.Tensor] = (*reachable.tensors.values(), *held)
        if fp8 is not None and fp8.addresses:
            others = [one for one in others if storage_address(one) not in fp8.addresses]
        self.module_state = ModuleState(
            owners,
            others,
            reachable.parameters.values(),
            freeze_buffers=settings.freeze_buffers,
            recorded=recorded,
            reentrant=settings.use_reentrant,
            not_recomputed=not_recomputed,
            found=None if settings.providers or settings.trackers else found,  # they are the user's code
        )
        self.flags = BackendFlags() if known is None else known.flags
        parts = thread_parts(tensors)
        self.thread = Snapshot(parts) if known is None or parts is not known.parts else known.thread
        self.variables = ContextVariables()
        keep_graphs_in_order_of_making()

    def close(self, where: str, *, needed: bool = True) -> None:
        """The forward is over: release copies that are not needed. ``needed``: whether a recomputation may come.

        Raises ``UnseenWriteError``, with ``where`` as the name of the region, if one may come and the forward wrote to
        a parameter or a large buffer without a recorder.
        """
        self.module_state.close()
        self.reachable.tensors, self.reachable.parameters = {}, {}  # some have graphs; the recorder has its own table
        if needed and not self._recorded and (problem := self.module_state.unseen_write(where)) is not None:
            raise UnseenWriteError(problem)

    def enter_on(self, stack: UndoStack) -> None:
        """Restore the state of the forward; restore the current state when ``stack`` is left.

        Torch-function modes come last, so that they see the region's calls and not those of sac.
        """
        self._enter_random_states_on(stack)
        known, thread = self._known, self.thread
        for state in (self.provided, self.reachable, self.module_state, self.fp8, self.flags, self.variables):
            if state is not None:
                state.enter_on(stack)
        if known is None or thread is not known.thread or not known.same(THREAD):
            thread.enter_on(stack)

    def _enter_random_states_on(self, stack: UndoStack) -> None:
        known, same = self._known, 0
        if known is not None:
            of_host = HOST if self.host_rng is known.host else 0
            same = known.same((GENERATOR if self._knows_generator else 0) | of_host)
            if same:
                # A copy, as without the library: plans count its bytes.
                stack.callback(known.put_back, same, state_of(torch.default_generator) if same & GENERATOR else None)
        if self.rng is not None:
            self.rng.enter_on(stack, with_default=not same & GENERATOR)
        if self.host_rng is not None and not same & HOST:
            self.host_rng.enter_on(stack)

    def process_flags(self) -> AbstractContextManager[Any]:
        """Return a context in which the flags of the process are those of the forward: all that single ops read."""
        if self.flags.are_set():
            return _NOTHING_TO_SET
        stack = UndoStack()
        self.flags.enter_on(stack)
        return stack

    def drop(self) -> None:
        """No recomputation will come: release everything large."""
        self.rng = self.host_rng = self.provided = self._known = None
        self.reachable.drop()
        self.module_state.drop()
        if self.fp8 is not None:
            self.fp8.drop()
        self.variables.drop()
