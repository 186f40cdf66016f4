"""What a training program may change between forward and backward: it is as without us, or an error.

The programs of tests/support/programs.py hold buffers, statistics and flags, danger 4 writes to weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.blocks import Stack, square
from tests.support.stateful import ON_EACH_WAY, Way, as_it_is
from tests.support.training import assert_same, built, train

Change = Callable[[Stack], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm(self.first(x)).sin()).cos()


def freeze(model: Stack) -> None:
    model.blocks[0].requires_grad_(False)


def thaw(model: Stack) -> None:
    model.requires_grad_(True)


def exchange(model: Stack) -> None:
    for block in model.blocks:
        block.second.weight = nn.Parameter(torch.ones(8, 8))


def before_forward(model: Stack, weights: list[nn.Parameter]) -> None:
    """The state that each step begins with: one part of the second block is frozen."""
    for block, weight in zip(model.blocks, weights, strict=True):
        block.second.weight = weight
    model.requires_grad_(True)
    model.blocks[1].first.requires_grad_(False)


def trained(way: Way, change: Change) -> dict[str, Tensor]:
    model = way(built(lambda: Stack(Block(), Block())))
    weights = [block.second.weight for block in model.blocks]
    seen: dict[str, Tensor] = {}
    for step in range(3):
        before_forward(model, weights)

        def changed(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Any]:
            change(model)
            needed = [parameter.requires_grad for parameter in model.parameters()]
            loss.backward()
            assert [parameter.requires_grad for parameter in model.parameters()] == needed
            return [weight.grad for weight in weights]

        found = train(model, make_input=square, backward=changed, seed=step)
        seen |= {f"{step}, {name}": value for name, value in found.items()}
        for weight in weights:
            weight.grad = None
    return seen


@pytest.mark.parametrize("change", [freeze, thaw, exchange])
@ON_EACH_WAY
def test_as_without_us(way: Way, change: Change) -> None:
    assert_same(trained(as_it_is, change), trained(way, change))


@ON_EACH_WAY
def test_another_dtype_is_an_error(way: Way) -> None:
    model = way(built(lambda: Stack(Block(), Block())))
    for _ in range(3):
        loss = model(*square()).sum()
        model.double()
        with pytest.raises(RuntimeError, match=r"dtype|float64"):  # torch's, of the op that meets both, or ours
            loss.backward()
        model.float().zero_grad()
