"""Promise 1 where programs change from step to step, and where they write to what is theirs.

The oracle is the same model without sac: loss, gradients, parameters, buffers and the Python state of the model are
equal, bit for bit, after each of six steps.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
import itertools
import random
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sac

STEPS = 6
MATMULS = {"rules": [{"id": "matmuls", "ops": ["matmul"], "do": "save", "optional": True}]}
MODULE = {"rules": [{"id": "module", "module": "{up,part}", "do": "save", "optional": True}]}
NO_MATCH = {"rules": [{"id": "nothing", "ops": ["attention"], "do": "save", "optional": True}]}


def _config(mode: str, policy: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    value = {"mode": mode, "blocks": "layers.*", **more}
    return value if policy is None else {**value, "policy": {"schema": "sac/v1", "name": "test", **policy}}


APPLIED = {
    "full": _config("full"),
    "auto": _config("selective", MATMULS),
    "replay": _config("selective", MATMULS, engine="replay"),
    "rerun": _config("selective", MATMULS, engine="rerun"),
    "whole module": _config("selective", MODULE),
    "no match": _config("selective", NO_MATCH),
    "no match, replay": _config("selective", NO_MATCH, engine="replay"),
    "reentrant": _config("full", use_reentrant=True),
}
WAYS = [*(way for way in APPLIED if way != "reentrant"), "sac.checkpoint"]
REPLAYED = ["auto", "replay", "no match, replay"]  # no Python runs twice


class Block(nn.Module):
    """What the blocks of these tests have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)).sin())


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], way: str | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = sac.checkpoint(layer, x) if self.way == "sac.checkpoint" else layer(x)
        return x


def _own_state(module: nn.Module) -> Any:
    standard = vars(nn.Module()).keys() | {"forward", "way"}
    return [
        copy.deepcopy({name: _plain(value) for name, value in vars(one).items() if name not in standard})
        for one in module.modules()
    ]


def _plain(value: Any) -> Any:
    return dict(vars(value)) if isinstance(value, threading.local) else value


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, numpy.random.Generator):
        return one.bit_generator.state == other.bit_generator.state
    if isinstance(one, random.Random):
        return one.getstate() == other.getstate()
    if isinstance(one, torch.utils.hooks.RemovableHandle):
        return type(one) is type(other)
    if isinstance(one, numpy.ndarray):
        return numpy.array_equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, nn.Module):
        return _is_equal(one.state_dict(), other.state_dict())
    if hasattr(one, "__next__"):  # a copy
        return _is_equal([*itertools.islice(one, 9)], [*itertools.islice(other, 9)])
    if hasattr(one, "__dict__") and not callable(one):
        return _is_equal(vars(one), vars(other))
    return bool(one == other)


Loop = Callable[[Model, Tensor, int], Tensor]


def usual(model: Model, x: Tensor, step: int) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def train(make: Callable[[], nn.Module], way: str | None, loop: Loop = usual) -> list[Any]:
    """Train for some steps; return all that has to be equal after each of them."""
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    model = Model(make, way)
    if way in APPLIED:
        sac.apply(model, APPLIED[way])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        x = torch.randn(3, 4, requires_grad=True)
        loss = loop(model, x, step)
        tensors = [loss.detach(), x.grad, *(one.grad for one in model.parameters())]
        optimizer.step()
        tensors += [*model.parameters(), *model.buffers()]
        state = [None if one is None else one.detach().clone() for one in tensors], _own_state(model)
        found.append((*state, random.random(), numpy.random.rand(), torch.rand(())))
        optimizer.zero_grad()
    return found


def assert_same(make: Callable[[], nn.Module], way: str, loop: Loop = usual) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sac.errors.SacWarning)
        expected, found = train(make, None, loop), train(make, way, loop)
        for step, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert _is_equal(one, other), f"step {step}"


class ForcedNorm(Block):
    """Writes its own weight, as forced weight normalisation does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.copy_(F.normalize(self.up.weight) * 1.7)
        return x + self.mlp(x)


class ForcedNormBeforeAGradient(Block):
    """Takes a gradient inside, after it has written its weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.95)
        x = self.mlp(x)
        inner = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.mlp(inner).sin().sum(), inner)
        return x + slope


