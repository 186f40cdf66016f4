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

    @property
    def table(self) -> Any:
        """What says which op is decided on, and how, in which module."""


class ModulePass(Protocol):
    """What runs modules that are saved as a whole in its own way; see Note [Whole modules]."""

    def place_of(self, path: str) -> Any:
        """Return which call of the module at ``path`` begins if it is one to be run by ``call``, else None."""

    def call(self, place: Any, forward: ScopedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module."""


class _Active(threading.local):
    mode: Scoped | None = None
    modules: ModulePass | None = None


_ACTIVE = _Active()  # one per thread: backward may run on a thread of its own

Outer = tuple[Scoped | None, ModulePass | None]


def enter(mode: Scoped | None, modules: ModulePass | None = None) -> Outer:
    """Make these the ones that hear of modules on this thread; returns those before them."""
    outer = _ACTIVE.mode, _ACTIVE.modules
    _ACTIVE.mode, _ACTIVE.modules = mode, modules
    return outer


def leave(outer: Outer) -> None:
    """Give the word back to ``outer``."""
    _ACTIVE.mode, _ACTIVE.modules = outer


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
        modules = _ACTIVE.modules
        if modules is not None and (place := modules.place_of(self.path)) is not None:
            return modules.call(place, self, args, kwargs)
        mode = _ACTIVE.mode
        if mode is None:
            return type(module).forward(module, *args, **kwargs) if original is None else original(*args, **kwargs)
        path, plans = mode.path, mode.plans
        mode.path, mode.plans = self.path, mode.table.scope(self.path)
        try:
            return type(module).forward(module, *args, **kwargs) if original is None else original(*args, **kwargs)
        finally:
            mode.path, mode.plans = path, plans

    def run_unheard(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module, and let nobody hear of it and of the modules inside."""
        outer = enter(None)
        try:
            if self.before is not None:
                return self.before(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            leave(outer)
