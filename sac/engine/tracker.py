"""In which module of a region an op runs: instance-level forwards that tell the active dispatch mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from sac.engine.table import DecisionTable, ResolvedRule
from sac.torch_private import TorchDispatchMode, skip_dynamo


class _Active(threading.local):
    mode: Any = None


_ACTIVE = _Active()  # one per thread: backward may run on a thread of its own


def active_mode() -> Any:
    """Return the region's mode that is active in this thread, None if there is none."""
    return _ACTIVE.mode


@contextmanager
def without_mode() -> Iterator[None]:
    """Run the body as if no region's mode were active: no module reports to it."""
    outer, _ACTIVE.mode = _ACTIVE.mode, None
    try:
        yield
    finally:
        _ACTIVE.mode = outer


def takes_module(module: nn.Module) -> bool:
    """Return whether the forward of the module's class is passed the module, as a static method is not."""
    forward = _forward_of(type(module))
    return hasattr(type(forward), "__get__") and not isinstance(forward, (staticmethod, classmethod))


def class_forward(module: nn.Module) -> Any:
    """Return what the module's class has as its forward now, bound as Python binds it."""
    cls = type(module)
    forward = cls.__dict__.get("forward")
    if type(forward) is FunctionType:  # the usual case
        return MethodType(forward, module)
    forward = _forward_of(cls)
    bind = getattr(type(forward), "__get__", None)
    return forward if bind is None else bind(forward, module, cls)


def traced_forward(module: nn.Module, *, is_passed: bool) -> Any:
    """Do what ``class_forward`` does, for Dynamo, which traces neither `__get__` nor a look into a class's dict."""
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
        if original is None:
            original = class_forward(self.module)
        mode = _ACTIVE.mode
        if mode is None:
            return original(*args, **kwargs)
        before = mode.enter_module(self.path)
        try:
            return original(*args, **kwargs)
        finally:
            mode.leave_module(before)


class BareMode(TorchDispatchMode):
    """A dispatch mode that Dynamo skips."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        method = cls.__dict__.get("__torch_dispatch__")
        if method is not None:
            skip_dynamo(method.__code__)  # does what torch's own wrapper does, in a fifth less time per op

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class RegionMode(BareMode):
    """A mode around one run of a region that knows in which module an op runs."""

    supports_higher_order_operators = True
    compiled_graphs = 0  # that ran under it
    takes_functions = False  # whether calls of autograd functions are recorded
    spans: list[tuple[range, str, str]] | None = None  # if they are not: entries, function, module

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function inside the region may be used under this mode."""
        return True

    def __init__(self, table: DecisionTable) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table
        self.path = ""
        self.unit_rule: ResolvedRule | None = None  # which recomputes the unit that runs, with the ops inside
        self.sites = table.sites_of("")

    def __enter__(self) -> Any:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._outer, _ACTIVE.mode = _ACTIVE.mode, self
        return self

    def enter_module(self, path: str) -> Any:
        """Ops run in the module at ``path`` from now on, also for regions around this one; return what was before."""
        outer = None if self._outer is None else self._outer.enter_module(path)
        before = self.path, self.sites, outer
        self.path, self.sites = path, self.table.sites_of(path, self.unit_rule)
        return before

    def leave_module(self, before: Any) -> None:
        """Take back ``enter_module``, which has returned ``before``."""
        self.path, self.sites, outer = before
        if self._outer is not None:
            self._outer.leave_module(outer)

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.mode = self._outer
        super().__exit__(*error)  # type: ignore[no-untyped-call]
