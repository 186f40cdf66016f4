"""Promise 1 for Python state in unusual places: what a recomputation changes is put back, and finds what it found.

The oracle is that of test_exact_when_programs_change.py: the same model without sac, over six steps.
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import functools
import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

import sac
import tests.promises.outside
from tests.promises import outside
from tests.promises.test_exact_when_programs_change import APPLIED, Block, Model, assert_same

WAYS = ["full", "rerun", "whole module", "reentrant"]
COUNT = 0


class CountsToo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return x * COUNT


class TwoClasses(Block):
    """A class and that of its child change one global."""

    def __init__(self) -> None:
        super().__init__()
        self.child = CountsToo()

    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return x + self.mlp(self.child(x).sin() * COUNT)


class FirstSetLater(Block):
    """An attribute of a Python module that is not there when the region is called first."""

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(outside, "memory"):
            x = x + outside.memory
        y = self.mlp(x)
        outside.memory = y.detach()  # type: ignore[attr-defined]
        return y


class ByWholePath(Block):
    def forward(self, x: Tensor) -> Tensor:
        tests.promises.outside.factor += 0.5
        return self.mlp(x * tests.promises.outside.factor)


def passed_on(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(method)
    def call(*args: Any) -> Tensor:
        return method(*args)

    return call


class Decorated(Block):
    @passed_on
    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return self.mlp(x * COUNT)


class ByTorchDecorated(Block):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return self.mlp(x * COUNT)


class Registry:
    """Holds more objects than are looked at."""

    entries: ClassVar = [types.SimpleNamespace(number=[number]) for number in range(1500)]


class Crowded(Block):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": [0]}

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"][0] += 1
        return self.mlp(x * self.counts["calls"][0] * Registry.entries[0].number[0] + x * self.counts["calls"][0])


class Counter:
    calls = 0


CURRENT: contextvars.ContextVar[Counter] = contextvars.ContextVar("CURRENT")


class InAContextVariable(Block):
    """The variable's value is changed, which has no attribute of its own at first."""

    def forward(self, x: Tensor) -> Tensor:
        CURRENT.get().calls += 1
        return self.mlp(x * CURRENT.get().calls)


class Slotted(Block):
    __slots__ = ("calls",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "calls", 0)

    def forward(self, x: Tensor) -> Tensor:
        object.__setattr__(self, "calls", self.calls + 1)
        return self.mlp(x * self.calls)


class ByProperty(Block):
    @property
    def calls(self) -> int:
        return COUNT

    @calls.setter
    def calls(self, value: int) -> None:
        global COUNT
        COUNT = value

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.mlp(x * self.calls)


class ByName(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


class Config:
    table = ByName(scale=2.0)


class UnusualAttributes(Block):
    """Objects that raise other errors for an attribute than Python's own."""

    table = ByName(scale=0.5)

    def forward(self, x: Tensor) -> Tensor:
        Config.table["scale"] += 1
        return self.mlp(x * Config.table.scale * self.table.scale)


class Meter:
    def __init__(self) -> None:
        self.count = 0

    def counted(self) -> int:
        self.count += 1
        return self.count


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Meter]]] = {
    "set": (lambda: {Meter()}, lambda held: next(iter(held))),
    "key": (lambda: {Meter(): 1}, lambda held: next(iter(held))),
    "read-only view": (lambda: types.MappingProxyType({"a": Meter()}), lambda held: held["a"]),
    "chain": (lambda: collections.ChainMap({"a": Meter()}), lambda held: held["a"]),
    "namespace": (lambda: argparse.Namespace(meter=Meter()), lambda held: held.meter),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", HOLDERS)
def test_an_object_in_an_unusual_holder(kind: str, way: str) -> None:
    make_held, find = HOLDERS[kind]

    def make() -> Block:
        held = make_held()

        class Holding(Block):
            def forward(self, x: Tensor) -> Tensor:
                return self.mlp(x * find(held).counted())

        return Holding()

    assert_same(make, way)


class CommandLine(Block):
    """The arguments of a command line, an attribute of which the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.args = argparse.Namespace(scale=1.0)
        self.chain = collections.ChainMap({"scale": 1.0})

    def forward(self, x: Tensor) -> Tensor:
        self.args.scale += 0.5
        self.chain["scale"] += 0.5
        return self.mlp(x * self.args.scale * self.chain["scale"])


class EqualElement(Block):
    """A set and a dict whose only element is exchanged for one that is equal."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: set[Any] = {1}
        self.table: dict[Any, Any] = {1: 0}

    def forward(self, x: Tensor) -> Tensor:
        for held in (self.chosen, self.table):
            (one,) = held
            held.clear()
            other = 1 if one is True else True
            held.add(other) if isinstance(held, set) else held.update({other: 0})
            x = x.sin() * (2.0 if one is True else 3.0)
        return self.mlp(x)


class ImportsInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        import tests.promises.outside as held
        from tests.promises import outside as other
        from tests.promises.outside import counted

        held.factor += 0.5
        other.factor += 0.25
        return self.mlp(x * held.factor * counted())


def counted_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = [0]

    def call(*args: Any) -> Any:
        calls[0] += 1
        return function(*args) * calls[0]

    call.calls = calls  # type: ignore[attr-defined]
    return call


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args)


