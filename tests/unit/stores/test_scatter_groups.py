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
from sac.stores.layout import Layout
from sac.stores.scatter import StoredShare
from tests.support.blocks import Stack
from tests.support.rank_programs import SummedOverRanks
from tests.support.ranks import run_ranks
from tests.support.scattering import Run, Seen, differences, mlp, plainly, scattered, summed_up, weights
from tests.support.training import same_bits


def two_pairs() -> list[str]:
    """Tensor-parallel pairs in a world of four; the data of the two pairs differ."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2

    def program(run: Run) -> Seen:
        torch.manual_seed(pair)
        x = torch.randn(3, 5 + pair, requires_grad=True)
        model = mlp(5 + pair)
        return summed_up(run(model, run(model, x * 2)), x) | weights(model)

    return differences(program, scattered(pairs[pair]))


def test_a_group_of_some_ranks():
    assert run_ranks(4, two_pairs) == [[]] * 4


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


class Spread(torch.autograd.Function):
    """As it is in forward, sum over the ranks in backward: what begins a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def tensor_parallel(run: Run) -> Seen:
    """Two layers of a column-parallel and a row-parallel product each, every rank with weights of its own."""
    x = torch.randn(4, 6, requires_grad=True)
    state = torch.get_rng_state()
    torch.manual_seed(dist.get_rank())
    layers = nn.ModuleList([nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 6, bias=False)]) for _ in range(3)])
    torch.set_rng_state(state)

    def layer(h: Tensor, at: int) -> Tensor:
        up, down = layers[at]
        return h + SummedOverRanks.apply(down(F.gelu(up(Spread.apply(F.layer_norm(h, (6,)))))))

    h = x * 1.5
    for at in range(3):
        h = run(layer, h, at)
    return summed_up(h, x) | weights(layers)


def tensor_parallel_on_rank() -> list[str]:
    return differences(tensor_parallel, scattered())


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_layers(size):
    assert run_ranks(size, tensor_parallel_on_rank) == [[]] * size


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


def told_of(x: DTensor) -> tuple[Any, ...]:
    local = x.to_local()
    return tuple(x.shape), x.stride(), x.placements, x.device_mesh.mesh.tolist(), local.stride(), local.tolist()


def distributed_layouts() -> list[tuple[bool, type, tuple[Any, ...], tuple[Any, ...]]]:
    """Of each tensor: whether it can be laid flat, as what, what is known of it, and of what is restored of it."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    x = distribute_tensor(torch.randn(5, 6), mesh, [Shard(0)])
    for one in (x, x.t(), x[:, ::2], distribute_tensor(torch.randn(5, 6), mesh, [Replicate()]).t()):
        layout, flat = Layout.of(one)
        found.append((Layout.fits(one), type(flat), told_of(one), told_of(layout.restore(flat.clone()))))
    return found


def test_distributed_tensors_laid_flat():
    for found in run_ranks(2, distributed_layouts):
        assert len(found) == 4
        for fits, kind, before, after in found:
            assert fits
            assert kind is Tensor
            assert after == before


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


def on_a_device_of_no_backend() -> list[int]:
    before = len([one for one in gc.get_objects() if isinstance(one, StoredShare)])
    x = torch.ones(3, 5, device="meta", requires_grad=True)
    out = scattered(keep="all")(torch.sin, x)
    alive = len([one for one in gc.get_objects() if isinstance(one, StoredShare)])
    out.sum().backward()
    return [alive - before, x.grad.numel()]


def test_what_the_group_cannot_gather_is_kept_whole():
    assert run_ranks(2, on_a_device_of_no_backend) == [[0, 15]] * 2
