"""A part that is frozen or thawed between forward and backward, as GANs do it: gradients are those without us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.blocks import Stack, square
from tests.support.stateful import ON_EACH_WAY, Way, as_it_is
from tests.support.training import assert_same, built, train


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm(self.first(x)).sin()).cos()


def trained(way: Way, frozen_in_forward: bool) -> dict[str, Tensor]:
    model = way(built(lambda: Stack(Block(), Block())))
    part = model.blocks[0] if not frozen_in_forward else model.blocks[1].first

    def make_input(device: str) -> tuple[Tensor, ...]:
        part.requires_grad_(not frozen_in_forward)
        return square(device)

    def backward(loss: Tensor, *_: Any) -> list[Tensor | None]:
        part.requires_grad_(frozen_in_forward)
        loss.backward()
        assert all(parameter.requires_grad == frozen_in_forward for parameter in part.parameters())
        return []

    torch.manual_seed(0)
    return train(model, steps=3, make_input=make_input, backward=backward)


@pytest.mark.parametrize("frozen_in_forward", [False, True])
@ON_EACH_WAY
def test_as_without_us(way: Way, frozen_in_forward: bool) -> None:
    assert_same(trained(as_it_is, frozen_in_forward), trained(way, frozen_in_forward))
