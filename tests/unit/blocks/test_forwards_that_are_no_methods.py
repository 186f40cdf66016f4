"""Modules whose class has a static method, a class method or a callable object as its forward."""

from __future__ import annotations

import copy
import pickle
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import FULL, Stack, policy, save, selective, square, under_each_engine
from tests.support.training import assert_same, assert_same_training, built, train


class Doubling:
    def __call__(self, x: Tensor) -> Tensor:
        return x.sin() * 2


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin() * x.sigmoid()


class OfClass(nn.Module):
    scale = 3.0

    @classmethod
    def forward(cls, x: Tensor) -> Tensor:
        return x.sin() * cls.scale


class Inheriting(Static):
    pass


class Partial(nn.Module):
    def scaled(self, scale: float, x: Tensor) -> Tensor:
        return x.sin() * scale

    forward = partialmethod(scaled, 1.5)


class Callable(nn.Module):
    forward = Doubling()


class Around(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(8, 8), part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.linear(x))


KINDS = [Static, OfClass, Inheriting, Partial, Callable]
PLACES = {"block": lambda kind: Stack(kind(), kind()), "part": lambda kind: Stack(Around(kind()), Around(kind()))}
VALUES = under_each_engine(
    {
        "full": FULL,
        "an op is saved": selective(policy(save("aten.sin"))),
        "the part is saved": selective(policy({"module": "part", "do": "save"})),
    }
)
CASES = [(place, value) for place in PLACES for value in VALUES if place == "part" or "the part" not in value]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("place", "value"), CASES)
def test_training_is_the_same(kind: type[nn.Module], place: str, value: str) -> None:
    assert_same_training(lambda: PLACES[place](kind), VALUES[value], steps=3, make_input=square)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("kind", KINDS)
def test_copy_is_the_same(kind: type[nn.Module], copied: Any, place: str) -> None:
    def build() -> Stack:
        return PLACES[place](kind)

    ours = copied(sac.apply(built(build), FULL))
    assert_same(train(built(build), steps=2, make_input=square), train(ours, steps=2, make_input=square))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_class_is_given_later_runs(kind: type[nn.Module], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sac.apply(PLACES[place](kind), FULL)
    x = torch.randn(4, 8)
    model(x)
    monkeypatch.setattr(kind, "forward", lambda self, x: x.exp(), raising=False)
    expected = PLACES[place](kind)
    expected.load_state_dict(model.state_dict())
    assert torch.equal(model(x), expected(x))


class Method(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@pytest.mark.parametrize(("place", "value"), CASES)
def test_method_that_is_exchanged_for_a_static_one_between_steps(
    value: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one could take the module as well, and compute something else."""

    def shown(model: nn.Module) -> list[Tensor]:
        found = []
        for later in (None, staticmethod(lambda *given: given[-1].sin() * len(given)), Method.__dict__["forward"]):
            if later is not None:
                monkeypatch.setattr(Method, "forward", later)
            x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
            y = model(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        return found

    plain = shown(built(lambda: PLACES[place](Method)))
    ours = shown(sac.apply(built(lambda: PLACES[place](Method)), VALUES[value]))
    assert all(map(torch.equal, plain, ours))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_remove_leaves_nothing(kind: type[nn.Module], place: str) -> None:
    model = PLACES[place](kind)
    sac.remove(sac.apply(model, FULL))
    assert not [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [Static, OfClass])
def test_compiled_blocks(kind: type[nn.Module], place: str) -> None:
    model = sac.apply(built(lambda: PLACES[place](kind)), selective(policy(save("aten.sin"))))
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    reference = train(built(lambda: PLACES[place](kind)), steps=2, make_input=square)
    assert_same(reference, train(model, steps=2, make_input=square))
