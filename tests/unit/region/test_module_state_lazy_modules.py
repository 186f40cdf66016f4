"""Lazy modules in a region: its first call makes their parameters, and runs without checkpointing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.every_mode import MODES, WHOLE, state_of, under


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.dropout, self.down = (
            nn.LazyLinear(6),
            nn.LazyBatchNorm1d(),
            nn.Dropout(),
            nn.LazyLinear(4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(self.norm(torch.sin(self.up(x)))))


def blocks(count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(Lazy() for _ in range(count))


def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    out = x
    for call in calls:
        out = call(out)
    out.square().sum().backward()
    return [out.detach(), x.grad]


@pytest.mark.parametrize("mode", MODES)
def test_gradients_parameters_and_buffers_are_those_without(mode: str) -> None:
    from tests.support import every_mode

    plain, mine = list(blocks()), under(mode, blocks())
    for step in range(3):
        found = []
        for calls in (plain, mine):
            torch.manual_seed(step)
            found.append([*program(calls, step), *state_of(calls), torch.get_rng_state()])
        assert every_mode.equal(*found), step


def test_rules_are_not_said_to_match_nothing() -> None:
    mine = sac.apply(blocks(), {"mode": "selective", "policy": WHOLE, "blocks": ["*"]})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            program(list(mine), 0)
    assert [str(one.message) for one in told] == []
    assert sac.report(mine).zero_hit_rules == ()
