"""An input of which each rank has a part is found in the first call of a region, though nobody asked to compare it."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sac
from sac.errors import RegionError
from tests.support.ranks import run_ranks

SCATTERED = {"distribute_saved_activations": True}


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x


def told_of_parts(way: str) -> str:
    """What a region says of an input that differs between the ranks."""
    if way == "apply":
        value = {"mode": "full", **SCATTERED, "blocks": ["0"]}
        block = sac.apply(nn.Sequential(Block()), value, tp_group=dist.group.WORLD)
    else:
        block = functools.partial(sac.checkpoint, Block(), **SCATTERED, tp_group=dist.group.WORLD)
    try:
        block(torch.full((3, 4), float(dist.get_rank()), requires_grad=True))
    except RegionError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("way", ["apply", "checkpoint"])
def test_it_is_an_error_on_all_ranks(way: str) -> None:
    told = run_ranks(2, told_of_parts, way)
    assert told[0] == told[1]
    assert told[0].startswith("args[0]: its values are not the same on all 2 ranks of the group")
