"""Ambient state of a forward (autocast, modes, flags of the process, the user's own), restored for recomputation."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sac.region.module_state import ModuleState, UnseenWriteError
from sac.region.python_state import ReachableState
from sac.region.rng import HostRandomState, RngSnapshot
from sac.region.settings import Settings, StateProvider
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

# -- What a region's ops met on the thread of its forward: autocast, and torch-function modes

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
    if not HAS_FUNCTION_MODES:
        return ()
    return [function_mode_at(place) for place in range(length)] if (length := count_function_modes()) else ()


def _exchange(modes: Sequence[Any]) -> None:
    # On the bare stack: to enter a mode means more to it than to be on (a device context looks for its place).
    for _ in range(count_function_modes()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def _state_now() -> Any:
    """Return None for the usual state, in which modes and subclasses are heard, else torch's name for it."""
    return None if not HAS_FUNCTION_STATE or functions_are_on() else get_function_state()


def _put_state(state: Any) -> None:
    set_function_state(state if state is not None else FUNCTIONS_ON)


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


# -- Settings of the whole process that decide which kernel a region's ops get, put back around its recomputation

# Note [Flags of the process]
#
# Recomputation has to run the kernels of the forward. Which ones they are hangs on the tensors, and on flags of the
# process that somebody may have set around the forward only. These are put back: what `sdpa_kernel` sets (backends and
# their order), the callable at `torch.nn.functional.scaled_dot_product_attention` (context-parallel code replaces it
# during the forward), the attention backend that TransformerEngine has chosen last, the default dtype, what
# `torch.backends.cudnn.flags` and `torch.backends.mkldnn.flags` set, deterministic algorithms, and the precision of
# float32 products.
#
# These are not, since a program sets them once, if at all: reductions in half precision, preferred BLAS and linear
# algebra libraries, the number of threads, flushing of denormals (which cannot be read), filling of uninitialised
# memory, and precisions set for a whole backend by `torch.backends.fp32_precision`.
#
# All threads share these flags. A thread that runs other ops while a recomputation has them changed sees the change,
# as it would see the user's own. What we can promise is that recomputations on several threads do not mix them up:
# each remembers what it found, and hands that on to the one that came after it if it leaves first. So those of one
# forward's settings do not disturb each other, and when the last one is over the flags are what they were.

Flag = tuple[Callable[[], Any], Callable[[Any], Any]]


def _flags() -> Iterator[Flag]:
    """Yield a way to read and a way to set each flag that this torch has."""
    yield from process_flags()
    yield torch.get_default_dtype, torch.set_default_dtype
    yield _attention, _put_attention
    yield attention_choice, _put_attention_choice
    if HAS_PRECISIONS:
        yield _matmul_precision, _put_matmul_precision
        yield _cudnn_precision, _put_cudnn_precision


def _attention() -> Any:
    return functional.scaled_dot_product_attention


def _put_attention(function: Any) -> None:
    functional.scaled_dot_product_attention = function


# Private to TransformerEngine (1.x to 2.x), a dict of the module: the parameters of the last choice, and what was
# chosen. A call with the same parameters does not choose again, so that a recomputation would run other code than its
# forward did. Without the name nothing is put back.
_TRANSFORMER_ENGINE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


class AttentionChoice:
    """What TransformerEngine's dict held; equal if the same objects are in it (they may hold tensors)."""

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
    """Return what TransformerEngine has chosen last, None where it is not loaded."""
    choices = _attention_choices()
    return None if choices is None else AttentionChoice(dict(choices))


def _put_attention_choice(wanted: AttentionChoice | None) -> None:
    choices = _attention_choices()
    if choices is not None and wanted is not None:
        choices.clear()
        choices.update(wanted.values)


# Precisions have an older way to be set, `set_float32_matmul_precision` and `allow_tf32`, which sets the newer one too;
# torch raises where it is asked for the older one and the two differ (2.13). We read the newer, and move the older
# along where both of what is and what will be have a word in it.
_Precisions = tuple[str, str]
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


def _matmul_precision() -> _Precisions:
    return get_precision("cuda", "matmul"), get_precision("mkldnn", "matmul")


def _put_matmul_precision(wanted: _Precisions) -> None:
    if wanted in _MATMUL_WORDS and _matmul_precision() in _MATMUL_WORDS:
        set_matmul_precision(_MATMUL_WORDS[wanted])
    set_precision("cuda", "matmul", wanted[0])
    set_precision("mkldnn", "matmul", wanted[1])


def _cudnn_precision() -> _Precisions:
    return get_precision("cuda", "conv"), get_precision("cuda", "rnn")


def _put_cudnn_precision(wanted: _Precisions) -> None:
    if wanted in _CUDNN_WORDS and _cudnn_precision() in _CUDNN_WORDS:
        set_cudnn_tf32(_CUDNN_WORDS[wanted])
    set_precision("cuda", "conv", wanted[0])
    set_precision("cuda", "rnn", wanted[1])


_READERS, _SETTERS = zip(*_flags(), strict=True)


def _read() -> list[Any]:
    return [read() for read in _READERS]


