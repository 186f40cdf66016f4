"""Random generators of Python and NumPy: their states at the start of a region, put back where Python runs again."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

# Note [Random numbers of Python and NumPy]
#
# Layers are dropped by `random.random()` and augmented by `numpy.random`. So the states of both modules' own generators
# are noted when a region's forward begins, with those of generators that its modules and arguments hold, and are put
# back while Python runs again. Replay runs no Python and needs none of them.
#
# Both modules' generators belong to the process. A thread that draws from them while another one's recomputation has
# them put back draws from the wrong place of the sequence, and what it draws is drawn again later: threads that draw
# (a loader in the same process) need generators of their own.

Reader = Callable[[], Any]
Writer = Callable[[Any], Any]


class HostRandomState:
    """States of Python's ``random``, of ``numpy.random`` and of ``others``, to be put back for a while."""

    __slots__ = ("_entered", "_states")

    def __init__(self, others: Iterable[Any] = ()) -> None:
        pairs = [(random.getstate, random.setstate), *_NUMPY.pairs()]
        pairs += [pair for pair in map(reader_of, others) if pair is not None]
        self._states = [(read, write, read()) for read, write in pairs]
        self._entered: list[list[Any]] = []  # a list: a region can be recomputed inside its own recomputation

    def has_moved(self) -> bool:
        """Return whether one of the generators has moved since this was made."""
        return any(not _equal(read(), state) for read, _, state in self._states)

    def again(self) -> HostRandomState:
        """Return the states of the same generators as they are now."""
        found = HostRandomState.__new__(HostRandomState)
        found._states = [(read, write, read()) for read, write, _ in self._states]
        found._entered = []
        return found

    def put_back(self) -> None:
        """Let all generators stand where they stood when this was made, for good."""
        for _, write, state in self._states:
            write(state)

    def __enter__(self) -> None:
        present = [read() for read, _, _ in self._states]
        self._entered.append(present)
        for (_, write, state), now in zip(self._states, present, strict=True):
            if not _equal(state, now):
                write(state)

    def __exit__(self, *error: Any) -> None:
        for (read, write, _), present in zip(self._states, self._entered.pop(), strict=True):
            if not _equal(read(), present):
                write(present)


class _NumPy:
    """The generator behind ``numpy.random``'s functions; reading its state takes long, unless it has not moved."""

    _BYTES = 624 * 4 + 4  # NumPy's documented layout of a Mersenne twister: 624 words and a position

    def __init__(self) -> None:
        self._last: tuple[bytes, dict[str, Any]] = b"", {}

    def pairs(self) -> list[tuple[Reader, Writer]]:
        """Return how to read and how to put it back; nothing as long as nobody has imported ``numpy.random``."""
        module = sys.modules.get("numpy.random")
        return [(self._read, module.set_state)] if module is not None and hasattr(module, "set_state") else []

    def _read(self) -> dict[str, Any]:
        numpy_random: Any = sys.modules["numpy.random"]
        words = self._words(numpy_random)
        before, state = self._last
        # The twister's words do not show whether half of a pair of normal numbers waits to be given out.
        if words and words == before and not state["has_gauss"]:
            return state
        found: dict[str, Any] = numpy_random.get_state(legacy=False)
        self._last = words, found
        return found

    def _words(self, numpy_random: Any) -> bytes:
        get: Any = getattr(numpy_random, "get_bit_generator", None)  # NumPy 1.24
        source: Any = get() if get is not None else None
        if type(source).__name__ != "MT19937":
            return b""
        return ctypes.string_at(source.ctypes.state_address, self._BYTES)


_NUMPY = _NumPy()


def is_random_source(value: Any) -> bool:
    """Return whether ``value`` is a generator of Python's or NumPy's whose state can be read and put back."""
    return reader_of(value) is not None


def reader_of(value: Any) -> tuple[Reader, Writer] | None:
    """Return how to read and how to put back the state of a generator of Python's or NumPy's; None for all else."""
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
