"""A saved module writes to tensors that the region reads, too: before it calls the module, after it, and between calls.

A recomputation does not run the module. It starts from what was there when the forward began, and finds what the module
left where it serves its result.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.pairs import in_pairs

SIZES = {
    "small": 1,
    "kilobytes": 400,
    "large": 20_000,
}  # copied always, up to 64 KiB where recorded, only if written to
WRITES = ("in place", "rebound", "to the parent")
READS = ("after", "before and after", "between two calls")
WHOLE, OP = {"id": "w", "module": "part", "do": "save"}, {"id": "o", "ops": "aten.tanh", "module": "", "do": "save"}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"rules": [WHOLE]},
    "auto": {"rules": [WHOLE, OP]},
    "replay": {"rules": [WHOLE, OP], "engine": "replay"},
    "rerun": {"rules": [WHOLE, OP], "engine": "rerun"},
}


class Part(nn.Module):
    def __init__(self, size: int, writes: str, kind: str) -> None:
        super().__init__()
        self.linear, self.norm, self.writes = nn.Linear(8, 8), nn.BatchNorm1d(8), writes
        self.parents: list[Block] = []
        if kind == "buffer":
            self.register_buffer("count", torch.zeros(size))
        else:
            self.count = torch.zeros(size)

    def forward(self, x: Tensor) -> Tensor:
        if self.writes == "rebound":
            self.count = self.count + 1
        elif self.writes == "to the parent":
            self.parents[0].seen += 1
        else:
            self.count += 1
        out: Tensor = self.norm(self.linear(x))
        return out


class Block(nn.Module):
    def __init__(self, size: int, writes: str, kind: str, reads: str) -> None:
        super().__init__()
        self.part, self.out, self.reads = Part(size, writes, kind), nn.Linear(8, 8), reads
        self.part.parents.append(self)
        self.register_buffer("seen", torch.zeros(size))

    def read(self) -> Tensor:
        found: Tensor = 1 + self.part.count.mean() + self.seen.mean() + self.part.norm.running_mean.mean()
        return found

    def forward(self, x: Tensor) -> Tensor:
        if self.reads == "before and after":
            x = x * self.read()
        y: Tensor = self.part(x)
        if self.reads == "between two calls":
            y = y + self.part(y * self.read())
        return torch.tanh(self.out(y) * self.read())


def trained(way: dict[str, Any] | None, *args: Any) -> list[Tensor]:
    """Three steps of two micro-batches, whose backwards come after both forwards: gradients and buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(*args), Block(*args))
    if way is not None:
        policy = {"schema": "sac/v1", "name": "p", "default": "recompute", "rules": way["rules"]}
        sac.apply(model, {"mode": "selective", "policy": policy, "blocks": ["*"], "engine": way.get("engine", "auto")})
    found: list[Tensor] = []
    for _ in range(3):
        model.zero_grad()
        losses = [model(torch.randn(4, 8)).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
        found += [one.grad for one in model.parameters() if one.grad is not None]
        found += [one.clone() for one in model.buffers()]
    return found


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
@in_pairs(size=SIZES, writes=WRITES, kind=("buffer", "attribute"), reads=READS, way=WAYS)
def test_what_a_saved_module_writes(size: int, writes: str, kind: str, reads: str, way: dict[str, Any]) -> None:
    """Oracle: the model without sac."""
    case = size, writes, kind, reads
    for one, other in zip(trained(way, *case), trained(None, *case), strict=True):
        assert torch.equal(one, other)