def _put(wanted: list[Any]) -> None:
    for put, value, present in zip(_SETTERS, wanted, _read(), strict=True):
        if value is not present and value != present:
            put(value)


class _Change:
    """What one recomputation found when it changed the flags."""

    __slots__ = ("found",)

    def __init__(self, found: list[Any]) -> None:
        self.found = found


# The flags are the process's, and so is the list of who has changed them, in order. The lock is held for no longer than
# it takes to set them.
_changes: list[_Change] = []
_lock = threading.Lock()


class BackendFlags:
    """The flags as they were in the forward; see Note [Flags of the process]."""

    __slots__ = ("_forward",)

    def __init__(self) -> None:
        self._forward = _read()

    def enter_on(self, stack: ExitStack) -> None:
        """Set the flags as recorded, and as they are now when ``stack`` is left."""
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
        place = _changes.index(change)
        if place == len(_changes) - 1:
            _put(change.found)
        else:
            _changes[place + 1].found = change.found
        del _changes[place]


# -- State of the user's own around a recomputation


class ProvidedState:
    """What the state providers' state was in the forward.

    Providers are asked in order. Around a recomputation each is given the state of the forward, and afterwards, in
    reverse order, the state that it had right before; also when something raises, the provider itself included.
    """

    __slots__ = ("_forward",)

    def __init__(self, providers: tuple[StateProvider, ...]) -> None:
        self._forward = [(provider, provider.snapshot()) for provider in providers]

    def enter_on(self, stack: ExitStack) -> None:
        """Give each provider the state of the forward, and the state of now when ``stack`` is left."""
        for provider, state in self._forward:
            now: Any = provider.snapshot()
            stack.callback(provider.restore, now)  # first: a restore that raises may have done half its work
            provider.restore(state)

    def drop(self) -> None:
        """Hold no state any more."""
        self._forward = []


# -- All that a region's forward saw beside its inputs, put back around its recomputation

# Dispatch modes are not among it: those that are on in backward stay on in recomputation, as torch's own do, so that
# what counts or traces the ops of a step sees all of them.


class AmbientState:
    """What was there at the start of one region call: random states, Python state, buffers, flags and modes.

    ``function``: what the region runs, beside the modules that own it. ``held``: tensors that objects among its
    arguments hold. ``recorded``: whether a recorder sees the ops of
    the forward. ``apart``: see ``ModuleState``. ``beside_torch``: torch's checkpoint puts torch's random states back.
    """

    __slots__ = ("_recorded", "autocast", "flags", "host_rng", "modes", "module_state", "provided", "reachable", "rng")

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        owners: tuple[nn.Module, ...],
        settings: Settings,
        function: Any = None,
        held: Iterable[torch.Tensor] = (),
        *,
        recorded: bool = True,
        not_recomputed: frozenset[int] = frozenset(),
        beside_torch: bool = False,
    ) -> None:
        self._recorded = recorded
        self.reachable = reachable = ReachableState(owners, function)
        self.provided = ProvidedState(settings.providers) if settings.providers else None
        self.rng = self.host_rng = None
        if settings.preserve_rng_state and not beside_torch:
            self.rng = RngSnapshot(tensors, settings, reachable.generators)
        if settings.preserve_rng_state:
            self.host_rng = HostRandomState(reachable.others)
        self.module_state = ModuleState(
            owners,
            (*reachable.tensors.values(), *held),
            freeze_buffers=settings.freeze_buffers,
            recorded=recorded,
            not_recomputed=not_recomputed,
        )
        self.flags = BackendFlags()
        self.autocast = AutocastState(tensors)
        self.modes = FunctionModes()
        keep_graphs_in_order_of_making()

    def close(self, where: str, *, needed: bool = True) -> None:
        """The forward is over: hold nothing that has not changed. ``needed``: whether a recomputation may come.

        Raises ``UnseenWriteError``, which names the region as ``where``, if one may come and the forward wrote to a
        parameter or a large buffer without a recorder.
        """
        self.module_state.close()
        if needed and not self._recorded and (problem := self.module_state.unseen_write(where)) is not None:
            raise UnseenWriteError(problem)

    def enter_on(self, stack: ExitStack) -> None:
        """Put everything back as it was in the forward, and as it is now when ``stack`` is left.

        Torch-function modes come last, so that they hear what the region does, and not what we do for it.
        """
        if self.rng is not None:
            stack.enter_context(self.rng)
        if self.host_rng is not None:
            stack.enter_context(self.host_rng)
        if self.provided is not None:
            self.provided.enter_on(stack)
        self.reachable.enter_on(stack)
        self.module_state.enter_on(stack)
        self.flags.enter_on(stack)
        self.autocast.enter_on(stack)
        self.modes.enter_on(stack)

    def process_flags(self) -> ExitStack:
        """Return a context in which the flags of the process are those of the forward; all that bare ops look at."""
        stack = ExitStack()
        self.flags.enter_on(stack)
        return stack

    def drop(self) -> None:
        """No recomputation will come: hold nothing that is of any size."""
        self.rng = self.host_rng = self.provided = None
        self.reachable.drop()
        self.module_state.drop()
