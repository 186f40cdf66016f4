"""Ranks that share parameters make one plan, for the largest sizes among them, and stay within the budget."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from sac.errors import PlanError
from sac.planner.agreeing import Grounds, largest
from sac.planner.observing import FORWARD, StepPhase, StepRecord
from sac.planner.profile import Entry, RegionProfile
from tests.support.ranks import run_ranks
from tests.unit.planner.rank_trainings import Found, replicated, sharded, tensor_parallel, trained
from tests.unit.planner.small_training import within

WAYS = pytest.mark.parametrize("way", [sharded, tensor_parallel, replicated])


@cache
def on_ranks(way: Any, mode: str | None) -> list[Found]:
    return run_ranks(2, trained, way, mode)


@WAYS
@pytest.mark.slow
def test_each_rank_is_within_the_budget(way: Any) -> None:
    # gloo's threads sometimes hold longer what they have sent: the least of some steps is that of the ops
    low, high = (min(peak for peaks, *_ in on_ranks(way, mode) for peak in peaks) for mode in ("full", None))
    budget = int(low + 0.6 * (high - low))
    found = run_ranks(2, trained, way, within(budget))
    for (peaks, losses, _), (_, others, _) in zip(found, on_ranks(way, None), strict=True):
        assert low + 0.8 * (budget - low) <= min(peaks) <= budget
        assert all(torch.equal(one, other) for one, other in zip(losses, others, strict=True))
    assert found[0][2] == found[1][2]


@pytest.mark.slow
def test_the_plan_is_for_the_largest_batch_among_the_ranks() -> None:
    alike, uneven = (run_ranks(2, trained, sharded, within("50%"), rows) for rows in ((6, 6), (4, 6)))
    (saved, peak, least, most), other = uneven[0][2], uneven[1][2]
    assert (saved, peak, least, most) == other
    assert most >= 0.95 * alike[0][2][3]
    assert max(min(peaks) for peaks, *_ in uneven) <= peak


def profile(size: int) -> RegionProfile:
    entry = Entry(0, "up", "aten.mm.default", 0, (0,), (1,), savable=True, flops=size * 2, moved_bytes=size * 3)
    return RegionProfile((entry,), (0, 1), (0, size), ((1, 1),))


def grounds(size: int, path: str = "layers.0") -> Grounds:
    phase = StepPhase(FORWARD, path, (), 0, size, size + 7, size + 1)
    record = StepRecord((path,), (phase,), size, shapes=(((4, size),),))
    return Grounds((profile(size),), record, size, 100 - size)


def test_largest_numbers() -> None:
    found = largest([grounds(8), grounds(16), grounds(4)])
    assert found == grounds(16)
    assert largest([replace(grounds(8), extra=99), grounds(16)]) == replace(grounds(16), extra=99)
    without = replace(grounds(8), profiles=(RegionProfile(reason="odd"),))
    assert largest([without, grounds(16)]) == replace(grounds(16), profiles=without.profiles)


def test_ranks_that_run_different_regions() -> None:
    with pytest.raises(PlanError, match="run different regions"):
        largest([grounds(8), grounds(8, path="layers.1")])
