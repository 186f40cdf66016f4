"""DDP, FSDP1 and FSDP2 on ranks: regions before and after them, units inside regions, accumulated gradients, settings.

FSDP1's `CPUOffload` pins memory, for which torch needs an accelerator: it is not here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

from tests.stacks.composes import assert_composes, assert_same, flops, outcomes, sent
from tests.stacks.composition import differences
from tests.stacks.data_parallel import fsdp2
from tests.stacks.offloading import on_a_device
from tests.support.ranks import RankError, run_ranks

DDP, FSDP1, FSDP2 = (f"data_parallel:{name}" for name in ("ddp", "fsdp1", "fsdp2"))
EXPERTS: dict[str, Any] = {"block": "experts", "nested": True}
BY_NAME: dict[str, Any] = EXPERTS | {"use_orig_params": True, "micro_batches": 2}
ACCUMULATE: dict[str, Any] = {"micro_batches": 2, "reshard_in_between": False}
UNUSED: dict[str, Any] = {"block": "two ways", "find_unused_parameters": True}
SAME_DATA = {"same_data": True}  # as tensor-parallel ranks have: each keeps its half of the inputs
FROZEN = ("embed", "blocks.0", "norm")
CASES: list[tuple[str, str, dict[str, Any]]] = [
    (DDP, "full", {}),
    (DDP, "selective", {}),
    (DDP, "full", {"static_graph": True}),
    (DDP, "selective", {"micro_batches": 2}),
    (DDP, "selective", {"static_graph": True, "order": "after"}),
    (DDP, "full", {"find_unused_parameters": True}),
    (DDP, "full", {"gradient_as_bucket_view": True, "order": "after"}),
    (DDP, "selective", {"frozen": ("embed", "blocks.0", "mlp")}),
    (DDP, "full, reentrant", {}),
    (DDP, "full, reentrant", {"static_graph": True}),
    (DDP, "full, reentrant", {"micro_batches": 2}),
    (DDP, "selective, scattered", SAME_DATA),
    (DDP, "whole modules", {"micro_batches": 2}),
    (DDP, "whole modules", {"static_graph": True, "order": "after"}),
    (DDP, "whole modules, scattered", SAME_DATA),
    (FSDP1, "full", {}),
    (FSDP1, "selective", {}),
    (FSDP1, "selective", {"order": "before"}),
    (FSDP1, "full", {"use_orig_params": True, "order": "before"}),
    (FSDP1, "full", {"bf16": True}),
    (FSDP1, "selective", {"bf16": True, "use_orig_params": True, "micro_batches": 2}),
    (FSDP1, "full", {"frozen": FROZEN, "use_orig_params": True}),
    (FSDP1, "selective", EXPERTS),
    (FSDP1, "full", BY_NAME),
    (FSDP1, "selective", EXPERTS | {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    (FSDP1, "selective, everything", EXPERTS),
    (FSDP1, "selective, everything", BY_NAME),
    (FSDP1, "full, reentrant", {}),
    (FSDP1, "full, reentrant", BY_NAME),
    (FSDP1, "full, inputs on the host", {}),
    (FSDP1, "selective, inputs on the host", {}),
    (FSDP1, "full, scattered", SAME_DATA),
    (FSDP1, "whole modules", {}),
    (FSDP2, "full", {}),
    (FSDP2, "selective", {}),
    (FSDP2, "selective", {"order": "after", "micro_batches": 2}),
    (FSDP2, "full", {"bf16": True, "prefetch": True}),
    (FSDP2, "selective", {"reshard_after_forward": False}),
    (FSDP2, "selective", {"reshard_after_forward": 2, "world": 4}),
    (FSDP2, "full", {"offload": True}),
    (FSDP2, "full", {"unshard_first": True}),
    (FSDP2, "selective", {"frozen": FROZEN}),
    # each expert of a block is a unit too, inside the region
    (FSDP2, "full", EXPERTS),
    (FSDP2, "selective", EXPERTS),
    (FSDP2, "full", EXPERTS | {"order": "after", "bf16": True}),
    (FSDP2, "full", EXPERTS | ACCUMULATE),
    (FSDP2, "selective", EXPERTS | ACCUMULATE),
    (FSDP2, "selective", EXPERTS | {"unshard_first": True}),
    (FSDP2, "full", EXPERTS | {"prefetch": True}),
    (FSDP2, "selective, everything", {}),
    (FSDP2, "selective, everything", EXPERTS | ACCUMULATE),
    (FSDP2, "selective, everything", EXPERTS | {"unshard_first": True}),
    (FSDP2, "full, reentrant", {}),
    (FSDP2, "full, reentrant", EXPERTS | ACCUMULATE),
    (FSDP2, "full, inputs on the host", {}),
    (FSDP2, "selective, inputs on the host", EXPERTS | ACCUMULATE),
    (FSDP2, "selective, scattered", SAME_DATA),
    (FSDP2, "full, scattered", EXPERTS | ACCUMULATE | SAME_DATA),
    (FSDP2, "whole modules", {"bf16": True, "prefetch": True}),
    (FSDP2, "whole modules", {"order": "after", "micro_batches": 2}),
    (FSDP2, "whole modules", {"frozen": ("self_attn",)}),
]


@pytest.mark.parametrize(("stack", "mode", "options"), CASES, ids=str)
def test_composes(stack: str, mode: str, options: dict[str, Any]) -> None:
    assert_composes(stack, mode, **options)


@pytest.mark.parametrize("options", [ACCUMULATE, {"order": "after", "bf16": True}], ids=str)
def test_a_sharded_unit_that_is_saved_as_a_whole(options: dict[str, Any]) -> None:
    """A region with a unit of FSDP inside runs again as Python, and FSDP's own hooks gather its weights again."""
    options = EXPERTS | options
    assert_same(FSDP2, "whole modules", **options)
    none, ours, full = (flops(FSDP2, mode, **options)[0] for mode in ("none", "whole modules", "torch full"))
    assert none < ours <= full
    assert sent(FSDP2, "whole modules", **options) == sent(FSDP2, "torch full", **options)


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("full", {}),
        ("full, inputs on the host", {}),
        ("selective", {"order": "after", "micro_batches": 2}),
        ("full", {"order": "after", "micro_batches": 2}),
    ],
    ids=str,
)
def test_branches_that_ranks_choose_apart_and_parameters_that_nothing_uses(mode: str, more: dict[str, Any]) -> None:
    options = UNUSED | more
    assert_same(DDP, mode, **options)
    ours, plain = outcomes(DDP, mode, **options)[0], outcomes(DDP, "none", **options)[0]
    assert ours.flops > plain.flops if mode == "full" else ours.flops >= plain.flops
    assert ours.collectives == plain.collectives
    assert not any("unused" in name for name in ours.gradients)
    assert {"left", "right"} <= {part for name in ours.gradients for part in name.split(".")}


