"""Chains of layers, for tests of the layers that are chosen and of chunks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sac.blocks.install import regions_of
from tests.support.blocks import LlamaLikeBlock, with_dropout


class Chain(nn.Sequential):
    """A subclass that leaves forward alone."""


def chain(layers: int = 5, d: int = 32) -> nn.Sequential:
    return Chain(*(LlamaLikeBlock(d) for _ in range(layers)))


def dropping_chain(layers: int = 5) -> nn.Module:
    return with_dropout(chain(layers), 0.2)


class Between(nn.Module):
    """A model whose layers stand in a Sequential, with an embedding and a head around it."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.layers = nn.Sequential(*(LlamaLikeBlock() for _ in range(layers)))
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def full(layers: Any, **more: Any) -> dict[str, Any]:
    return {"mode": "full", "layers": layers, **more}


def paths(model: nn.Module) -> list[str]:
    return [one.region.path for one in regions_of(model)]
