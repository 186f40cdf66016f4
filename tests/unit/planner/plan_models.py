"""Small models for plans, as `package.module:function` names them: each function returns a model and its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
Built = tuple[nn.Module, tuple[Tensor, ...]]


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
        self.layers = nn.ModuleList(self.make() for _ in range(layers))

    def make(self) -> nn.Module:
        return Block()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Looks(Stack):
    """Asks for the data of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if x.sum() > 0 else 2)


class NoBlocks(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


@torch.library.custom_op("sac_tests_plan::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An op of a library, which may multiply: its FLOPs are not known."""
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, gradient: gradient * 2)


class Library(Block):
    """A block with that op."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(twice(x)).sin()


class OfLibrary(Stack):
    """Blocks with an op of a library."""

    def make(self) -> nn.Module:
        return Library()


def _inputs(seq: int = 64, width: int = WIDTH) -> tuple[Tensor, ...]:
    return (torch.randn(4, seq, width),)


def stack(seq: int = 64, layers: int = 3) -> Built:
    return Stack(layers), _inputs(seq)


def looks() -> Built:
    return Looks(), _inputs()


def of_library() -> Built:
    return OfLibrary(), _inputs()


MODELS: dict[str, Any] = {"stack": stack, "of_library": of_library}
