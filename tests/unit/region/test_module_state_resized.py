"""A tensor that the forward makes larger or smaller in place is in recomputation as large as it was before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.every_mode import MODES, assert_as_without, modules_of


class Block(nn.Module):
    """Holds room for its input, and doubles the input where there is enough of it already."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.room = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.room.shape == x.shape:
                torch.mul(x, 2, out=self.room)
            else:
                self.room.resize_(x.shape).copy_(x)
        return x + torch.tanh(self.up(x) * self.room)


@pytest.mark.parametrize("mode", MODES)
def test_room_that_grows_and_shrinks(mode: str) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x = torch.randn([4, 4, 2, 6, 6][step], 8, requires_grad=True)
        y = x
        for call in calls:
            y = call(y)
        y.square().sum().backward()
        return [x.grad, *(block.room.clone() for block in modules_of(calls))]  # type: ignore[union-attr,operator]

    assert_as_without(mode, nn.ModuleList([Block(), Block()]), program, steps=5)
