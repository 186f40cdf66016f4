"""Inputs that are to be scattered are compared over the group in the first call of each region."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import sac
from sac.config import COMPARED_BY_CALLS
from sac.errors import RegionError
from tests.support.ranks import run_ranks
from tests.unit.stores.test_scatter_errors import error_of

SCATTERED = {"distribute_saved_activations": True}


def split_input_by_default(way):
    """What a region says of an input that each rank has a part of, in its first call and later ones."""
    COMPARED_BY_CALLS._counts.clear()  # other tests have used this process group
    rank, size = dist.get_rank(), dist.get_world_size()

    class TakesItsPart(nn.Module):
        def forward(self, x):
            return x.sin() * x

    x = torch.arange(24.0).view(size, -1)
    if way == "apply":
        value = {"mode": "full", **SCATTERED, "blocks": ["0"]}
        block = sac.apply(nn.Sequential(TakesItsPart()), value, tp_group=dist.group.WORLD)
    else:
        block = functools.partial(sac.checkpoint, TakesItsPart(), **SCATTERED, tp_group=dist.group.WORLD)
    split = [error_of(lambda: block(x[rank].clone().requires_grad_()), RegionError) for _ in range(2)]
    block(x.clone().requires_grad_()).sum().backward()
    return split


@pytest.mark.parametrize("way", ["apply", "checkpoint"])
def test_a_split_input_is_found_in_the_first_call_although_nobody_asked(way):
    told = run_ranks(2, split_input_by_default, way)
    assert told[0] == told[1]
    assert told[0][0] == told[0][1]
    assert told[0][0].startswith("argument 0: its values differ between the 2 ranks of the group")


def split_from_the_second_layer_on():
    """What is said of the second of two modules of one class, whose input is split."""
    COMPARED_BY_CALLS._counts.clear()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
    run = functools.partial(sac.checkpoint, **SCATTERED, tp_group=dist.group.WORLD)
    h = run(first, torch.randn(8, 4, requires_grad=True))
    return error_of(lambda: run(second, h.chunk(size)[rank].contiguous() * 1.0), RegionError)


def test_modules_of_one_class_are_compared_each_for_itself():
    for told in run_ranks(2, split_from_the_second_layer_on):
        assert told.startswith("argument 0: its values differ between the 2 ranks of the group")


def sent_in_three_calls():
    """How many all-reduces each of three calls of a region sends."""
    block = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    sac.apply(block, {"mode": "full", "blocks": ["0"], **SCATTERED}, tp_group=dist.group.WORLD)
    counts = []
    for _ in range(3):
        with CommDebugMode() as comm:
            block(torch.ones(2, 4, requires_grad=True)).sum().backward()
        counts.append(sum(n for op, n in comm.get_comm_counts().items() if "allreduce" in str(op)))
    return counts


def test_the_comparison_costs_one_all_reduce_in_the_first_call():
    assert run_ranks(2, sent_in_three_calls) == [[1, 0, 0]] * 2
