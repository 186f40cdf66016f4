"""A model of three small blocks, for tests that say in a line what differs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DIM = 16
INPUTS = (torch.linspace(-1, 1, 32 * DIM).reshape(32, DIM),)


class Block(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.dropout, self.between = nn.Dropout(0.1), between

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        if self.between is not None:
            hidden = self.between(hidden)
        return x + self.dropout(self.down(hidden))


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module, returns: Callable[[Tensor], Any] = lambda x: x.square().mean()) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(blocks or (Block(), Block(), Block()))
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.returns(x)


def stops(x: Tensor) -> Tensor:
    return x * x.sum().item()
