"""Random states (torch's, named streams, Python's, NumPy's), captured in forward and restored for recomputation."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sac.errors import ConfigError, Problem, RegionError
from sac.region.settings import Settings
from sac.region.undo import UndoStack
from sac.tensors import cloned, tell_of
from sac.torch_private import mps_generator

# -- Named random streams of trackers

# Note [Trackers of others]
#
# A tracker is an object with `get_states()` and `set_states(states)`: those of sac, Megatron-Core, TransformerEngine
# and DeepSpeed. A state is a tensor of bytes, or the generator itself (`graph-safe` trackers, which CUDA graphs can
# follow). `get_states` may return live objects. So tensors are copied. For a generator, its state is copied and later
# restored into the same generator, since CUDA graphs and other code may hold it.
#
# A fork of a graph-safe tracker makes the default generator share the state of the named one, so that both advance.
# `graphsafe_get_state` returns a generator that shares the default one's current state: not a copy, but a record of
# which state it shares. sac restores this sharing before the states themselves.
#
# Megatron-Core's tracker (and that of sac) records which stream is in use, and a nested fork depends on it; its
# `get_states` does not include that.

CURRENT = "_current_state_name"
_MISSING = object()

States = list[tuple[torch.Generator, torch.Tensor]]


def state_of(generator: torch.Generator) -> torch.Tensor:
    """Return a copy of a generator's state, a tensor of bytes on the CPU."""
    return tell_of(generator.get_state())


def states_of(generators: Iterable[torch.Generator]) -> States:
    """Return each generator with a copy of its state."""
    return [(generator, state_of(generator)) for generator in generators]


def put_back(states: States) -> None:
    """Set each generator to the state that it is paired with."""
    for generator, state in states:
        generator.set_state(state)


def tracker_of(getter: Callable[[], Any]) -> Any:
    """Return the tracker that ``getter`` returns; raises ``ConfigError`` if that is not a tracker."""
    if isinstance(getter, type):
        raise _error(
            f"it is the class {getter.__name__}, which makes a new tracker at each call",
            expected="a function that returns the tracker whose streams the region forks: lambda: tracker",
        )
    tracker = getter()
    if callable(getattr(tracker, "get_states", None)) and callable(getattr(tracker, "set_states", None)):
        return tracker
    raise _error(
        f"it returned {tracker!r}, which has no get_states() and set_states(states)",
        expected="a function that returns a tracker of named random states, such as sac.full.RngTracker",
    )


class NamedStates:
    """The current states of a tracker, which can be restored any number of times. See Note [Trackers of others].

    ``defaults``: the default generators of accelerators, which a fork may have tied to a named one.
    """

    __slots__ = ("_current", "_ties", "_values", "defaults", "generators")

    def __init__(self, tracker: Any, defaults: Sequence[torch.Generator]) -> None:
        states = tracker.get_states()
        if not isinstance(states, Mapping):
            raise _error(f"get_states() of its tracker returned {states!r}", expected="a mapping of name to state")
        self._values: dict[str, torch.Tensor | torch.Generator] = {}
        for name, value in states.items():
            if not isinstance(value, (torch.Tensor, torch.Generator)):
                raise _error(f"the state of {name!r} in its tracker is {value!r}", "a tensor, or a torch.Generator")
            self._values[name] = cloned(value) if isinstance(value, torch.Tensor) else value
        self._current = getattr(tracker, CURRENT, _MISSING)
        live = [value for value in self._values.values() if isinstance(value, torch.Generator)]
        self.generators = states_of(live)
        classes = {generator.device.type for generator in live}
        self.defaults = [default for default in defaults if default.device.type in classes]
        self._ties = [(default, default.graphsafe_get_state()) for default in self.defaults]

    def put_on(self, tracker: Any) -> None:
        """Restore the states on the tracker that is in use now."""
        for default, tied in self._ties:
            default.graphsafe_set_state(tied)
        if self._current is not _MISSING:
            setattr(tracker, CURRENT, self._current)
        if self._values or tracker.get_states():  # Megatron-Core's set_states marks it as in use, even for no states
            tracker.set_states(
                {name: cloned(one) if isinstance(one, torch.Tensor) else one for name, one in self._values.items()}
            )
        put_back(self.generators)