def test_reentrant_with_unused_parameters_is_refused_by_ddp_itself() -> None:
    """DDP looks for unused parameters in the graph after forward, in which a reentrant region has none: its error."""
    with pytest.raises(RankError, match="has been marked as ready twice"):
        outcomes(DDP, "full, reentrant", **UNUSED)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="tells what torch 2.13 does")
def test_stock_selective_checkpointing_fails_where_a_unit_is_still_gathered() -> None:
    assert all("not found in storage" in error for error in run_ranks(2, error_of_stock))


def error_of_stock() -> str:
    with pytest.raises(Exception) as caught:
        fsdp2("torch selective", **EXPERTS, **ACCUMULATE)
    return str(caught.value)


@pytest.mark.parametrize(
    ("stack", "options"),
    [
        (DDP, {}),
        (FSDP2, {"micro_batches": 2}),
        *(("model_parallel:tensor_parallel", {"kind": kind}) for kind in ("replicated", "dtensor", "sequence")),
    ],
    ids=str,
)
def test_what_rules_offload_on_a_simulated_device(stack: str, options: dict[str, Any]) -> None:
    plain = outcomes(stack, "none", **options)
    for (found, copies, races), reference in zip(run_ranks(2, on_a_device, stack, options), plain, strict=True):
        assert differences(found, reference) == []
        assert copies > 0
        assert races == []
