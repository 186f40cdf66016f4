"""torch.compile beside DDP and FSDP2, on two ranks: gradients, FLOPs, kept bytes and collectives of each mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sac
from tests.stacks.composition import Outcome, differences, forward_done, outcome
from tests.support.blocks import FULL, alternate, llama_stack, policy, save, selective, tokens
from tests.support.ranks import run_ranks
from tests.support.training import built

VALUES = {"full": FULL, "in turn": selective(policy(save("attention"), alternate("matmul")))}


def trained(call: nn.Module, model: nn.Module, width: int = 32) -> Outcome:
    """Steps on this rank's own batch; the first compiles."""
    torch.manual_seed(10 + dist.get_rank())
    x = tokens(batch=4, length=32, d=width)[0].requires_grad_()

    def step() -> Tensor:
        loss = call(x).square().sum()
        forward_done()
        loss.backward()
        return loss

    step()
    return outcome(step, model, compiled=True)


def by_ddp(value: Any, order: str) -> Outcome:
    torch._dynamo.reset()
    model = built(lambda: llama_stack(3))
    if order == "apply first":
        sac.apply(model, value)
    wrapped = DistributedDataParallel(model)
    if order == "apply to DDP":
        sac.apply(wrapped, value)
    call = torch.compile(wrapped, backend="aot_eager")
    if order == "apply last":
        sac.apply(call, value)
    return trained(call, model)


def by_cut_ddp(value: Any) -> Outcome:
    """DDP with buckets of 1 MiB, the least that its optimizer takes, and blocks that are larger."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = sac.apply(built(lambda: llama_stack(3, d=256)), value)
    call = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend="aot_eager")
    result = trained(call, model, width=256)
    assert torch._dynamo.utils.counters["aot_autograd"]["total"] > 1  # graphs: there was a cut
    return result


def by_fsdp2(value: Any, order: str, whole: bool) -> Outcome:
    torch._dynamo.reset()
    model = built(lambda: llama_stack(3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if order == "apply first":
        sac.apply(model, value)
    if not whole:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "apply last":
        sac.apply(model, value)
    call = torch.compile(model, backend="aot_eager") if whole else model
    return trained(call, model)


@functools.cache
def plain(function: Callable[..., Outcome], *args: Any) -> list[Outcome]:
    """Each rank's run without us, which no order changes."""
    return run_ranks(2, function, "none", *args)


def assert_composes(function: Callable[..., Outcome], reference: list[Outcome], *args: Any) -> None:
    runs = zip(reference, *(run_ranks(2, function, value, *args) for value in VALUES.values()), strict=True)
    for none, full, chosen in runs:
        assert differences(full, none) == []
        assert differences(chosen, none) == []
        assert none.flops < chosen.flops < full.flops
        assert full.kept_bytes < chosen.kept_bytes < none.kept_bytes
        assert none.collectives
        assert full.collectives == chosen.collectives == none.collectives


# What other orders do is in test_wrong_order.


@pytest.mark.parametrize("order", ["apply last", "apply to DDP"])
def test_ddp(order: str) -> None:
    assert_composes(by_ddp, plain(by_ddp, ""), order)


@pytest.mark.slow
def test_ddp_whose_optimizer_cuts_the_graph() -> None:
    """A cut goes between regions, never through one."""
    assert_composes(by_cut_ddp, plain(by_cut_ddp))


def test_fsdp2_with_compiled_blocks() -> None:
    assert_composes(by_fsdp2, plain(by_fsdp2, "", False), "apply first", False)


def test_fsdp2_compiled_whole() -> None:
    assert_composes(by_fsdp2, plain(by_fsdp2, "", True), "apply last", True)
