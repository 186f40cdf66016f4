"""DDP, FSDP1 and FSDP2 on ranks: regions before and after them, units inside regions, accumulated gradients, settings.

FSDP1's `CPUOffload` pins memory, for which torch needs an accelerator: it is not here.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import ShardingStrategy

from sac.stores import transfers
from sac.stores.transfers import TransferLimits
from tests.stacks.composition import Outcome, differences, least_kept
from tests.stacks.matrix import assert_as_promised, line_of
from tests.stacks.registry import EVERYWHERE, Stack, row, train, trained
from tests.support.blocks import policy, save
from tests.support.ranks import run_ranks
from tests.support.simulated_streams import simulated_streams

DDP, FSDP1, FSDP2 = (f"data_parallel:{name}" for name in ("ddp", "fsdp1", "fsdp2"))
ALL = (*EVERYWHERE, "reentrant", "on the host")
FROZEN = ("embed", "blocks.0", "norm")
EXPERTS: dict[str, Any] = {"block": "experts", "nested": True}  # each expert is a unit too, inside the region
ROWS = (
    row(DDP, 2, micro_batches=2),
    row(DDP, 2, ALL, static_graph=True, order="after"),
    row(DDP, 2, find_unused_parameters=True, gradient_as_bucket_view=True),
    row(DDP, 2, frozen=("embed", "blocks.0")),
    row(FSDP1, 2, order="before"),
    row(FSDP1, 2, frozen=("embed", "norm"), bf16=True, use_orig_params=True, micro_batches=2),
    row(FSDP1, 2, **EXPERTS, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    row(FSDP2, 2, order="after", micro_batches=2, offload=True),
    row(FSDP2, 2, frozen=FROZEN, reshard_after_forward=False),
    row(FSDP2, 4, reshard_after_forward=2),
    row(FSDP2, 2, **EXPERTS, order="after", bf16=True, prefetch=True),
    row(FSDP2, 2, **EXPERTS, unshard_first=True),
    row(FSDP2, 2, (*EVERYWHERE, "on the host"), **EXPERTS, micro_batches=2, reshard_in_between=False),
)


@pytest.mark.parametrize("stack", ROWS, ids=lambda stack: stack.name)
def test_a_row(stack: Stack) -> None:
    """Weights are gathered and gradients reduced as often as without checkpointing."""
    line = line_of(stack)
    assert_as_promised(line)
    assert [cell.sent for cell in line.cells] == [1] * len(stack.modes)


def test_units_inside_regions_of_fsdp1_are_gathered_again() -> None:
    """By their own hooks, when the region runs again."""
    stack = row(FSDP1, 2, (*EVERYWHERE, "reentrant"), **EXPERTS, use_orig_params=True)
    assert_as_promised(line_of(stack), sends_again=True)


@pytest.mark.parametrize(
    "stack",
    [
        row(FSDP1, 2, **EXPERTS, use_orig_params=True),
        row(FSDP2, 2, **EXPERTS, micro_batches=2, reshard_in_between=False),
    ],
    ids=lambda stack: stack.name,
)
def test_what_is_gathered_is_no_value_to_save(stack: Stack) -> None:
    """Nor is gathering inside of a region the region's write."""
    plain = trained(stack, "none")
    for value, engine in ((policy(default="save"), "auto"), (policy(save("matmul")), "rerun")):
        found = trained(stack, {"mode": "selective", "policy": value, "engine": engine})
        for ours, reference in zip(found, plain, strict=True):
            assert differences(ours, reference) == []
        assert least_kept(found, plain) <= 1


@pytest.mark.parametrize("more", [{}, {"order": "after", "micro_batches": 2}], ids=str)
def test_branches_that_ranks_choose_apart_and_parameters_that_nothing_uses(more: dict[str, Any]) -> None:
    stack = row(DDP, 2, block="two ways", find_unused_parameters=True, **more)
    for ours, plain in zip(trained(stack, "full"), trained(stack, "none"), strict=True):
        assert differences(ours, plain) == []
        assert ours.flops > plain.flops
        assert ours.collectives == plain.collectives
        assert not any("unused" in name for name in ours.gradients)
        assert {"left", "right"} <= {part for name in ours.gradients for part in name.split(".")}


def on_a_device(function: str, options: dict[str, Any]) -> tuple[Outcome, int, list[str]]:
    """Return what the rank has after training, how often it has copied, and what it has read too early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "LIMITS", TransferLimits(smallest=1, in_flight=0, ahead=1 << 20))
        with simulated_streams(patch) as device:
            offloads = {"mode": "selective", "policy": policy({"ops": "matmul", "do": "offload"}), "store": "host"}
            found = train(function, offloads, options)
        return found, sum("copies" in line for line in device.log), device.races


@pytest.mark.parametrize(
    ("function", "options"), [(FSDP2, {}), ("model_parallel:tensor_parallel", {"kind": "dtensor"})], ids=str
)
def test_what_rules_offload_on_a_simulated_device(function: str, options: dict[str, Any]) -> None:
    plain = trained(row(function, 2, **options), "none")
    for (found, copies, races), reference in zip(run_ranks(2, on_a_device, function, options), plain, strict=True):
        assert differences(found, reference) == []
        assert copies > 0
        assert races == []
