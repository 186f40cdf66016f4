"""Calls of the modules of a region: the library does what `TrackedForward.__call__` does, and leaves it the rest."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.recompute import module_tracker
from sac.recompute.module_tracker import RegionMode, TrackedForward, enter, leave
from tests.support.native_engine import LIBRARY, needs_library

pytestmark = needs_library

CODE = TrackedForward.__call__.__code__
IN_PYTHON = FunctionType(CODE, vars(module_tracker))  # the library has not taken this one over
WAYS = {"library": TrackedForward.__call__, "python": IN_PYTHON}


class Table:
    """Has call sites, as a decision table."""

    def __init__(self, *paths: str) -> None:
        self.sites_at: dict[str, dict[int, Any]] = {path: {} for path in ("", *paths)}

    def sites_of(self, path: str) -> dict[int, Any]:
        return self.sites_at.setdefault(path, {})


class PythonMode(RegionMode):
    """A mode that the library does not know."""


class Noting(nn.Module):
    """Notes how it was called, where the mode was, and whether Python made the call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.mode: Any = None
        self.inner: Callable[[], Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.note(args, kwargs)
        if self.inner is not None:
            self.inner()
        self.note(args, kwargs)
        return args

    def note(self, *given: Any) -> None:
        mode = self.mode
        where = (mode.path, mode.sites is mode.table.sites_at[mode.path]) if mode is not None else None
        self.seen.append((*given, where))


def native_mode(*paths: str) -> Any:
    return type("NativeMode", (LIBRARY.Mode, RegionMode), {})(Table(*paths))  # type: ignore[union-attr]


def track(module: nn.Module, path: str, way: str = "library") -> Any:
    module.__dict__["forward"] = MethodType(WAYS[way], TrackedForward(module, path))
    return module


@pytest.fixture(autouse=True)
def usual_evaluator() -> Iterator[Callable[[bool], None]]:
    """The interpreter itself runs frames. Dynamo may still do so if an earlier test of this process compiled in another
    thread, which has ended. Called with False, what was there before does.
    """
    api = ctypes.pythonapi
    get_interpreter = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyInterpreterState_Get", api))
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("_PyInterpreterState_GetEvalFrameFunc", api))
    put = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(("_PyInterpreterState_SetEvalFrameFunc", api))
    usual, before = ctypes.cast(api._PyEval_EvalFrameDefault, ctypes.c_void_p), get(get_interpreter())

    def to(is_usual: bool) -> None:
        put(get_interpreter(), usual if is_usual else before)

    to(True)
    yield to
    to(False)


@pytest.fixture(autouse=True)
def listeners() -> Iterator[None]:
    """No listeners, which the library knows."""
    outer = enter(None)
    yield
    leave(outer)


