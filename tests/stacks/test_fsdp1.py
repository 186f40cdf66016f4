"""FullyShardedDataParallel (FSDP1) on CPU: regions on the sharded model, as its users put them there, and before.

Its `CPUOffload` pins memory, for which torch needs an accelerator: it is not here.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import ShardingStrategy

from tests.stacks.composes import (
    assert_composes,
    assert_everything_figures,
    assert_full_figures,
    assert_same_gradients,
    outcomes,
)

EXPERTS: dict[str, Any] = {"block": "experts", "nested": True}
BY_NAME: dict[str, Any] = EXPERTS | {"use_orig_params": True, "micro_batches": 2}


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("full", {}),
        ("selective", {}),
        ("selective", {"order": "before"}),
        ("full", {"use_orig_params": True, "order": "before"}),
        ("full", {"bf16": True}),
        ("selective", {"bf16": True, "use_orig_params": True, "micro_batches": 2}),
        ("full", {"frozen": ("embed", "blocks.0", "norm"), "use_orig_params": True}),
        ("selective", EXPERTS),
        ("full", BY_NAME),
        ("selective", EXPERTS | {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    ],
    ids=str,
)
def test_composes(mode: str, options: dict[str, Any]) -> None:
    assert_composes("fsdp1", mode, **options)


@pytest.mark.parametrize("options", [EXPERTS, BY_NAME], ids=str)
def test_saving_everything_keeps_no_gathered_weights(options: dict[str, Any]) -> None:
    assert_same_gradients("fsdp1", "selective, everything", **options)
    assert_everything_figures("fsdp1", "selective, everything", **options)


@pytest.mark.parametrize("options", [{}, BY_NAME], ids=str)
def test_reentrant(options: dict[str, Any]) -> None:
    assert_same_gradients("fsdp1", "full, reentrant", **options)
    assert_full_figures("fsdp1", "full, reentrant", **options)


@pytest.mark.parametrize("mode", ["full, inputs on the host", "selective, inputs on the host"])
def test_inputs_on_the_host(mode: str) -> None:
    assert_same_gradients("fsdp1", mode)
    assert outcomes("fsdp1", mode)[0].flops == outcomes("fsdp1", mode.split(",")[0])[0].flops


def test_inputs_scattered_over_the_ranks() -> None:
    """The ranks have the same data, as tensor-parallel ones do; each keeps its half of the inputs."""
    assert_same_gradients("fsdp1", "full, scattered", same_data=True)
    ours, kept_whole = (outcomes("fsdp1", mode, same_data=True)[0] for mode in ("full, scattered", "full"))
    assert ours.kept_bytes < kept_whole.kept_bytes
    assert ours.flops == kept_whole.flops
