"""Every mode with every store on every program: results, gradients and random states are those of the plain call."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.support.cases import CASES
from tests.support.pairs import in_pairs
from tests.support.ranks import run_ranks
from tests.support.stored_regions import HERE, MODES, OVER_RANKS, compare, does_not_fit


@in_pairs(mode=MODES.keys(), store=HERE, name=CASES.keys(), keep=("first", "all"), unless=does_not_fit)
def test_one_process(mode, store, name, keep):
    assert compare(name, store, MODES[mode], keep=keep) == []


def compare_on_rank(name: str, store: str, reentrant: bool, more: dict[str, Any]) -> list[str]:
    return compare(name, store, reentrant, dist.group.WORLD, **more)


@in_pairs(mode=MODES.keys(), store=OVER_RANKS, name=CASES.keys(), unless=does_not_fit)
def test_two_ranks(mode, store, name):
    assert run_ranks(2, compare_on_rank, name, store, MODES[mode], {}) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_input_over_four_ranks(name):
    assert run_ranks(4, compare_on_rank, name, "scattered", False, {"keep": "all"}) == [[]] * 4
