"""A model that has been trained can be copied and pickled, whatever its blocks were called with."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import policy, save, selective


@dataclass
class Options:
    scale: float


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, options: Options) -> Tensor:
        return self.linear(x).sin() * options.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, Options(2.0))
        return x


CONFIGS: dict[str, dict[str, Any]] = {
    "full": {"mode": "full", "blocks": ["blocks.*"]},
    "selective": selective(policy(save("matmul"))),
    "everything": selective(policy(default="save")),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_the_copy_goes_on_as_the_model_does(config: dict[str, Any], again: Any) -> None:
    model = sac.apply(Model(), config)
    x = torch.randn(3, 4)
    for _ in range(2):
        model(x).sum().backward()
    twin = again(model)
    for one in (model, twin):
        one.zero_grad()
        one(x).sum().backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
