"""A module that is saved as a whole is not run again: what it has made of Python state is there for what comes next."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import Stack, policy, save, selective, square
from tests.support.training import assert_same, built, train

WHOLE = {"id": "whole", "module": "part", "do": "save"}
VALUES = {
    "modules": selective(policy(WHOLE)),
    "modules and products": selective(policy(WHOLE, {**save("matmul"), "optional": True})),
}
ON_EACH_VALUE = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())


class Part(nn.Module):
    """Changes attributes, a list, an object and what a name means."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.calls, self.lengths, self.state = 0, [0.0], SimpleNamespace(scale=torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.lengths.append(0.5 * self.calls)
        self.last = x.detach() * 2
        self.state.scale = self.state.scale * 0.9
        return x @ self.weight


class Reading(nn.Module):
    """Reads that after it, and changes it once more."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        part = self.part
        y = (part(x.exp().tanh()) * part.calls).sin() * sum(part.lengths) + part.last.cos()
        part.state.scale = part.state.scale + 0.01
        return (y * part.state.scale).sin() * x.cos()


class Drawing(nn.Module):
    """Draws from Python's and NumPy's random numbers, and from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.python, self.torch = random.Random(3), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        drawn = random.random() + np.random.random() + self.python.random()
        return x @ self.weight * drawn * torch.rand(8, generator=self.torch)


class DrawsAfterIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Drawing()

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x.exp().tanh())
        drawn = random.random() + np.random.random() + self.part.python.random()
        return (y * drawn * torch.rand(8, generator=self.part.torch)).sin() * x.cos()


def seeded(run: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    random.seed(0)
    np.random.seed(0)
    return run()


def forwards_first(model: nn.Module) -> dict[str, Tensor]:
    """Three forwards, and their backwards in another order, one of them twice."""
    torch.manual_seed(0)
    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    losses = [model(x).square().sum() for x in inputs]
    losses[1].backward(retain_graph=True)
    for loss in (losses[1], losses[0], losses[2]):
        loss.backward()
    found = {f"input {index}": x.grad for index, x in enumerate(inputs) if x.grad is not None}
    return found | {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@ON_EACH_VALUE
@pytest.mark.parametrize("block", [Reading, DrawsAfterIt])
def test_what_comes_after_it_reads_what_it_left(block: type[nn.Module], value: dict[str, Any]) -> None:
    def build() -> nn.Module:
        return Stack(block(), block())

    plain, ours = built(build), sac.apply(built(build), value)
    assert_same(
        seeded(lambda: train(plain, make_input=square, steps=4)),
        seeded(lambda: train(ours, make_input=square, steps=4)),
    )
    assert_same(seeded(lambda: forwards_first(plain)), seeded(lambda: forwards_first(ours)))
    if block is Reading:
        for one, other in zip(plain.blocks, ours.blocks, strict=True):
            assert (one.part.calls, one.part.lengths) == (other.part.calls, other.part.lengths)
            assert torch.equal(one.part.last, other.part.last)
            assert torch.equal(one.part.state.scale, other.part.state.scale)
