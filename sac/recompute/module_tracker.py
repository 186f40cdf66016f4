"""Tracks in which module of a region an op runs: instance-level forwards, and the dispatch modes that listen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

from torch import nn
from torch.compiler import is_dynamo_compiling

from sac.errors import Problem, RegionError
from sac.native.load import library
from sac.recompute.table import DecisionTable
from sac.torch_private import CAN_SKIP_DYNAMO, NO_TASK, TorchDispatchMode, current_graph_task_id, skip_dynamo

# -- Instance-level forwards that report the running module

# Note [Calls of modules in C++]
#
# `TrackedForward.__call__` runs once per module of a region. With the library its usual case is C++: no forward was on
# the module before, and no `ModulePass` is active, and the mode, if there is one, derives from the library's, which has
# its `path` and `sites`. All else is this class as it is: the library only replaces how the interpreter calls the
# function object (its `vectorcall`), and calls the function's Python in every other case. So what is installed,
# pickled, and traced by Dynamo is the same with the library and without it. While Dynamo looks at the frames that run,
# they are those of Python too.
#
# The library gets the listeners of a thread whenever they change. It knows nothing of a thread before that.


class ModuleListener(Protocol):
    """A dispatch mode that needs the module path of the ops it sees, like both modes of ``rerun.py``."""

    path: str
    sites: dict[Any, Any]

    @property
    def table(self) -> Any:
        """The decision table, which has the call sites of each module path."""


class ModulePass(Protocol):
    """Runs modules that are saved as a whole; see Note [Whole modules]."""

    def call_key_of(self, path: str) -> Any:
        """Return the key of the call of the module at ``path`` that begins now; None if ``call`` shall not run it."""

    def call(self, call_key: Any, forward: TrackedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module."""


Outer = tuple[ModuleListener | None, ModulePass | None]


class _Active(threading.local):
    listeners: Outer = None, None


_ACTIVE = _Active()  # one per thread: backward may run on a thread of its own


def enter(mode: ModuleListener | None, modules: ModulePass | None = None) -> Outer:
    """Make these the active listeners of this thread; return the previous ones."""
    outer = _ACTIVE.listeners
    leave((mode, modules))
    return outer


def leave(outer: Outer) -> None:
    """Make ``outer`` the active listeners again."""
    _ACTIVE.listeners = outer
    if (native := library()) is not None:
        native.listen(_CALL, *outer)


def takes_module(module: nn.Module) -> bool:
    """Return whether the forward of the module's class is passed the module, as a static method is not."""
    found = _forward_of(type(module))
    return hasattr(type(found), "__get__") and not isinstance(found, (staticmethod, classmethod))


def class_forward(module: nn.Module) -> Any:
    """Return what the module's class has as its forward now, bound as Python binds it."""
    cls = type(module)
    found = cls.__dict__.get("forward")
    if type(found) is FunctionType:  # the usual case
        return MethodType(found, module)
    found = _forward_of(cls)
    bind = getattr(type(found), "__get__", None)
    return found if bind is None else bind(found, module, cls)


def traced_forward(module: nn.Module, *, is_passed: bool) -> Any:
    """Do what ``class_forward`` does, for Dynamo. ``is_passed``: what ``takes_module`` has returned.

    Dynamo of torch 2.11 traces neither `__get__`, nor the creation of a bound method, nor a look into a class's dict.
    """
    forward = type(module).forward
    return partial(forward, module) if is_passed else forward


def _forward_of(cls: type) -> Any:
    return next(base.__dict__["forward"] for base in cls.__mro__ if "forward" in base.__dict__)


class TrackedForward:
    """An instance-level ``forward`` that sets its module's path on the active mode and calls the original forward.

    It can be pickled and is correct after ``deepcopy``: its module is an attribute, which both of them follow.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module = module
        self.path = path
        self.before = module.__dict__.get("forward")  # an instance-level forward that was there already
        self.is_passed = takes_module(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and report it to the active mode."""
        original = self.before
        if is_dynamo_compiling():  # cannot trace `_ACTIVE`
            if original is None:
                original = traced_forward(self.module, is_passed=self.is_passed)
            return original(*args, **kwargs)
        mode, modules = _ACTIVE.listeners
        if modules is not None and (call_key := modules.call_key_of(self.path)) is not None:
            return modules.call(call_key, self, args, kwargs)
        if original is None:
            original = class_forward(self.module)
        if mode is None:
            return original(*args, **kwargs)
        path, sites = mode.path, mode.sites
        mode.path = where = self.path
        try:
            mode.sites = mode.table.sites_at[where]
        except KeyError:
            mode.sites = mode.table.sites_of(where)
        try:
            return original(*args, **kwargs)
        finally:
            mode.path, mode.sites = path, sites

    def run_unheard(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module without reporting it or the modules inside."""
        outer = enter(None)
        try:
            original = self.before if self.before is not None else class_forward(self.module)
            return original(*args, **kwargs)
        finally:
            leave(outer)


_CALL = TrackedForward.__call__


# -- Base classes of dispatch modes

# Note [Out of Dynamo's sight]
#
# torch wraps the `__torch_dispatch__` of every mode in `torch._disable_dynamo`. So Dynamo does not compile the mode
# when it traces the code around a region (after a graph break). On every op, the wrapper takes about a fifth of the
# time of an empty mode. Private names of torch (2.11 to 2.13) have the same effect without overhead: they mark the
# method's code to be run as it is, with everything that it calls. Without them, torch's wrapper stays.
# Tested by test_modes_are_not_compiled.


class BareMode(TorchDispatchMode):
    """A dispatch mode that Dynamo skips; see Note [Out of Dynamo's sight]."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        method = cls.__dict__.get("__torch_dispatch__")
        if CAN_SKIP_DYNAMO and method is not None:
            skip_dynamo(method.__code__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not CAN_SKIP_DYNAMO


class RegionMode(BareMode):
    """A mode around one run of a region that knows in which module an op runs; see ``ModuleListener``."""

    supports_higher_order_operators = True
    region_path = ""  # for messages
    has_forked = False

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
        """Return the ``ModulePass`` that runs modules saved as a whole, or None; called when the mode is entered."""
        return None

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Return the context in which the module at ``path`` runs as a whole: no rule decides on its ops."""
        outer = self.path, self.sites
        self.path, self.sites = self.table.sites_inside(path)
        try:
            yield
        finally:
            self.path, self.sites = outer

    def is_forked(self) -> bool:
        """Return whether this thread, which is not the region's, was forked inside of it: the region will raise.

        A thread of backward may run ops for the region, which waits for it.
        """
        if current_graph_task_id() != NO_TASK:
            return False
        self.has_forked = True
        return True

    def __enter__(self) -> Any:
        self.thread = threading.get_ident()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._outer = enter(self, self.whole_modules())
        return self

    def __exit__(self, *error: Any) -> None:
        leave(self._outer)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.has_forked and error[0] is None:
            found = "another thread has run ops of this region, as `torch.jit.fork` does: their order is not known"
            fix = "do not fork inside of the block, or leave the block out of checkpointing"
            raise RegionError(Problem(self.region_path or "region", found, fix=fix))
