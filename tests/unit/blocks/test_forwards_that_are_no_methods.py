"""Modules whose class has a static method, a class method or a callable object as its forward."""

from __future__ import annotations

from functools import partialmethod

import pytest
from torch import Tensor, nn

from tests.support.blocks import FULL, Stack, policy, save, selective, square, under_each_engine
from tests.support.training import assert_same_training


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


KINDS = [Static, OfClass, Partial, Callable]
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
