"""Counts how often Python ran a module's forward, recomputation included, where no region can reach the count.

What a region can reach is put back around a recomputation, so that an attribute counts calls and not runs. In a file of
its own: a table that changes, held by a region's own file, would make the region another one each time.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_RUNS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def note_run(module: nn.Module) -> int:
    """Count one run of the module's forward; return which one it is, the first being 1."""
    _RUNS[module] = runs_of(module) + 1
    return _RUNS[module]


def runs_of(module: nn.Module) -> int:
    """How often the module's forward was run."""
    return _RUNS.get(module, 0)


_NOTED: WeakKeyDictionary[Noted, list[Any]] = WeakKeyDictionary()


class Noted(MutableSequence[Any]):
    """A list for what the runs of a region note, recomputation included: a list in a closure would be put back."""

    __slots__ = ("__weakref__",)

    def __init__(self, *values: Any) -> None:
        _NOTED[self] = [*values]

    def __getitem__(self, index: Any) -> Any:
        return _NOTED[self][index]

    def __setitem__(self, index: Any, value: Any) -> None:
        _NOTED[self][index] = value

    def __delitem__(self, index: Any) -> None:
        del _NOTED[self][index]

    def __len__(self) -> int:
        return len(_NOTED[self])

    def insert(self, index: int, value: Any) -> None:
        _NOTED[self].insert(index, value)

    def __eq__(self, other: object) -> bool:
        return self is other or list(self) == other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return repr(_NOTED[self])
