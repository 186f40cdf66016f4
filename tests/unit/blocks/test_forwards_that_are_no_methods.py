"""Modules whose class has a static method, a class method or a callable object as its forward."""

from __future__ import annotations

import copy
from functools import partial, partialmethod

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.oracle import assert_exact, on_every_way
from tests.support.programs import WIDTH, Program


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
    """Calls such a module, under the name that a rule saves as a whole."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.linear, self.up = nn.Linear(WIDTH, WIDTH), kind()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.linear(x))


KINDS = [Static, OfClass, Partial, Callable]


def own_forward(block: nn.Module, x: Tensor) -> Tensor:
    raise AssertionError


@on_every_way(
    [
        *(Program(kind.__name__, own_forward, block=kind) for kind in KINDS),
        *(Program(f"around {kind.__name__}", own_forward, block=partial(Around, kind)) for kind in KINDS),
    ]
)
def test_training_is_the_same(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


@pytest.mark.parametrize("kind", [Static, OfClass])
def test_a_block_with_such_a_part_is_one_graph(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Around(kind), Around(kind))
    ours = sac.apply(copy.deepcopy(plain), {"mode": "full", "blocks": ["*"]})
    x = torch.randn(3, WIDTH)
    for model in (plain, ours):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
