"""Promise 1 for regions that draw from iterators among their arguments: a recomputation draws the same again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import policy

BLOCKS = {"blocks": ["layers.*"]}
SAVES = {"mode": "selective", "policy": policy({"ops": "matmul", "do": "save"}), **BLOCKS}
WAYS: dict[str, Any] = {
    "full": {"mode": "full", **BLOCKS},
    "reentrant": {"mode": "full", "use_reentrant": True, **BLOCKS},
    "rerun": {**SAVES, "engine": "rerun"},
    "replay": {**SAVES, "engine": "replay"},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, scales: Iterator[float], more: list[Any]) -> Tensor:
        pairs, gains = more
        first, second = next(pairs)
        return x + torch.tanh(self.up(x) * next(scales) + first).sin() * next(gains) * second


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        scales, pairs = iter([1.0, 2.0, 3.0, 4.0]), zip(range(9), itertools.repeat(0.5))
        gains = iter([self.gain * number for number in range(1, 6)])
        for layer in self.layers:
            x = layer(x, scales, more=[pairs, gains])
        return x, [next(scales), next(pairs), len([*gains])]


@pytest.mark.parametrize("way", WAYS)
def test_iterators_among_arguments(way: str) -> None:
    torch.manual_seed(0)
    plain = Model()
    ours = Model()
    ours.load_state_dict(plain.state_dict())
    sac.apply(ours, WAYS[way])
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        for model in (plain, ours):
            model.zero_grad()
            out, left = model(x.clone().requires_grad_())
            assert left == [4.0, (3, 0.5), 2]
            out.square().sum().backward()
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