class DecoratedTwice(Block):
    """Two methods with one decorator, the later of which looks up a global."""

    @wrapped
    def first(self, x: Tensor) -> Tensor:
        return x.cos()

    @wrapped
    def second(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return x * COUNT

    @wrapped
    def third(self, x: Tensor) -> Tensor:
        return x.sin()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.third(self.second(self.first(x))))


@pytest.mark.parametrize("way", WAYS)
def test_a_function_inside_a_function_that_counts_in_its_own_attribute(way: str) -> None:
    def make() -> Block:
        def scaled(x: Tensor) -> Tensor:
            scaled.calls = getattr(scaled, "calls", 0) + 1  # type: ignore[attr-defined]
            return x * scaled.calls  # type: ignore[attr-defined]

        class Calling(Block):
            def forward(self, x: Tensor) -> Tensor:
                return self.mlp(scaled(x))

        return Calling()

    assert_same(make, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [staticmethod, classmethod, property])
def test_a_decorated_method_that_is_no_plain_function(kind: Any, way: str) -> None:
    def make() -> Block:
        class Decorated(Block):
            scale = kind(counted_calls(lambda *_: 0.5))

            def forward(self, x: Tensor) -> Tensor:
                found = self.scale
                return self.mlp(x * (found() if callable(found) else found))

        return Decorated()

    assert_same(make, way)


def made(block: type[Block]) -> Callable[[], Block]:
    """Return what makes a block of a class; the state that is not its own begins anew."""

    def make() -> Block:
        global COUNT
        COUNT = 0
        outside.factor = 1.0
        outside.count = 0
        outside.__dict__.pop("memory", None)
        CURRENT.set(Counter())
        Config.table["scale"] = 2.0
        return block()

    return make


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "block",
    [
        *(TwoClasses, FirstSetLater, ByWholePath, Decorated, ByTorchDecorated, Crowded),
        *(InAContextVariable, Slotted, ByProperty, UnusualAttributes, CommandLine, EqualElement, ImportsInside),
        DecoratedTwice,
    ],
)
def test_state_in_unusual_places(block: type[Block], way: str) -> None:
    try:
        assert_same(made(block), way)
    finally:
        made(Block)()


