"""Groups over which inputs are scattered: meshes, tensor-parallel layers, DTensors. With FSDP2: tests/stacks."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import sac
from sac.stores.scatter import StoredShare
from tests.support.blocks import Stack
from tests.support.cases import Run, Seen, hidden, layer, seen
from tests.support.ranks import run_ranks
from tests.support.stored_regions import OVER_RANKS, as_region, plainly, wrong
from tests.support.training import built, same_bits


def chain(run: Run) -> Seen:
    model, (x, h) = layer(5), hidden(3, 5)
    return seen(run(model, run(model, h)), x, model)


def group_of_one() -> list[list[str]]:
    own = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    return [wrong(chain, as_region(store, group=own)) for store in OVER_RANKS]


def test_a_group_of_one_rank_has_nothing_to_scatter():
    assert run_ranks(2, group_of_one) == [[[], [], []]] * 2


def distributed_tensors(placements: list[Any]) -> tuple[list[str], int]:
    """A DTensor on a mesh of (dp, tp): what differs, and the shares that are kept of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    kept = []

    def program(run: Run) -> Seen:
        x = distribute_tensor(torch.randn(4, 6), mesh, placements).requires_grad_()
        weight = distribute_tensor(torch.randn(6, 6), mesh, [Replicate(), Replicate()]).requires_grad_()
        result = run(lambda h: torch.tanh(h @ weight), x * 2)
        if run is not plainly:
            kept.append(sum(isinstance(one, StoredShare) for one in gc.get_objects()))
        result.full_tensor().square().sum().backward()
        return {"input": x.grad.full_tensor(), "weight": weight.grad.full_tensor(), "result": result.full_tensor()}

    return wrong(program, as_region("scattered", group=mesh["tp"])), kept[-1]


@pytest.mark.parametrize(
    ("placements", "shares"),
    [([Replicate(), Replicate()], 1), ([Shard(0), Replicate()], 1), ([Replicate(), Shard(0)], 0)],
)
def test_distributed_tensors(placements, shares):
    """Over a mesh of one dimension; what is split over it already is not scattered."""
    assert run_ranks(4, distributed_tensors, placements) == [([], shares)] * 4


# -- Models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


PLANS: dict[str, dict[str, Any]] = {
    "plain": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "replicated": {
        "up": ColwiseParallel(input_layouts=Replicate()),
        "down": RowwiseParallel(use_local_output=False),
    },
    "sequence": {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    },
}


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def parallel_model(kind: str, more: dict[str, Any]) -> tuple[list[bool], list[int]]:
    """Whether steps with regions are as without, and the bytes of each region's input."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = built(lambda: Stack(*[Block() for _ in range(3)]))
    for block in model.blocks:
        if kind == "replicated":
            distribute_module(block.norm, mesh)
        parallelize_module(block, mesh, PLANS[kind])
    placement = {"replicated": [Replicate()], "sequence": [Shard(0)]}.get(kind)
    x = torch.randn(6, 8)

    def step() -> list[Tensor]:
        own = (x.clone() if placement is None else distribute_tensor(x, mesh, placement)).requires_grad_()
        out = model(own)
        local(out).square().sum().backward()
        found = [local(out).detach(), *(local(one.grad) for one in (own, *model.parameters()))]
        model.zero_grad()
        return found

    plain = step()
    sac.apply(model, {"mode": "full", "blocks": ["blocks.*"]} | more, tp_group=mesh["tp"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = [all(map(same_bits, plain, step())) for _ in range(3)]
    return same, [kind["input_bytes"] for kind in sac.report(model).to_dict()["kinds"]]


SETTINGS: list[dict[str, Any]] = [
    {"store": "scattered"},
    {"mode": "selective", "store": "scattered+host"},
    {"store": "scattered", "use_reentrant": True},
]


@pytest.mark.parametrize("more", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", PLANS)
def test_models_that_torch_makes_parallel(kind, more):
    """A sequence-parallel DTensor is split already: nothing is to be scattered. Nothing warns."""
    assert run_ranks(2, parallel_model, kind, more) == [([True] * 3, [6 * 8 * 4 // 2])] * 2
