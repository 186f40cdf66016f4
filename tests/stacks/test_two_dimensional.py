"""Four ranks in two dimensions: FSDP2 with tensor and sequence parallelism, and with a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stacks.composes import assert_same_gradients, outcomes
from tests.stacks.composition import differences
from tests.stacks.parallel_claims import (
    assert_flops_between,
    assert_full,
    assert_scattered,
    assert_selective,
    kept_bytes,
    sent,
)

FSDP_TP: tuple[str, dict[str, Any]] = ("model_parallel:fsdp_tp", {"world": 4})
FSDP_PP: tuple[str, dict[str, Any]] = ("pipelines:pipeline_dp", {"world": 4})


def test_sharded_tensor_parallel() -> None:
    stack, options = FSDP_TP
    assert_full(stack, **options, kind="replicated")
    assert_selective(stack, **options, kind="replicated")


def test_sharded_sequence_parallel() -> None:
    stack, options = FSDP_TP
    assert_selective(stack, **options, kind="sequence")


@pytest.mark.parametrize("order", ["before", "after"])
def test_any_order(order: str) -> None:
    """Regions are put on first, or last of all; above between tensor parallelism and `fully_shard`."""
    stack, options = FSDP_TP
    between = outcomes(stack, "selective", **options, kind="replicated")
    found = outcomes(stack, "selective", **options, kind="replicated", order=order)
    assert [differences(one, other) for one, other in zip(found, between, strict=True)] == [[]] * 4
    assert [one.flops for one in found] == [one.flops for one in between]
    assert [one.collectives for one in found] == [one.collectives for one in between]


def test_scattered_over_the_tensor_parallel_group_alone() -> None:
    stack, options = FSDP_TP
    assert_scattered(stack, "full", **options, kind="replicated")


def test_sharded_pipeline() -> None:
    """Units are gathered as often as without checkpointing: they stay gathered for all micro-batches of a step."""
    stack, options = FSDP_PP[0], FSDP_PP[1] | {"schedule": "ScheduleInterleavedZeroBubble"}
    for mode in ("full", "selective"):
        assert_same_gradients(stack, mode, **options)
        assert sent(stack, mode, **options) == sent(stack, "none", **options)
        assert kept_bytes(stack, mode, **options) < 0.9 * kept_bytes(stack, "none", **options)
    assert_flops_between(stack, "selective", **options)