class ForcedNormByData(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data.mul_(0.9)
        return x + self.mlp(x)


class LateForcedNorm(Block):
    """Begins to write its weight late, by a counter that is not an attribute of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.count = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.count[0] += 1
        if self.count[0] % 3 == 0:
            with torch.no_grad():
                self.up.weight.copy_(F.normalize(self.up.weight) * 1.7)
        return x + self.mlp(x)


class MaxNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, max_norm=0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.embedding((x.detach()[:, 0].abs() * 5).long() % 5))


class Dropped(Block):
    """Stochastic depth in a block with an explicit generator, `rrelu` as its last op, and a write to a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)
        self.seen = torch.zeros(200)

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()).item() < 0.5:
            return x + 0 * self.up.bias.sum()
        h = self.mlp(x) * torch.rand(3, 4, generator=self.generator)
        self.seen.add_(h.detach().mean())
        return F.rrelu(h * self.seen.mean().sigmoid(), training=True)


class Unregistered(Block):
    """Reads a value in each call, and in every second one runs a layer that is not registered: it stands in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.others = [nn.BatchNorm1d(4, affine=False)]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().sum().item())
        if len(self.seen) % 2 == 0:
            x = self.others[0](x)
        return x + self.mlp(x)


class Other:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


class BesideTheModules(Block):
    """Runs, in every second call, layers that stand in no table of modules; one of them holds this block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.others = [nn.BatchNorm1d(4, affine=False), Other(nn.Dropout(0.5))]
        self.named = {"norm": nn.BatchNorm1d(4)}
        self.parents = [nn.Sequential(self)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            x = self.others[1].layer(self.others[0](x))
            self.others[1].layer.training = not self.others[1].layer.training
            self.named["norm"].register_buffer("seen", x.detach().mean())
        return x + self.named["norm"](self.mlp(x))


COPIES_ITERTOOLS = sys.version_info < (3, 14)


class Iterators(Block):
    """Draws from iterators: the first pass of a cycle goes on behind the first forward."""

    def __init__(self) -> None:
        super().__init__()
        turns = [True, False, False, True]
        self.turns = itertools.cycle(turns) if COPIES_ITERTOOLS else iter(2 * turns)
        self.layers = [iter([self.up, self.up, self.up, self.up, self.up, self.up])]
        self.numbers = {
            "count": itertools.count(3) if COPIES_ITERTOOLS else iter(range(3, 99)),
            "pairs": zip(range(9), map(float, reversed(range(9))), strict=True),
        }

    def forward(self, x: Tensor) -> Tensor:
        if next(self.turns):
            return x + torch.cos(self.up(x)).mean() * next(self.numbers["count"])  # type: ignore[call-overload]
        first, second = next(self.numbers["pairs"])  # type: ignore[call-overload]
        return self.down(torch.tanh(next(self.layers[0])(x)).sin() + first) * second


class DroppedByPython(Block):
    """Draws from Python's and NumPy's generators from the first call on, and from one of torch that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = {"torch": torch.Generator().manual_seed(1)}

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.4:
            x = x + self.mlp(x)
        if numpy.random.rand() < 0.4:
            x = self.mlp(x)
        x = x + torch.rand(4, generator=self.generators["torch"])
        return self.mlp(x + float(numpy.random.randn()))


class Memory(Block):
    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(x + self.memory) * self.memory.cos()
        self.memory = h.detach()
        return x + h


class Load(Block):
    """Adds up what it has seen in tensors that are no buffers: an attribute, one in a dict, one that it rebinds."""

    def __init__(self) -> None:
        super().__init__()
        self.load = torch.zeros(300)
        self.held = {"sum": torch.zeros(4)}
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(x)
        with torch.no_grad():
            self.load += h.mean()
            self.held["sum"].add_(h.sum(0))
            self.mean = h.mean(0) if self.mean is None else self.mean * 0.9 + h.mean(0)
        return x + h * self.held["sum"].sigmoid() * self.load.mean().cos() * self.mean.cos()


class Counters(Block):
    """Counts in an attribute, and in a list, a dict and an object that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.log: list[float] = []
        self.sizes: dict[str, int] = {}
        self.state = types.SimpleNamespace(depth=1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.calls * 0.5)
        self.sizes[str(self.calls % 3)] = self.calls
        self.state.depth *= 1.1
        return x + self.mlp(x) * len(self.log) * sum(self.sizes.values()) * self.state.depth / 10


class Flag(Block):
    def __init__(self) -> None:
        super().__init__()
        self.flag = False

    def forward(self, x: Tensor) -> Tensor:
        self.flag = not self.flag
        return x + (self.mlp(x) if self.flag else self.up.bias.sum())


class Part(Block):
    """Leaves something behind: in attributes, in a list, in Python's and NumPy's random states."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.items: list[int] = []
        self.last = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.items.append(self.calls)
        self.last = x.detach() * 2
        return self.mlp(x) * random.random() + numpy.random.rand()


class AroundPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x.exp())
        z = (y * self.part.calls).sin() * len(self.part.items) * random.random()
        return z + self.part.last.cos() * y.tanh() * numpy.random.rand()


def without_grad_between(model: Model, x: Tensor, step: int) -> Tensor:
    loss = model(x).square().mean()
    with torch.no_grad():
        model(x + 1)
    loss.backward()
    return loss


def stepping_in_backward(model: Model, x: Tensor, step: int) -> Tensor:
    """Steps each parameter as soon as its gradient is there."""

    def step_on(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad * 0.1)

    hooks = [one.register_post_accumulate_grad_hook(step_on) for one in model.parameters()]
    loss = usual(model, x, step)
    for hook in hooks:
        hook.remove()
    return loss


class Switched(Block):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 6)
        self.active = "up"
        self.act = torch.tanh
        self.mask = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(getattr(self, self.active)(x * self.mask.sin())).sin())


class Hooks(Block):
    """Registers a hook in the forward of one step, and removes it in that of another."""

    hook: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.hook = self.up.register_forward_hook(lambda module, args, out: out * 1.5)
        if self.calls == 4:
            self.hook.remove()
        return x + self.mlp(x)


class Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def hooks_for_the_forward(model: Model, x: Tensor, step: int) -> Tensor:
    """Changes and collects activations with hooks that are gone before backward, where another one is."""
    seen: list[Tensor] = []

    def collect(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        seen.append(out.detach())
        return out * 1.5

    hooks = []
    for layer in model.layers:
        hooks.append(layer.up.register_forward_hook(collect, with_kwargs=True))
        hooks.append(layer.down.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)))
        hooks.append(layer.up.register_full_backward_hook(lambda module, given, out: (given[0] * 3,)))
    loss = model(x).square().mean()
    for hook in hooks:
        hook.remove()
    late = model.layers[0].up.register_forward_hook(lambda module, args, out: out + 1)
    loss.backward()
    late.remove()
    assert len(seen) == len(model.layers)
    return loss + sum(one.sum() for one in seen)


def switching(model: Model, x: Tensor, step: int) -> Tensor:
    """Changes the model between forward and backward."""
    loss = model(x).square().mean()
    for layer in model.layers:
        layer.active = "other" if layer.active == "up" else "up"
        layer.act = torch.sigmoid if layer.act is torch.tanh else torch.tanh
        layer.mask = torch.rand(4)
    loss.backward()
    return loss


def two_forwards(model: Model, x: Tensor, step: int) -> Tensor:
    loss = model(x).square().mean() + model(x + 1).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make",
    [
        *(ForcedNorm, ForcedNormBeforeAGradient, ForcedNormByData, LateForcedNorm, MaxNorm),
        *(Dropped, DroppedByPython, Unregistered, Memory, Load, Counters),
    ],
    ids=lambda make: make.__name__,
)
def test_program_that_changes_is_exact(make: Callable[[], nn.Module], way: str) -> None:
    assert_same(make, way)


@pytest.mark.parametrize("way", REPLAYED)
@pytest.mark.parametrize("make", [BesideTheModules, Iterators, Hooks], ids=lambda make: make.__name__)
def test_replay_is_exact_whatever_python_did(make: Callable[[], nn.Module], way: str) -> None:
    assert_same(make, way)


@pytest.mark.parametrize("way", WAYS)
def test_attributes_that_change_between_forward_and_backward_are_those_of_the_forward(way: str) -> None:
    assert_same(Switched, way, switching)


@pytest.mark.parametrize("way", REPLAYED)
def test_hooks_that_change_between_forward_and_backward_are_those_of_the_forward(way: str) -> None:
    assert_same(Hooked, way, hooks_for_the_forward)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_without_grad_between_the_passes(way: str) -> None:
    assert_same(Flag, way, without_grad_between)


@pytest.mark.parametrize("way", WAYS)
def test_state_that_a_module_leaves_behind(way: str) -> None:
    assert_same(AroundPart, way)


@pytest.mark.parametrize("way", WAYS)
def test_optimizer_that_steps_in_backward(way: str) -> None:
    assert_same(Counters, way, stepping_in_backward)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [MaxNorm, Memory, Load, Counters], ids=lambda make: make.__name__)
def test_two_forwards_before_a_backward(make: Callable[[], nn.Module], way: str) -> None:
    assert_same(make, way, two_forwards)


# Fields of arguments


@dataclasses.dataclass
class AsDataclass:
    h: Any
    count: int = 0
    seen: Any = dataclasses.field(default_factory=lambda: torch.zeros(4))


class AsSlots:
    __slots__ = ("count", "h", "seen")

    def __init__(self, h: Any) -> None:
        self.h, self.count, self.seen = h, 0, torch.zeros(300)


class AsUserDict(collections.UserDict):  # type: ignore[type-arg]
    pass


class AsDict(dict):  # type: ignore[type-arg]
    pass


STATES: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": AsDataclass,
    "namespace": lambda h: types.SimpleNamespace(h=h, count=0, seen=torch.zeros(4)),
    "slots": AsSlots,
    "UserDict": lambda h: AsUserDict(h=h, count=0),
    "dict subclass": lambda h: AsDict(h=h, count=0),
    "in a list": lambda h: [types.SimpleNamespace(h=h, count=0, seen=torch.zeros(300))],
}


class OnState(Block):
    def forward(self, state: Any) -> Tensor:
        held = state[0] if isinstance(state, list) else state
        if isinstance(held, (dict, collections.UserDict)):
            held["count"] += 1
            held["h"] = held["h"] + self.mlp(held["h"]) * held["count"]
            return held["h"]
        held.count += 1
        held.seen.add_(held.h.detach().mean())
        held.h = held.h + self.mlp(held.h) * held.count * held.seen.mean().cos()
        return held.h


class StateModel(Model):
    make_state: Callable[[Tensor], Any]

    def forward(self, x: Tensor) -> Tensor:
        state = self.make_state(x)
        for layer in self.layers:
            if self.way == "sac.checkpoint":
                x = sac.checkpoint(layer, state)
            elif self.way == "sac.context_fn":
                contexts = sac.context_fn({"schema": "sac/v1", "name": "test", **MATMULS}, layer)
                x = checkpoint(layer, state, use_reentrant=False, context_fn=contexts)
            else:
                x = layer(state)
        return x


@pytest.mark.parametrize("way", [*WAYS, "sac.context_fn"])
@pytest.mark.parametrize("kind", STATES)
def test_fields_of_an_argument_that_the_block_rebinds(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateModel, "make_state", staticmethod(STATES[kind]), raising=False)
    monkeypatch.setattr(f"{__name__}.Model", StateModel)
    assert_same(OnState, way)


def backward_twice(model: Model, x: Tensor, step: int) -> Tensor:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


class ReadsWhatItPut(Block):
    """Rebinds a field and reads it, so that a recomputation does not end before."""

    def forward(self, state: Any) -> Tensor:
        state.h = state.h + self.mlp(state.h)
        return state.h.sin()


@pytest.mark.parametrize("way", ["full", "rerun", "sac.checkpoint"])
@pytest.mark.parametrize("kind", ["dataclass", "slots"])
def test_each_recomputation_has_an_argument_of_its_own(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateModel, "make_state", staticmethod(STATES[kind]), raising=False)
    monkeypatch.setattr(f"{__name__}.Model", StateModel)
    assert_same(ReadsWhatItPut, way, backward_twice)


# What somebody else does between the passes

TABLE = torch.ones(4)


class FromOutside(Block):
    """Reads a global tensor that autograd does not save; the loop writes to it between forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + torch.sin(TABLE))


