"""What cannot be scattered is told at the call, on every rank, before the function runs."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import sac
from sac.blocks.install import regions_of
from sac.config import COMPARED_BY_CALLS
from sac.errors import ConfigError, RegionError, SacError
from tests.support.cases import layer
from tests.support.ranks import run_ranks
from tests.support.stored_regions import as_region

SCATTERED = {"distribute_saved_activations": True}


def never_called(*args: Any) -> Any:
    raise AssertionError("the function ran")


def error_of(call: Callable[[], Any], kind: type[SacError] = ConfigError) -> str:
    try:
        call()
    except (kind, AssertionError) as error:
        return str(error)
    return "no error"


def refused(group: Any) -> str:
    x = torch.randn(3, 5, requires_grad=True)
    return error_of(lambda: sac.checkpoint(never_called, x, tp_group=group, **SCATTERED))


# -- Groups


def wrong_groups() -> list[str]:
    others = dist.new_group([1])
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    nameless = init_device_mesh("cpu", (1, 2))
    elsewhere = DeviceMesh("cpu", [1])
    destroyed = dist.new_group([0, 1])
    dist.barrier()  # the other rank may still be connecting to this one
    dist.destroy_process_group(destroyed)
    return [refused(group) for group in (None, "tp", 3, mesh, nameless, destroyed, others, elsewhere)]


def test_wrong_groups():
    told = [
        "inputs are to be scattered, but there is no group to scatter them over",
        "'tp' is not a group",
        "3 is not a group",
        "the mesh has 2 dimensions (dp, tp)",
        "the mesh has 2 dimensions ()",
        *["rank 0 is not in the group, or the group has been destroyed"] * 3,
    ]
    here, there = run_ranks(2, wrong_groups)
    legal = "legal: a process group that holds this rank, or a mesh of one dimension"
    assert [one.split("\n    ")[:2] for one in here] == [[f"sac.checkpoint.tp_group: {one}", legal] for one in told]
    assert [one.replace("rank 1", "rank 0") for one in there] == [*here[:-2], "the function ran", "the function ran"]


# -- Inputs that are not the same on all ranks


def differing(what: str) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(24.0).view(4, 6)
    others = {
        "sequence": x.chunk(size)[rank],
        "one bit": x.clone().index_put_((torch.tensor(3), torch.tensor(5)), torch.tensor(1e-30 * (rank == size - 1))),
        "order": x.roll(rank),
        "shape": x.view(8 - 2 * min(rank, 1), -1),
        "strides": x if rank else x.t().contiguous().t(),
        "dtype": x if rank else x.double(),
        "zero sign": torch.zeros(3) * (-1 if rank else 1),
    }
    return others[what].requires_grad_()


def split(what: str) -> list[str]:
    COMPARED_BY_CALLS._counts.clear()  # other tests have used this process group
    one, run = differing(what), as_region("scattered", group=dist.group.WORLD, keep="all")
    calls = [
        lambda: run(never_called, one),
        lambda: run(never_called, 1, deep={"mask": None, "x": [one]}),
        lambda: run(never_called, torch.ones(3), one),
    ]
    return [error_of(call, RegionError) for call in calls]


@pytest.mark.parametrize("what", ["sequence", "one bit", "order", "shape", "strides", "dtype", "zero sign"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_input_that_is_not_the_same_on_all_ranks(size, what):
    told = f": its shape, strides, dtype or values differ between the {size} ranks of the group"
    for found in run_ranks(size, split, what):
        assert [one.partition(" that it is to be")[0] for one in found] == [
            f"argument {place}{told}" for place in (0, 2, 1)
        ]


def told_by_an_applied_block() -> tuple[list[str], list[int]]:
    """What a block says of an input that each rank has a part of, and the all-reduces of three sound calls."""
    COMPARED_BY_CALLS._counts.clear()
    block = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    sac.apply(block, {"mode": "full", "blocks": ["0"], **SCATTERED}, tp_group=dist.group.WORLD)
    part = torch.arange(8.0).view(2, 4)[dist.get_rank()]
    told = [error_of(lambda: block(part.clone().requires_grad_()), RegionError) for _ in range(2)]
    counts = []
    for _ in range(3):
        with CommDebugMode() as comm:
            block(torch.ones(2, 4, requires_grad=True)).sum().backward()
        counts.append(sum(n for op, n in comm.get_comm_counts().items() if "allreduce" in str(op)))
    return told, counts


def test_the_comparison_is_made_until_it_succeeds_once_although_nobody_asked():
    for told, counts in run_ranks(2, told_by_an_applied_block):
        assert counts == [1, 0, 0]
        for one in told:
            assert one.startswith("argument 0: its shape, strides, dtype or values differ between the 2 ranks")


def split_from_the_second_layer_on() -> str:
    """What is said of the second of two modules of one class, whose input is split."""
    COMPARED_BY_CALLS._counts.clear()
    first, second = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
    run = functools.partial(sac.checkpoint, **SCATTERED, tp_group=dist.group.WORLD)
    h = run(first, torch.randn(8, 4, requires_grad=True))
    return error_of(lambda: run(second, h.chunk(2)[dist.get_rank()].contiguous() * 1.0), RegionError)


def test_modules_of_one_class_are_compared_each_for_itself():
    for told in run_ranks(2, split_from_the_second_layer_on):
        assert told.startswith("argument 0: its shape, strides, dtype or values differ between the 2 ranks")


# -- Copies and pickles are over the same group


def gradients_of_copies() -> list[list[Tensor]]:
    """The gradients of a model and of copies of it, whose inputs are scattered over a group of their own."""
    ours = dist.new_group([0, 1])
    model = sac.apply(nn.Sequential(layer(5), layer(5)), {"mode": "full", "store": "scattered"}, tp_group=ours)
    grads = []
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model.zero_grad()
        one(torch.ones(2, 5)).sum().backward()
        grads.append([parameter.grad for parameter in one.parameters()])
        assert all(block.applied.settings.input_storing.store.group is ours for block in regions_of(one))
    return grads


def test_copies_and_pickles_are_over_the_same_group():
    for model, *again in run_ranks(2, gradients_of_copies):
        assert all(torch.equal(left, right) for one in again for left, right in zip(one, model, strict=True))