def _error(found: str, expected: str) -> ConfigError:
    return ConfigError(Problem("get_rng_state_tracker", found, expected=expected))


# -- Random states of torch

# Note [Random states]
#
# A region's recomputation has to draw the same numbers as its forward. So the state of each generator that the forward
# may draw from is captured at its start: the CPU's, those of the inputs' devices and of the accelerator's current
# device, those that the caller names, and the named streams of trackers. The recomputation restores them. When it ends,
# also by an error, all generators have the states from before it again. If restoring fails half-way, the changes so far
# are undone.
#
# A tracker's fork exchanges the state of a default generator. So trackers come first and default generators last, both
# when states are restored and when that is undone.


class RngSnapshot:
    """States of the generators that a region may draw from. See Note [Random states].

    ``tensors``: the default generators of their devices are included, in addition to those of the CPU and of the
    current device. ``also``: generators that the region's modules and arguments hold.

    Raises ``ConfigError`` if a function in ``settings.trackers`` returns no tracker, and ``RegionError`` while a CUDA
    graph is captured: torch does not allow reading or setting a generator's state then.
    """

    __slots__ = ("_accelerators", "_states", "_trackers")

    def __init__(
        self, tensors: Iterable[torch.Tensor], settings: Settings, also: Sequence[torch.Generator] = ()
    ) -> None:
        self._accelerators = _accelerator_generators(tensors)
        generators = [torch.default_generator, *self._accelerators]
        if settings.generators or also:
            # A default generator that a module holds is still restored last: see the note above.
            others = {one._cdata: one for one in (*settings.generators, *also)}  # type: ignore[attr-defined]
            for one in generators:
                others.pop(one._cdata, None)  # type: ignore[attr-defined]
            generators += others.values()
        try:
            self._states = states_of(generators)
            self._trackers = [
                (getter, NamedStates(tracker_of(getter), self._accelerators)) for getter in settings.trackers
            ]
        except RuntimeError as error:
            _blame_capture(error)
            raise

    @property
    def states(self) -> States:
        """The states of the default generators, those that the caller names and those in ``also``; not of trackers."""
        return self._states

    def put_back(self) -> None:
        """Restore the captured states of all generators permanently."""
        with UndoStack() as stack:
            self.enter_on(stack)
            stack.pop_all()

    def enter_on(self, stack: UndoStack, *, with_default: bool = True) -> None:
        """Restore the captured states; restore the current ones when ``stack`` is left.

        ``with_default``: also that of the CPU's default generator.
        """
        own = self._states if with_default else self._states[1:]
        if not own and not self._trackers:
            return
        try:
            stack.callback(put_back, states_of([generator for generator, _ in own]))
            for getter, states in self._trackers:
                tracker = tracker_of(getter)
                stack.callback(put_back, states_of([generator for generator, _ in states.generators]))
                stack.callback(NamedStates(tracker, states.defaults).put_on, tracker)
                states.put_on(tracker)
            put_back(own)
        except RuntimeError as error:
            _blame_capture(error)
            raise


def generators_now(settings: Settings) -> list[torch.Generator]:
    """Return the generators that ops may draw from on the CPU and on the current device, and those of ``settings``."""
    return [torch.default_generator, *_accelerator_generators(()), *settings.generators]


