"""torch's pipeline schedules on two ranks: micro-batches in flight, and backward in two parts for zero-bubble ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stacks.composes import assert_same_gradients, outcomes
from tests.stacks.parallel_claims import assert_flops_between, flops, kept_bytes, sent
from tests.stacks.pipelines import SCHEDULES

PP = "pipelines:pipeline"


RUN: dict[str, Any] = {"dropout": 0.1}  # several micro-batches have drawn before the first of them is recomputed


@pytest.mark.parametrize(
    ("schedule", "mode"),
    [*((schedule, "full") for schedule in SCHEDULES), *((schedule, "selective") for schedule in SCHEDULES[1::2])],
)
def test_gradients_and_memory(schedule: str, mode: str) -> None:
    """What is sent is what stages send each other; the peak is that of all micro-batches that are in flight."""
    options = RUN | {"schedule": schedule}
    assert_same_gradients(PP, mode, **options)
    assert kept_bytes(PP, mode, **options) < 0.9 * kept_bytes(PP, "none", **options)
    assert sent(PP, mode, **options) == sent(PP, "none", **options)
    if mode == "selective":
        assert_flops_between(PP, mode, **options)


def test_full_runs_each_region_once_more() -> None:
    once = flops(PP, "full", **RUN, schedule="Schedule1F1B")
    assert once == flops(PP, "torch full", **RUN, schedule="Schedule1F1B")
    assert once == flops(PP, "full", **RUN, schedule="ScheduleGPipe")


@pytest.mark.parametrize("schedule", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_two_parts_of_backward_share_what_one_of_them_recomputed(schedule: str) -> None:
    """torch's checkpoint runs a region anew for each group of parameters, and keeps what it made for each."""
    options, unsplit = RUN | {"schedule": schedule}, RUN | {"schedule": "ScheduleInterleaved1F1B"}
    plain, ours, of_torch = (flops(PP, mode, **options) for mode in ("none", "full", "torch full"))
    region = sum(flops(PP, "full", **unsplit)) - sum(flops(PP, "none", **unsplit))
    assert region <= sum(ours) - sum(plain) <= 2 * region < sum(of_torch) - sum(plain)
    assert kept_bytes(PP, "full", **options) < kept_bytes(PP, "torch full", **options)


def test_stages_without_layers_train_beside_stages_with_some() -> None:
    """Four stages of a model of two layers: the rank with both ends has no block, and the same two lines of code."""
    options = {"schedule": "ScheduleZBVZeroBubble", "layers": 2}
    assert_same_gradients(PP, "full", **options)
    ends, middle = zip(outcomes(PP, "none", **options), outcomes(PP, "full", **options), strict=True)
    assert ends[0].flops == ends[1].flops
    assert middle[0].flops < middle[1].flops
