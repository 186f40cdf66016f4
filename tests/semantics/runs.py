"""Counts how often Python ran a module's forward, recomputation included, where no region can reach the count.

What a region can reach is put back around a recomputation, so that an attribute counts calls and not runs. In a file of
its own: a table that changes, held by a region's own file, would make the region another one each time.
"""

from __future__ import annotations

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
