"""Random states (torch's, named streams, Python's, NumPy's), captured in forward and restored for recomputation."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from sac.engine.rng import CURRENT as CURRENT
from sac.engine.rng import GeneratorStates as States
from sac.engine.rng import NamedStates as NamedStates
from sac.engine.rng import RngSnapshot as RngSnapshot
from sac.engine.rng import default_generator as default_generator
from sac.engine.rng import default_generators
from sac.engine.rng import random_state_kept as random_state_kept
from sac.engine.rng import set_states as put_back
from sac.engine.rng import state_of as state_of
from sac.engine.rng import states_of as states_of
from sac.engine.rng import tracker_of as tracker_of
from sac.region.settings import Settings
from sac.region.undo import UndoStack

__all__ = ["States", "put_back"]


def generators_now(settings: Settings) -> list[torch.Generator]:
    """Return the generators that ops may draw from on the CPU and on the current device, and those of ``settings``."""
    return [*default_generators(), *settings.generators]


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