class Features(Block):
    """Leaves a feature in a dictionary, from which the loop takes it between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.features["out"] = x
        return x + self.mlp(x)


def writing_outside(model: Model, x: Tensor, step: int) -> Tensor:
    if not step:
        TABLE.fill_(1.0)
    loss = model(x).square().mean()
    if step >= 2:
        TABLE.mul_(-0.5)
    loss.backward()
    return loss


def taking_features(model: Model, x: Tensor, step: int) -> Tensor:
    loss = model(x).square().mean()
    for layer in model.layers:
        loss = loss + layer.features.pop("out").sin().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("way", REPLAYED)
def test_global_tensor_that_the_loop_writes_to(way: str) -> None:
    assert_same(FromOutside, way, writing_outside)


class CarriesAState(Block):
    """Carries a state with its graph from call to call."""

    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state, self.state = self.state, self.mlp(x)
        return self.state if state is None else self.mlp(state) * self.state


@pytest.mark.parametrize("way", WAYS)
def test_a_state_with_a_graph_that_is_given_up_before_backward(way: str) -> None:
    def loop(model: Model, x: Tensor, step: int) -> Tensor:
        loss = model(model(x)).square().mean()
        for layer in model.layers:
            layer.state = None
        loss.backward()
        return loss

    assert_same(CarriesAState, way, loop)


class MakesALayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.later: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.later is None:
            self.later = nn.Linear(4, 4)
        return x + self.mlp(self.later(x).sin())


@pytest.mark.parametrize("way", ["full", "rerun", "sac.checkpoint", "replay"])
def test_a_layer_that_the_forward_makes(way: str) -> None:
    """A rerun would make another one, and that would get the gradients."""
    if way == "replay":
        assert_same(MakesALayer, way)
    else:
        with pytest.raises(sac.errors.RegionError, match="its forward has added a layer"):
            train(MakesALayer, way)


# State outside the modules

CALLS = [0]
TURN = 0


def next_turn() -> int:
    global TURN
    TURN += 1
    return TURN


class Globals(Block):
    """Counts in globals: in a list that it names, and in a number by way of a function that it calls."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        if CALLS[0] % 2 == 0:
            return x + torch.cos(self.up(x)).mean()
        return x + self.mlp(x) * (next_turn() % 3)


