"""Which module of a region runs now, told by thin instance-level forwards on the region's sub-modules."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch import nn


class Scoped(Protocol):
    """A mode that wants to know the module path of what it sees; both modes of ``modes.py`` do."""

    path: str
    plans: dict[Any, Any]
    record: Any


class _Active(threading.local):
    mode: Scoped | None = None


_ACTIVE = _Active()  # one per thread: backward may run on a thread of its own


def enter(mode: Scoped) -> Scoped | None:
    """Make ``mode`` the one that hears of modules on this thread; returns the one before it."""
    outer, _ACTIVE.mode = _ACTIVE.mode, mode
    return outer


def leave(outer: Scoped | None) -> None:
    """Give the word back to ``outer``."""
    _ACTIVE.mode = outer


class ScopedForward:
    """An instance-level ``forward`` that names its module to the active mode and else only calls on.

    Picklable, and right after ``deepcopy``: it refers to its module as an attribute, which both of them follow.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module = module
        self.path = path
        self.before = module.__dict__.get("forward")  # an instance-level forward that somebody else had put there

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and say so."""
        module = self.module
        original = self.before
        if torch.compiler.is_compiling():
            return type(module).forward(module, *args, **kwargs) if original is None else original(*args, **kwargs)
        mode = _ACTIVE.mode
        if mode is None:
            return type(module).forward(module, *args, **kwargs) if original is None else original(*args, **kwargs)
        path, plans = mode.path, mode.plans
        mode.path, mode.plans = self.path, mode.record.table.scope(self.path)
        try:
            return type(module).forward(module, *args, **kwargs) if original is None else original(*args, **kwargs)
        finally:
            mode.path, mode.plans = path, plans
