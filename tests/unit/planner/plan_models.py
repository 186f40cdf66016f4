"""Small models for plans, as `package.module:function` names them: each function returns a model and its inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, and the mean square of what they give."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Looks(Stack):
    """Asks for the data of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if x.sum() > 0 else 2)


def stack(seq: int = 64, layers: int = 3, batch: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Stack(layers), (torch.randn(batch, seq, WIDTH),)
