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
from tests.stacks.data_parallel import SCATTERED

EXPERTS: dict[str, Any] = {"block": "experts", "nested": True}
BOTH = pytest.mark.parametrize("mode", ["full", "selective"])


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order": "before"},
        {"use_orig_params": True},
        {"use_orig_params": True, "order": "before"},
        {"bf16": True},
        {"bf16": True, "use_orig_params": True, "micro_batches": 2},
        {"frozen": ("embed", "blocks.0", "norm"), "use_orig_params": True},
        EXPERTS,
        EXPERTS | {"use_orig_params": True, "micro_batches": 2},
        EXPERTS | {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    ],
    ids=str,
)
def test_composes(mode: str, options: dict[str, Any]) -> None:
    assert_composes("fsdp1", mode, **options)


@pytest.mark.parametrize("options", [EXPERTS, EXPERTS | {"use_orig_params": True}], ids=str)
def test_saving_everything_keeps_no_gathered_weights(options: dict[str, Any]) -> None:
    assert_same_gradients("fsdp1", "selective, everything", **options)
    assert_everything_figures("fsdp1", "selective, everything", **options)


@pytest.mark.parametrize("options", [{}, {"use_orig_params": True, "micro_batches": 2}], ids=str)
def test_reentrant(options: dict[str, Any]) -> None:
    assert_same_gradients("fsdp1", "full, reentrant", **options)
    assert_full_figures("fsdp1", "full, reentrant", **options)


@pytest.mark.parametrize("mode", ["full, inputs on the host", "selective, inputs on the host"])
def test_inputs_on_the_host(mode: str) -> None:
    assert_same_gradients("fsdp1", mode)
    assert outcomes("fsdp1", mode)[0].flops == outcomes("fsdp1", mode.split(",")[0])[0].flops


@pytest.mark.parametrize("mode", SCATTERED)
def test_inputs_scattered_over_the_ranks(mode: str) -> None:
    """The ranks have the same data, as tensor-parallel ones do; each keeps its half of the inputs."""
    assert_same_gradients("fsdp1", mode, same_data=True)
    whole = mode.split(",")[0]
    ours, kept_whole = outcomes("fsdp1", mode, same_data=True)[0], outcomes("fsdp1", whole, same_data=True)[0]
    assert ours.kept_bytes < kept_whole.kept_bytes
    assert ours.flops == kept_whole.flops
