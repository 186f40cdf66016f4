"""In which module of a region an op runs: forwards that say so, and the dispatch modes that are told."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch import nn

from sac.recompute.table import DecisionTable
from sac.torch_private import CAN_SKIP_DYNAMO, TorchDispatchMode, skip_dynamo

# -- Which module of a region runs now, told by thin instance-level forwards on the region's sub-modules


class ModuleListener(Protocol):
    """A mode that wants to know the module path of what it sees; both modes of ``rerun.py`` do."""

    path: str
    sites: dict[Any, Any]

    @property
    def table(self) -> Any:
        """What says which op is decided on, and how, in which module."""


class ModulePass(Protocol):
    """What runs modules that are saved as a whole in its own way; see Note [Whole modules]."""

    def call_key_of(self, path: str) -> Any:
        """Return which call of the module at ``path`` begins if it is one to be run by ``call``, else None."""

    def call(self, place: Any, forward: TrackedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module."""


class _Active(threading.local):
    mode: ModuleListener | None = None
    modules: ModulePass | None = None


_ACTIVE = _Active()  # one per thread: backward may run on a thread of its own

Outer = tuple[ModuleListener | None, ModulePass | None]


def enter(mode: ModuleListener | None, modules: ModulePass | None = None) -> Outer:
    """Make these the ones that hear of modules on this thread; returns those before them."""
    outer = _ACTIVE.mode, _ACTIVE.modules
    _ACTIVE.mode, _ACTIVE.modules = mode, modules
    return outer


def leave(outer: Outer) -> None:
    """Give the word back to ``outer``."""
    _ACTIVE.mode, _ACTIVE.modules = outer


class TrackedForward:
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
        if modules is not None and (place := modules.call_key_of(self.path)) is not None:
            return modules.call(place, self, args, kwargs)
        mode = _ACTIVE.mode
        if mode is None:
            return type(module).forward(module, *args, **kwargs) if original is None else original(*args, **kwargs)
        path, sites = mode.path, mode.sites
        mode.path, mode.sites = self.path, mode.table.sites_of(self.path)
        try:
            return type(module).forward(module, *args, **kwargs) if original is None else original(*args, **kwargs)
        finally:
            mode.path, mode.sites = path, sites

    def run_unheard(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module, and let nobody hear of it and of the modules inside."""
        outer = enter(None)
        try:
            if self.before is not None:
                return self.before(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            leave(outer)


# -- What dispatch modes have in common: Dynamo is told once, not at every op, to leave them; they hear of modules

# Note [Out of Dynamo's sight]
#
# torch wraps the `__torch_dispatch__` of every mode in `torch._disable_dynamo`, so that Dynamo, where it watches the
# code around a region (after a graph break), does not compile the mode. The wrapper costs about a fifth of an empty
# mode's time, on every op. Private names of torch (2.11 to 2.13) do the same at no cost: the code of the method is
# marked to be run as it is, with all that it calls. Where they are missing, torch's wrapper stays.
# Held by test_modes_are_not_compiled.


class BareMode(TorchDispatchMode):
    """See Note [Out of Dynamo's sight]."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        method = cls.__dict__.get("__torch_dispatch__")
        if CAN_SKIP_DYNAMO and method is not None:
            skip_dynamo(method.__code__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not CAN_SKIP_DYNAMO


class RegionMode(BareMode):
    """A mode around one run of a region, which is told in which of its modules an op runs; see ``ModuleListener``."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function inside the region may be used under this mode."""
        return True

    def __init__(self, table: DecisionTable) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table
        self.path = ""
        self.sites = table.sites_of("")

    def whole_modules(self) -> ModulePass | None:
        """Return what runs modules that are saved as a whole, None if nothing does; asked as the mode is entered."""
        return None

    def __enter__(self) -> Any:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._outer = enter(self, self.whole_modules())
        return self

    def __exit__(self, *error: Any) -> None:
        leave(self._outer)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