def counting(linear: nn.Module, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return linear(x).sin() * COUNT


class Caller:
    def __init__(self, linear: nn.Module) -> None:
        self.linear = linear

    def method(self, x: Tensor) -> Tensor:
        return counting(self.linear, x)

    __call__ = method


CALLABLES: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "partial": lambda linear: partial(counting, linear),
    "method": lambda linear: Caller(linear).method,
    "object": Caller,
    "lambda": lambda linear: lambda x: counting(linear, x),
    "function in a closure": lambda linear: passed_on(lambda x: counting(linear, x)),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_globals_of_what_is_passed_to_checkpoint(kind: str) -> None:
    def trained(run: Callable[..., Tensor]) -> list[Any]:
        global COUNT
        COUNT = 0
        torch.manual_seed(0)
        linear = nn.Linear(4, 4)
        function, found = CALLABLES[kind](linear), []
        for _ in range(3):
            h = linear(torch.randn(3, 4))
            for _ in range(2):
                h = run(function, h)
            h.sum().backward()
            found.append((COUNT, linear.weight.grad.tolist()))
            linear.zero_grad()
        return found

    assert trained(sac.checkpoint) == trained(lambda function, h: function(h))


def with_a_tracker(model: Model, x: Tensor, step: int) -> Tensor:
    """A hook of the user's and one of torch's, on all modules, in the forward only."""

    def louder(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        return out * 1.7 if type(module) is nn.Linear else None

    with torch.nn.modules.module.register_module_forward_hook(louder), ModuleTracker():
        loss = model(x).square().mean()
    loss.backward()
    assert not torch.nn.modules.module._global_forward_hooks
    return loss


class Unregistered(Block):
    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.others[0](x).sin())


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_beside_one_of_torch(way: str) -> None:
    assert_same(Unregistered, way, with_a_tracker)


def plain_scale(x: Tensor) -> Tensor:
    return x


def counting_scale(x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return x * COUNT


SCALE = plain_scale


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["method", "method of another class", "global", "code", "cell"])
def test_a_function_that_is_replaced_later(where: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the new function changes is put back, too: which globals code looks up is not known once and for all."""

    def make() -> Block:
        monkeypatch.setitem(globals(), "COUNT", 0)
        monkeypatch.setitem(globals(), "SCALE", plain_scale)
        monkeypatch.setattr(plain_scale, "__code__", CODE)
        chosen = plain_scale

        class Replaced(Block):
            def method(self, x: Tensor) -> Tensor:
                return x

            def cell(self, x: Tensor) -> Tensor:
                return chosen(x)

            def forward(self, x: Tensor) -> Tensor:
                return self.mlp(SCALE(self.cell(self.method(OtherClass.method(x)))))

        return Replaced()

    def loop(model: Model, x: Tensor, step: int) -> Tensor:
        if step == 3:
            cls: Any = type(model.layers[0])
            if where == "method":
                cls.method = lambda self, x: counting_scale(x)
            elif where == "method of another class":
                monkeypatch.setattr(OtherClass, "method", staticmethod(counting_scale))
            elif where == "global":
                monkeypatch.setitem(globals(), "SCALE", counting_scale)
            elif where == "code":
                plain_scale.__code__ = counting_scale.__code__
            else:
                cls.cell.__closure__[0].cell_contents = counting_scale
        loss = model(x).square().mean()
        loss.backward()
        if step == 5:
            monkeypatch.setattr(OtherClass, "method", staticmethod(plain_scale))
        return loss

    assert_same(make, way, loop)


CODE = plain_scale.__code__


class OtherClass:
    method = staticmethod(plain_scale)


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_is_replaced_later(way: str) -> None:
    def loop(model: Model, x: Tensor, step: int) -> Tensor:
        if step == 2:
            Replaced.forward = lambda self, x: counting(self.up, x).mean() * self.mlp(x)  # type: ignore[method-assign]
        loss = model(x).square().mean()
        loss.backward()
        return loss

    class Replaced(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x)

    before = Replaced.forward

    def make() -> Block:
        global COUNT
        COUNT = 0
        Replaced.forward = before  # type: ignore[method-assign]
        return Replaced()

    assert_same(make, way, loop)


def test_a_lazily_imported_module_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazily_imported.py").write_text("raise ImportError('this was not to be imported')\n")
    spec = importlib.util.spec_from_file_location("lazily_imported", tmp_path / "lazily_imported.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazily_imported", lazy)
    spec.loader.exec_module(lazy)
    monkeypatch.setattr(sys.modules[__name__], "LAZY", lazy)
    assert_same(NamesALazyModule, "full")


LAZY: Any = None


class NamesALazyModule(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) if x.shape[0] < 100 else LAZY.function(x)


class Proxy:
    """Stands for an object that is there only at times: asked for its class it raises, as some libraries' do."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("there is no current object")


PROXY = Proxy()


class NamesAProxy(Block):
    of_class = PROXY

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) if x is not PROXY else x


@pytest.mark.parametrize("way", ["full", "rerun"])
def test_a_proxy_is_not_asked_for_its_class(way: str) -> None:
    assert_same(NamesAProxy, way)


def test_a_thread_that_has_no_value_of_its_own_gets_none() -> None:
    """Values of a `threading.local` are those of the forward in the thread of backward, and only for its time."""
    local = threading.local()
    local.scale = 3.0
    seen: collections.Counter[float | None] = collections.Counter()

    class Reads(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x * getattr(local, "scale", 7.0))

    def loop(model: Model, x: Tensor, step: int) -> Tensor:
        loss = model(x).square().mean()

        def backward() -> None:
            loss.backward()
            seen[getattr(local, "scale", None)] += 1

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        return loss

    assert_same(Reads, "full", loop)
    assert set(seen) == {None}


class CarriesAState(Block):
    """Carries a state with its graph from call to call."""

    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state, self.state = self.state, self.mlp(x)
        return self.state if state is None else self.mlp(state) * self.state


@pytest.mark.parametrize("way", [way for way in WAYS if way != "reentrant"])  # whose results alone have gradients
def test_a_state_with_a_graph_that_is_given_up_before_backward(way: str) -> None:
    def loop(model: Model, x: Tensor, step: int) -> Tensor:
        loss = model(model(x)).square().mean()
        for layer in model.layers:
            layer.state = None
        loss.backward()
        return loss

    assert_same(CarriesAState, way, loop)


@pytest.mark.parametrize("way", [*WAYS, "sac.checkpoint"])
@pytest.mark.parametrize("kind", ["closure", "method", "built-in method", "partial"])
def test_a_function_among_the_arguments_is_called_once(way: str, kind: str) -> None:
    """As far as what it holds shows."""
    values: list[int] = []
    holder = types.SimpleNamespace(values=values, add=lambda one: values.append(one))

    class Noting(Block):
        def forward(self, x: Tensor, add: Callable[[int], None]) -> Tensor:
            add(1)
            return self.mlp(x)

    kinds: dict[str, Callable[[int], None]] = {
        "closure": holder.add,
        "method": types.MethodType(lambda held, one: held.values.append(one), holder),
        "built-in method": values.append,
        "partial": functools.partial(list.append, values),
    }
    layers = nn.ModuleList([Noting()])
    if way != "sac.checkpoint":
        sac.apply(layers, {**APPLIED[way], "blocks": ["*"]})
    for _ in range(3):
        x = torch.randn(2, 4, requires_grad=True)
        given = (x, kinds[kind])
        out = sac.checkpoint(layers[0], *given) if way == "sac.checkpoint" else layers[0](*given)
        out.sum().backward()
    assert len(values) == 3
