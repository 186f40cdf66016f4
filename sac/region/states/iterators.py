"""Copies of iterators, so that a recomputation can draw from one what the forward drew."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

# Those of Python's own containers and functions, and those of itertools: they tell what they are made of
# (`__reduce__`), those of itertools up to Python 3.13. Generators cannot be copied, nor what draws from one.
_EMPTY: dict[Any, Any] = {}
_SOURCES: tuple[Any, ...] = (_EMPTY, _EMPTY.values(), _EMPTY.items(), [], (), set(), "", b"", bytearray(), range(0))
ITERATORS = frozenset(
    {
        *(type(iter(source)) for source in (*_SOURCES, range(1 << 70))),
        *(type(reversed(source)) for source in (*_SOURCES[:3], [])),
        *(enumerate, filter, map, reversed, zip),
        *(one for one in vars(itertools).values() if isinstance(one, type) and hasattr(one, "__next__")),
    }
)


def copy_of_iterator(value: Any) -> Any:
    """Return an iterator that will give the same objects as ``value``.

    Raises ``TypeError`` if there can be no copy.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        make, given, *state = value.__reduce__()
    made = make(*map(_part, given))
    if state and state[0] is not None:
        made.__setstate__(_state(state[0]))
    return made


def _part(value: Any) -> Any:
    if type(value) in ITERATORS:
        return copy_of_iterator(value)
    if hasattr(type(value), "__next__"):
        raise TypeError(f"an iterator of type {type(value).__name__} cannot be copied")
    return value


def _state(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_state, value))
    return [*value] if type(value) is list else _part(value)  # a cycle puts what it has seen into its list