class Caller(nn.Module):
    """Returns whether Python made the call."""

    def forward(self, x: Any = None) -> bool:
        return sys._getframe(1).f_code is CODE


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "one": ((1,), {}),
    "keywords": ((), {"b": 2, "a": 1}),
    "both": ((1, None), {"a": 3}),
    "many": (tuple(range(15)), {}),
    "too_many": (tuple(range(10)), {f"a{i}": i for i in range(10)}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode_of", [lambda: None, native_mode, lambda: PythonMode(Table())])
def test_module_gets_the_arguments_and_the_mode_its_path(mode_of: Callable[[], Any], call: str) -> None:
    args, kwargs = CALLS[call]
    seen = []
    for way in WAYS:
        module = track(Noting(), "a", way)
        module.mode = mode = mode_of()
        enter(mode)
        for _ in range(2):  # in the first one the path is new
            assert module(*args, **kwargs) == args
            assert mode is None or (mode.path, mode.sites is mode.table.sites_at[""]) == ("", True)
        seen.append(module.seen)
    assert seen[0] == seen[1] == [(args, kwargs, None if mode is None else ("a", True))] * 4


def test_usual_calls_are_the_librarys() -> None:
    module, mode = track(Caller(), "a"), native_mode("a")
    assert not module()
    enter(mode)
    assert not module(1)
    assert not module(x=1)
    assert track(Caller(), "b")()  # a new path
    assert not track(Caller(), "b")()
    enter(PythonMode(Table("a")))
    assert module()
    leave((None, None))
    assert not module()


def test_module_inside_of_itself() -> None:
    seen = []
    for way in WAYS:
        outer, inner = track(Noting(), "a", way), track(Noting(), "a.b", way)
        outer.mode = inner.mode = mode = native_mode("a", "a.b")
        enter(mode)
        calls = iter([inner, outer, inner])
        outer.inner = inner.inner = lambda calls=calls: next(calls, tuple)()
        outer()
        seen.append((outer.seen, inner.seen))
    assert seen[0] == seen[1]
    assert [where for *_, (where, _) in seen[0][0]] == ["a"] * 4
    assert [where for *_, (where, _) in seen[0][1]] == ["a.b"] * 4


@pytest.mark.parametrize("way", WAYS)
def test_error_leaves_the_mode_where_it_was(way: str) -> None:
    module, mode = track(Noting(), "a", way), native_mode("a")

    def fail() -> None:
        raise KeyError("mine")

    module.inner = fail
    enter(mode)
    with pytest.raises(KeyError, match="mine") as error:
        module()
    assert [entry.name for entry in error.traceback][-2:] == ["forward", "fail"]
    assert (mode.path, mode.sites is mode.table.sites_at[""]) == ("", True)
    with pytest.raises(TypeError, match="from 1 to 2"):
        track(Caller(), "a", way)(1, 2)
    assert mode.path == ""


@pytest.mark.parametrize("way", WAYS)
def test_forward_is_looked_up_in_each_call(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(nn.Module):
        def forward(self) -> str:
            return "class"

    module = track(Changing(), "a", way)
    enter(native_mode("a"))
    assert module() == "class"
    monkeypatch.setattr(Changing, "forward", lambda self: "changed")
    assert module() == "changed"
    ours = module.forward
    module.forward = lambda: "instance"
    assert module() == "instance"
    module.forward = ours
    assert module() == "changed"
    ours.__self__.before = lambda: "before"
    assert module() == "before"
    ours.__self__.before = None
    monkeypatch.setattr(Changing, "forward", staticmethod(lambda *given: given))
    assert module() == ()
    monkeypatch.setattr(Changing, "forward", classmethod(lambda *given: given))
    assert module() == (Changing,)
    ours.__self__.module = track(Caller(), "b")
    assert module() == (way == "python")


def test_pass_over_modules_gets_the_call() -> None:
    class Pass:
        def call_key_of(self, path: str) -> Any:
            return path if path == "a" else None

        def call(self, call_key: Any, forward: Any, args: Any, kwargs: Any) -> Any:
            return call_key, forward.path, args, kwargs

    for mode in (None, native_mode("a", "b")):
        enter(mode, Pass())
        assert track(Caller(), "a")(1, x=2) == ("a", "a", (1,), {"x": 2})
        assert track(Caller(), "b")()
        leave((mode, None))
        assert not track(Caller(), "a")()


def test_each_thread_has_its_own_listeners() -> None:
    module = track(Noting(), "a")
    module.mode = mode = native_mode("a")
    enter(mode)
    found: list[Any] = []

    def other() -> None:
        found.append(track(Caller(), "a")())  # the library knows nothing of this thread
        module()
        other_mode = native_mode("a")
        outer = enter(other_mode)
        module.mode = other_mode
        found.append(track(Caller(), "a")())
        module()
        leave(outer)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [True, False]
    assert [where for *_, (where, _) in module.seen] == ["", "", "a", "a"]
    assert mode.path == ""


def test_other_evaluator_of_frames_sees_python(usual_evaluator: Callable[[bool], None]) -> None:
    module = track(Caller(), "a")
    enter(native_mode("a"))
    usual_evaluator(False)  # Dynamo puts its own only where it thinks that there is none
    assert torch._dynamo.run(lambda: module())()  # type: ignore[no-untyped-call]
    usual_evaluator(True)
    assert not module()


def test_what_is_pickled_or_copied_knows_no_library() -> None:
    model = sac.apply(nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU())), {"mode": "full", "blocks": ["0"]})
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
    tracked = [module for module in model.modules() if "forward" in vars(module)]
    assert any(type(module.forward.__self__) is TrackedForward for module in tracked)
    assert {type(module.forward) for module in tracked} == {MethodType}
    data = pickle.dumps(model)
    assert b"_sac_native" not in data
    enter(native_mode("a"))
    for copied in (pickle.loads(data), copy.deepcopy(model)):
        for module in copied.modules():
            if "forward" in vars(module):
                assert module.forward.__self__.module is module
                assert module.forward.__func__ is type(module.forward.__self__).__call__
    for made in (copy.deepcopy(track(Caller(), "a")), pickle.loads(pickle.dumps(track(Caller(), "a")))):
        assert not made()


def test_nothing_stays_alive() -> None:
    module, mode = track(Caller(), "a"), native_mode("a")
    mode.table.sites_at["mode"] = {0: mode}  # cycles that only the collector ends
    mode.table.sites_at["a"][0] = mode
    outer = enter(mode)
    assert not module()
    leave(outer)
    dead = weakref.ref(mode), weakref.ref(module)
    del mode, module
    gc.collect()
    assert [one() for one in dead] == [None, None]


def test_calls_release_what_they_hold() -> None:
    module, mode = track(Caller(), "a"), native_mode("a")
    failing = track(Noting(), "a")
    failing.inner = lambda: 1 / 0
    enter(mode)
    held = (module, failing, mode, mode.sites, mode.table.sites_at["a"], type(module).forward)

    def calls() -> list[int]:
        for _ in range(50):
            module(1)
            module(x=1)
            with pytest.raises(ZeroDivisionError):
                failing(1)
        gc.collect()
        return [sys.getrefcount(one) for one in held]

    assert calls() == calls()
