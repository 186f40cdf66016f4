"""torch.compile with DDP and FSDP2, on two ranks: gradients, FLOPs, kept bytes and collectives of each mode.

No order changes any of them, so each mode has another one.
"""

from __future__ import annotations

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
    model = built(lambda: llama_stack(2))
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
    model = built(lambda: llama_stack(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if order == "apply first":
        sac.apply(model, value)
    if not whole:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    if order == "apply between":
        sac.apply(model, value)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "apply last":
        sac.apply(model, value)
    call = torch.compile(model, backend="aot_eager") if whole else model
    return trained(call, model)


def assert_composes(function: Callable[..., Outcome], *orders: tuple[str, tuple[Any, ...]]) -> None:
    """`orders`: the name of a value, and what else the function is given. Without us there is no order."""
    without = run_ranks(2, function, "none", *orders[0][1])
    runs = [(name, run_ranks(2, function, VALUES[name], *given)) for name, given in orders]
    for rank, none in enumerate(without):
        assert none.collectives
        for name, of_ranks in runs:
            ours = of_ranks[rank]
            assert differences(ours, none) == []
            assert none.flops < ours.flops
            assert ours.kept_bytes < none.kept_bytes
            assert ours.collectives == none.collectives
            for other, full in runs:
                if (name, other) == ("in turn", "full"):
                    assert ours.flops < full[rank].flops
                    assert full[rank].kept_bytes < ours.kept_bytes


# What other orders do is in test_wrong_order.


def test_ddp() -> None:
    orders = [("full", ("apply first",)), ("full", ("apply last",)), ("in turn", ("apply to DDP",))]
    assert_composes(by_ddp, *orders)


@pytest.mark.slow
def test_ddp_whose_optimizer_cuts_the_graph() -> None:
    """A cut goes between regions, never through one."""
    assert_composes(by_cut_ddp, ("in turn", ()))


def test_fsdp2_with_compiled_blocks() -> None:
    orders = [("full", "apply between"), ("full", "apply last"), ("in turn", "apply first")]
    assert_composes(by_fsdp2, *((name, (order, False)) for name, order in orders))


def test_fsdp2_compiled_whole() -> None:
    assert_composes(by_fsdp2, ("full", ("apply last", True)), ("in turn", ("apply last", True)))
