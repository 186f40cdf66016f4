"""Ranks send the same collectives in a step in which one of them keeps its activations, since it does something new."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sac
from sac.errors import SacWarning
from tests.support.rank_programs import CollectivesSent, FunctionalSum
from tests.support.ranks import run_ranks

STEPS, NEW_IN = 4, 2


class Layer(nn.Module):
    """Sends the sum of its hidden state; does something new on rank 1 in one step."""

    def __init__(self, new: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.new, self.calls = new, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = FunctionalSum.apply(self.up(x).sin()).cos()  # type: ignore[no-untyped-call]
        if dist.get_rank() == 1 and self.calls == NEW_IN + 1:
            if self.new == "writes":
                self.count.add_(h.detach().mean())
            else:
                h = h.topk(4, dim=-1).values.sin()
        return self.down(h * self.count.cos()).sin()


def trained(new: str, way: Any) -> tuple[list[int], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(new), Layer(new))
    if way is not None:
        sac.apply(model, {**way, "blocks": ["*"]})
    sent, seen = [], []
    for step in range(STEPS):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SacWarning)
            loss = model(x).square().sum()
            with CollectivesSent() as counted:
                loss.backward()
        sent.append(counted.count)
        seen += [parameter.grad.clone() for parameter in model.parameters()] + [model[0].count.clone()]
    return sent, seen


def compared(new: str, way: Any) -> tuple[list[int], bool]:
    sent, seen = trained(new, way)
    _, expected = trained(new, None)
    return sent, all(map(torch.equal, seen, expected))


@pytest.mark.parametrize("new", ["writes", "chooses"])
def test_all_ranks_take_part(new: str) -> None:
    (one, is_exact), (other, is_exact_too) = run_ranks(2, compared, new, {"mode": "full"})
    assert one == other
    assert min(one) > 0  # a recomputation sends again, in each step
    assert is_exact
    assert is_exact_too
