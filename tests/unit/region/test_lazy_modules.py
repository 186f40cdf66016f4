"""Lazy modules in a region: its first call makes their parameters, and runs without checkpointing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import RegionError
from tests.support.oracle import assert_exact, built_model, on_every_way
from tests.support.programs import WIDTH, Block, Program
from tests.support.ways import WAYS


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.LazyLinear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(self.norm(torch.sin(self.up(x)))))


def own_forward(block: Block, x: Tensor) -> Tensor:
    raise AssertionError


LAZY = Program("lazy", own_forward, block=Lazy, not_under=("context_fn",))


@on_every_way([LAZY])
def test_training_is_the_same(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


def test_rules_are_not_said_to_match_nothing() -> None:
    model = built_model(LAZY, WAYS["whole modules"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.randn(3, WIDTH)).sum().backward()
    assert told == []
    assert sac.report(model).zero_hit_rules == ()


def test_context_fn_refuses_them() -> None:
    model = built_model(LAZY, WAYS["context_fn"])
    with pytest.raises(RegionError, match="a lazy module would create its parameters in this call"):
        model(torch.randn(3, WIDTH))
