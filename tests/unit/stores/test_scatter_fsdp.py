"""Scattered inputs with FSDP2: parameters sharded over one dimension of a mesh, inputs scattered over the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import sac
from tests.support.blocks import LlamaLikeBlock, Stack
from tests.support.ranks import run_ranks
from tests.support.training import built, same_bits


def sharded(mesh: DeviceMesh, value: dict[str, Any] | None) -> Stack:
    model = built(lambda: Stack(*[LlamaLikeBlock() for _ in range(3)]))
    if value is not None:
        sac.apply(model, value | {"blocks": ["blocks.*"]}, tp_group=mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def trained(model: Stack, mesh: DeviceMesh) -> list[Tensor]:
    """Outputs and gradients of some steps, on data of this data-parallel rank."""
    found = []
    for step in range(3):
        torch.manual_seed(10 * step + mesh.get_local_rank("dp"))
        x = torch.randn(2, 6, 32, requires_grad=True)
        out = model(x * 1)
        out.square().sum().backward()
        found += [out.detach(), x.grad, *(one.grad.to_local().clone() for one in model.parameters())]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return found


def wrong_on_rank(value: dict[str, Any]) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pairs = zip(trained(sharded(mesh, None), mesh), trained(sharded(mesh, value), mesh), strict=True)
    return [place for place, (left, right) in enumerate(pairs) if not same_bits(left, right)]


@pytest.mark.parametrize(
    "value",
    [
        {"mode": "full", "store": "scattered"},
        {"mode": "full", "store": "scattered+host", "use_reentrant": True},
        {"mode": "selective", "store": "scattered"},
    ],
    ids=str,
)
def test_gradients_are_those_without_us(value):
    assert run_ranks(4, wrong_on_rank, value) == [[]] * 4
