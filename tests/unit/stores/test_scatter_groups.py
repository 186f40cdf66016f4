"""Groups over which inputs are scattered: some of the ranks, meshes, tensor-parallel layers, DTensors."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import sac
from sac.config import CallOptions, settings_of
from sac.full import FullConfig
from sac.stores.scatter import StoredShare
from tests.support.blocks import Stack
from tests.support.ranks import run_ranks
from tests.support.scattering import Run, Seen, differences, mlp, plainly, scattered, summed_up, weights
from tests.support.training import same_bits


def over_a_mesh() -> list[str]:
    """The tensor-parallel dimension of a mesh of two, given as a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def program(run: Run) -> Seen:
        torch.manual_seed(mesh.get_local_rank("dp"))
        x = torch.randn(3, 5, requires_grad=True)
        model = mlp(5)
        return summed_up(run(model, x * 2), x) | weights(model)

    return differences(program, scattered(mesh["tp"]))


def test_a_mesh_of_one_dimension():
    assert run_ranks(4, over_a_mesh) == [[]] * 4


def plain_chain(run: Run) -> Seen:
    x = torch.randn(3, 5, requires_grad=True)
    model = mlp(5)
    return summed_up(run(model, run(model, x * 2)), x) | weights(model)


def group_of_one() -> list[Any]:
    own = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    stores = []
    for store in ("scattered", "scattered+host", "scattered+contiguous"):
        count = 4 if "contiguous" in store else None
        options = CallOptions(tp_group=own)
        keeping = settings_of(FullConfig(store=store, num_checkpoints=count), options, "here").input_storing
        stores.append(None if keeping is None else type(keeping.store).__name__)
    return [differences(plain_chain, scattered(own)), stores]


def test_a_group_of_one_rank_has_nothing_to_scatter():
    assert run_ranks(2, group_of_one) == [[[], [None, "OnHost", "ContiguousBuffer"]]] * 2


def distributed_tensors(placements: list[Any]) -> tuple[list[str], int]:
    """A DTensor on a mesh of (dp, tp): what differs, and the bytes kept of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    kept = []

    def program(run: Run) -> Seen:
        x = distribute_tensor(torch.randn(4, 6), mesh, placements).requires_grad_()
        weight = distribute_tensor(torch.randn(6, 6), mesh, [Replicate(), Replicate()]).requires_grad_()
        h = (x * 2).t() if placements[0] == Replicate() else x * 2
        result = run(lambda h: torch.tanh(h.view(4, 6) @ weight if h.shape == (4, 6) else weight @ h), h)
        if run is not plainly:
            kept.append(sum(isinstance(one, StoredShare) for one in gc.get_objects()))
        result.full_tensor().square().sum().backward()
        return {"input": x.grad.full_tensor(), "weight": weight.grad.full_tensor(), "result": result.full_tensor()}

    return differences(program, scattered(mesh["tp"])), kept[-1]


def test_distributed_tensors():
    whole = run_ranks(4, distributed_tensors, [Replicate(), Replicate()])
    assert whole == [([], 1)] * 4
    by_batch = run_ranks(4, distributed_tensors, [Shard(0), Replicate()])
    assert by_batch == [([], 1)] * 4
    split_already = run_ranks(4, distributed_tensors, [Replicate(), Shard(0)])
    assert split_already == [([], 0)] * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def parallel_stack(kind: str, mesh: DeviceMesh) -> Stack:
    """Blocks that torch makes tensor parallel; what goes from one to the next is a `kind` of tensor."""
    torch.manual_seed(0)
    model = Stack(*[Block() for _ in range(3)])
    for block in model.blocks:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if kind == "replicated":
            distribute_module(block.norm, mesh)
            plan = {
                "up": ColwiseParallel(input_layouts=Replicate()),
                "down": RowwiseParallel(use_local_output=False),
            }
        if kind == "sequence":
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            }
        parallelize_module(block, mesh, plan)
    return model


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def parallel_model(kind: str, more: dict[str, Any]) -> tuple[list[bool], list[int]]:
    """Whether steps with regions are as without, and the bytes of each region's input."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallel_stack(kind, mesh)
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


@pytest.mark.parametrize(
    "more",
    [
        {"distribute_saved_activations": True},
        {"mode": "selective", "store": "scattered+host"},
        {"store": "scattered", "use_reentrant": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["plain", "replicated", "sequence"])
def test_models_that_torch_makes_parallel(kind, more):
    """A sequence-parallel DTensor is split already: nothing is to be scattered. Nothing warns."""
    assert run_ranks(2, parallel_model, kind, more) == [([True] * 3, [6 * 8 * 4 // 2])] * 2