@contextmanager
def random_state_kept(tensors: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Restore the default generators of the CPU, of the current device and of those of ``tensors`` at the end."""
    states = states_of([torch.default_generator, *_accelerator_generators(tensors)])
    try:
        yield
    finally:
        put_back(states)


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that ops on ``device`` draw from when none is passed, or None if there is none yet.

    A device without an index means the current one of its type.
    """
    if device.type == "cpu":
        return torch.default_generator
    module: Any = getattr(torch, device.type, None)
    generators = getattr(module, "default_generators", ())
    if generators:  # empty until the device type is initialised
        index = device.index if device.index is not None else module.current_device()
        return generators[index] if index < len(generators) else None
    return mps_generator() if device.type == "mps" else None


def _accelerator_generators(tensors: Iterable[torch.Tensor]) -> list[torch.Generator]:
    """Return the generators of the devices of ``tensors`` and of the accelerator's current device, not the CPU's."""
    devices = {tensor.device for tensor in tensors if not (tensor.is_cpu or tensor.is_meta)}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None and not devices:
        return []
    found = [default_generator(device) for device in sorted(devices, key=str)]
    # Querying the current device initialises it, which a forked process must not do. MPS is always ready.
    if accelerator is not None and getattr(getattr(torch, accelerator.type, None), "is_initialized", lambda: True)():
        found.append(default_generator(accelerator))
    return list({generator: None for generator in found if generator is not None})


def _blame_capture(error: RuntimeError) -> None:
    """Raise an actionable error if ``error`` was caused by the capture of a CUDA graph."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RegionError(
            Problem(
                where="preserve_rng_state",
                found="random states can be neither read nor put back while a CUDA graph is captured",
                fix="pass preserve_rng_state=False if the region draws no random numbers, or capture it without "
                "checkpointing",
            )
        ) from error


# -- Random states of Python and NumPy

# Note [Random numbers of Python and NumPy]
#
# Models drop layers with `random.random()` and augment with `numpy.random`. So the states of both modules' own
# generators, and of generators that a region's modules and arguments hold, are recorded when its forward begins and
# restored while Python runs again. Replay runs no Python and needs none of them.
#
# Both modules' generators belong to the process. If a thread draws from them while another thread's recomputation has
# restored them, it draws from the wrong position of the sequence, and the same numbers are drawn again later. Threads
# that draw random numbers (a loader in the same process) need their own generators.

Reader = Callable[[], Any]
Writer = Callable[[Any], Any]


class HostRandomState:
    """States of Python's ``random``, of ``numpy.random`` and of ``others``."""

    __slots__ = ("_states",)

    def __init__(self, others: Iterable[Any] = ()) -> None:
        pairs = _PYTHON.pairs() + _NUMPY.pairs()
        for other in others:
            if (pair := reader_of(other)) is not None:
                pairs.append(pair)
        self._states = [(read, write, read()) for read, write in pairs]

    def has_moved(self) -> bool:
        """Return whether one of the generators has advanced since this was made."""
        return any(not _equal(read(), state) for read, _, state in self._states)

    def again(self) -> HostRandomState:
        """Return the current states of the same generators."""
        found = HostRandomState.__new__(HostRandomState)
        found._states = [(read, write, read()) for read, write, _ in self._states]
        return found

    @property
    def is_hidden(self) -> bool:
        """Whether a generator may change, with nothing to show it in the memory that ``places`` gives."""
        return any(isinstance(state, dict) and state["has_gauss"] for _, _, state in self._states)

    def put_back(self) -> None:
        """Restore the captured states of all generators permanently."""
        for _, write, state in self._states:
            write(state)

    def put_back_moved(self) -> None:
        """Restore the captured states of the generators that have moved permanently."""
        for read, write, state in self._states:
            _set_to(read, write, state)

    def enter_on(self, stack: UndoStack) -> None:
        """Restore the captured states; restore the current ones when ``stack`` is left."""
        for read, write, state in self._states:
            present = read()
            stack.callback(_set_to, read, write, present)
            if state is not present and not _equal(state, present):
                write(state)


def _set_to(read: Reader, write: Writer, state: Any) -> None:
    if not _equal(read(), state):
        write(state)


class _Python:
    """The generator behind ``random``'s functions; reading its state takes microseconds unless it has not advanced.

    What shows that is the memory of the object: an index and 624 words, behind the header that all objects have
    (CPython 3.10 to 3.14). Where they are not found there, the state is read each time.
    """

    _LAYOUT = "i624I"

    def __init__(self) -> None:
        self._last: tuple[Any, Any] = None, None
        generator = getattr(random.getstate, "__self__", None)
        self._generator: Any = generator if type(generator) is random.Random and self._has_layout() else None
        self._address = id(generator) + object.__basicsize__

    def pairs(self) -> list[tuple[Reader, Writer]]:
        """Return functions that read and restore its state."""
        return [(self._read if self._generator is not None else random.getstate, random.setstate)]

    def place(self) -> tuple[Any, int]:
        """Return the generator, and the address of its words; 0 if that is not known."""
        return self._generator, self._address if self._generator is not None else 0

    def _has_layout(self) -> bool:
        sample = random.Random(5)
        if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + 2500:
            return False
        index, *words = struct.unpack(self._LAYOUT, ctypes.string_at(id(sample) + object.__basicsize__, 2500))
        return bool(sample.getstate()[1] == (*words, index))

    def _read(self) -> Any:
        seen = self._seen()
        before, state = self._last
        if seen == before:
            return state
        found = random.getstate()
        if self._seen() == seen:  # another thread may draw meanwhile
            self._last = seen, found
        return found

    def _seen(self) -> tuple[bytes, float | None]:
        return ctypes.string_at(self._address, 2500), self._generator.gauss_next


class _NumPy:
    """The generator behind ``numpy.random``'s functions; reading its state is slow unless it has not advanced."""

    _BYTES = 624 * 4 + 4  # NumPy's documented layout of a Mersenne twister: 624 words and a position

    def __init__(self) -> None:
        self._last: tuple[bytes, dict[str, Any]] = b"", {}
        self._source: Any = None  # the generator whose words are at the address
        self._address = 0

    def pairs(self) -> list[tuple[Reader, Writer]]:
        """Return functions that read and restore its state; none until ``numpy.random`` is imported."""
        module = sys.modules.get("numpy.random")
        return [(self._read, module.set_state)] if module is not None and hasattr(module, "set_state") else []

    def place(self) -> tuple[Any, Any, int]:
        """Return the module ``numpy.random``, its generator, and the address of its words; 0 if that is not known."""
        module: Any = sys.modules.get("numpy.random")
        is_known = bool(self.pairs()) and bool(self._words(module))
        return module, *((self._source, self._address) if is_known else (None, 0))

    def _read(self) -> dict[str, Any]:
        numpy_random: Any = sys.modules["numpy.random"]
        words = self._words(numpy_random)
        before, state = self._last
        # The twister's words do not show whether the second number of a pair of normal numbers is still pending.
        if words and words == before and not state["has_gauss"]:
            return state
        found: dict[str, Any] = numpy_random.get_state(legacy=False)
        if self._words(numpy_random) == words:  # another thread may draw meanwhile
            self._last = words, found
        return found

    def _words(self, numpy_random: Any) -> bytes:
        get: Any = getattr(numpy_random, "get_bit_generator", None)  # NumPy 1.24
        source: Any = get() if get is not None else None
        if source is not self._source:
            is_known = type(source).__name__ == "MT19937"
            self._address = source.ctypes.state_address if is_known else 0
            self._source = source
        return ctypes.string_at(self._address, self._BYTES) if self._address else b""


_PYTHON, _NUMPY = _Python(), _NumPy()


def places() -> tuple[Any, int, Any, Any, int]:
    """Return where the states are of Python's own generator and of NumPy's, as the C++ library reads them."""
    return *_PYTHON.place(), *_NUMPY.place()


def is_random_source(value: Any) -> bool:
    """Return whether ``value`` is a generator of Python or NumPy whose state can be read and restored."""
    return reader_of(value) is not None


def reader_of(value: Any) -> tuple[Reader, Writer] | None:
    """Return functions that read and restore the state of a generator of Python or NumPy; None for other objects."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else (value.getstate, value.setstate)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None or not hasattr(numpy_random, "Generator"):
        return None
    if isinstance(value, numpy_random.RandomState):
        return partial(value.get_state, legacy=False), value.set_state
    if isinstance(value, numpy_random.Generator):
        source = value.bit_generator
        return (lambda: source.state), partial(setattr, source, "state")
    return None


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other)
