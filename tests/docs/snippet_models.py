"""What the snippets of the pages take a layer and a model for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16


class Layer(nn.Module):
    """What a snippet calls a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))
        return hidden + (out if mask is None else out.masked_fill(mask, 0.0))


class Model(nn.Module):
    """What a snippet calls a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden
