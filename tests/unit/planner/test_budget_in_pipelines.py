"""Each stage of a pipeline plans by itself for its budget, with the micro-batches that its schedule has in flight."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.unit.planner.rank_trainings import staged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [
        ("ScheduleInterleaved1F1B", (4, 3)),
        ("ScheduleInterleavedZeroBubble", None),  # what a stage keeps is there until the backward for its weights
    ],
)
def test_stages_stay_within_their_budgets_and_use_most_of_the_room(
    schedule: str, in_flight: tuple[int, int] | None
) -> None:
    full, none = (run_ranks(2, staged, schedule, mode) for mode in ("full", None))
    # gloo's threads sometimes hold longer what they have sent: the least of some steps is that of the ops
    lows, highs = ([min(peaks) for peaks, *_ in found] for found in (full, none))
    budgets = [int(low + 0.6 * (high - low)) for low, high in zip(lows, highs, strict=True)]
    found = run_ranks(2, staged, schedule, budgets)
    for rank, (low, budget) in enumerate(zip(lows, budgets, strict=True)):
        peaks, parameters, (least, flying) = found[rank]
        # The plan also counts the buffers that a schedule allocates once and for all: the room is what they leave.
        share = 0.8 if in_flight else 0.0
        assert low + share * (budget - max(least, low)) <= min(peaks) <= budget
        assert in_flight is None or flying == in_flight[rank]
        assert all(torch.equal(one, other) for one, other in zip(parameters, none[rank][1], strict=True))