class OfTheClass(Block):
    """Counts in attributes of its class: of one that is there, one that appears, and a list."""

    calls = 0
    seen: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        type(self).turns = getattr(type(self), "turns", 0) + 2
        self.seen.append(len(x))
        if self.calls % 2 == 0:
            return x + torch.cos(self.up(x)).mean()
        return x + self.mlp(x) * (self.turns + len(self.seen))


def counted(x: Tensor, calls: list[int] = [], *, sizes: dict[int, int] = {}) -> Tensor:  # noqa: B006
    calls.append(len(x))
    sizes[len(calls)] = len(x)
    counted.turn = getattr(counted, "turn", 0) + 1  # type: ignore[attr-defined]
    return x * (1 + 1 / len(calls)) + len(sizes) + counted.turn  # type: ignore[attr-defined]


def turning(method: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    turn = 0

    def run(self: Any, x: Tensor) -> Tensor:
        nonlocal turn
        turn += 1
        return method(self, x) * turn

    return run


class OfFunctions(Block):
    """Counts in the defaults of a function and of a method, in an attribute of a function, and in a decorator."""

    def forward(self, x: Tensor) -> Tensor:
        return counted(self.twice(x)) + self.mlp(x)

    @turning
    def twice(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(0)
        return x.sin() * len(seen) * 2


def of_functions() -> nn.Module:
    """Return a block whose functions are as they were when this file was read."""
    names = ("counted", "turning", "OfFunctions")
    source = "".join(inspect.getsource(globals()[name]) for name in names)
    made = dict(globals())
    exec(compile("from __future__ import annotations\n" + source, __file__, "exec"), made)
    return made["OfFunctions"]()  # type: ignore[no-any-return]


def counting_beside(model: Model, x: Tensor, step: int) -> Tensor:
    global TURN
    if not step:
        CALLS[0] = TURN = OfTheClass.calls = OfTheClass.turns = 0
        OfTheClass.seen.clear()
    loss = usual(model, x, step) * 1.0
    return loss + CALLS[0] + 10 * TURN + 100 * OfTheClass.calls + OfTheClass.turns + len(OfTheClass.seen)


@pytest.mark.parametrize("way", REPLAYED)
@pytest.mark.parametrize("make", [Globals, OfTheClass, of_functions])
def test_state_beside_the_modules(make: Callable[[], nn.Module], way: str) -> None:
    assert_same(make, way, counting_beside)


class Factory(collections.OrderedDict):  # type: ignore[type-arg]
    """Makes a new object whenever it is asked, as the table of activations of transformers does."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)()


FACTORY = Factory(tanh=nn.Tanh)


def test_a_dictionary_with_methods_of_its_own_is_left_as_it_is() -> None:
    block = Block()

    def forward(x: Tensor) -> Tensor:
        return FACTORY["tanh"](block.mlp(x))

    sac.checkpoint(forward, torch.ones(3, 4)).sum().backward()
    assert [*dict.values(FACTORY)] == [nn.Tanh]


@pytest.mark.parametrize("way", WAYS)
def test_what_the_loop_takes_away_does_not_come_back(way: str) -> None:
    assert_same(Features, way, taking_features)


# How it comes about


def test_replay_runs_python_once_although_no_rule_matches() -> None:
    runs = []

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(1)
            return x + self.mlp(x)

    train(Counting, "no match, replay")
    assert len(runs) == 2 * STEPS


def test_unseen_write_to_a_parameter_warns_once_and_names_it() -> None:
    with pytest.warns(sac.errors.SacWarning) as caught:
        train(LateForcedNorm, "full")
    found = [str(one.message) for one in caught]
    assert len({*found}) == len(found)
    assert re.fullmatch(
        r"layers.0: this call changed parameter '(up\.)?weight' \(float32\[6, 4\]\) in place, which no earlier call "
        r"did\n    fix: none is needed: the activations of this call are kept until its backward instead of being "
        "recomputed, and later calls of the region keep a copy of what they write to",
        found[0],
    )


def test_a_written_parameter_keeps_its_version() -> None:
    """Whoever else has saved the parameter must not find that the recomputation has written to it."""
    torch.manual_seed(0)
    model = Model(ForcedNorm, "full")
    sac.apply(model, APPLIED["full"])
    x = torch.randn(3, 4)
    loss = (model(x) @ model.layers[0].up.weight.t()).sum()  # autograd saves the weight outside of the region
    versions = [one._version for one in model.parameters()]
    loss.backward()
    assert [one._version for one in model.parameters()] == versions


def test_a_policy_is_not_lost_by_a_call_that_took_a_short_path() -> None:
    class Sometimes(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(x) if x.sum().item() > 0 else x + self.up.bias.sum()

    model = Model(Sometimes, None)
    sac.apply(model, APPLIED["auto"])
    model(-torch.ones(3, 4)).sum().backward()
    model(torch.ones(3, 4)).sum().backward()
    (kind,) = sac.report(model).kinds
    assert [(one.rule, one.hits) for one in kind.rules] == [("matmuls", 2)]  # per region


def test_context_fn_puts_the_python_state_of_its_module_back() -> None:
    class Contexts(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                contexts = sac.context_fn({"schema": "sac/v1", "name": "test", **MATMULS}, layer)
                x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts) if self.way else layer(x)
            return x

    for make in (Counters, DroppedByPython, Memory):
        results = []
        for way in (None, "context_fn"):
            torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
            model = Contexts(make, way)
            for _ in range(STEPS):
                model(torch.randn(3, 4)).square().mean().backward()
            results.append(([one.grad for one in model.parameters()], _own_state(model)))
        assert _is_equal(*results)


def test_context_fn_refuses_weights_that_change_between_the_passes() -> None:
    layer = Block()
    contexts = sac.context_fn({"schema": "sac/v1", "name": "test", **NO_MATCH}, layer)
    out = checkpoint(layer.mlp, torch.ones(3, 4), use_reentrant=False, context_fn=contexts)
    with torch.no_grad():
        layer.up.weight.mul_(2.0)
    with pytest.raises(sac.errors.RegionError) as caught:
        out.sum().backward()
    assert str(caught.value) == (
        "sac.context_fn: a tensor from outside the region (float32[6, 4]) was changed in place after the forward: it "
        "is at version 2, backward expects version 1\n"
        "    fix: do not write to it between forward and backward, or pass it to the region as an argument"
    )
