"""Rules name the modules of a block as its author wrote them, whatever has been wrapped around them since."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import sac
from tests.support.blocks import GatedMLP, llama_stack, policy, save, selective, tokens
from tests.support.training import built

GATES = selective(policy(save("matmul", module="mlp.gate_proj"), save("matmul", module="mlp.*")), strict=True)


@pytest.fixture
def one_process_group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def saved_by_rule(model: nn.Module) -> list[dict[str, Any]]:
    model(*tokens()).square().mean().backward()
    return sac.report(model).to_dict()["kinds"][0]["rules"]


def test_rules_reach_sharded_units_inside_a_block(one_process_group: None) -> None:
    model = built(llama_stack)
    units = ModuleWrapPolicy({GatedMLP, nn.Linear})
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=units, device_id=torch.device("cpu"))
    found = saved_by_rule(sac.apply(sharded, GATES))
    assert found == saved_by_rule(sac.apply(built(llama_stack), GATES))
    assert all(rule["hits"] for rule in found)


def test_rules_reach_compiled_parts_of_a_block() -> None:
    model = built(llama_stack)
    for block in model.blocks:
        block.mlp.gate_proj = torch.compile(block.mlp.gate_proj, backend="eager")
    found = saved_by_rule(sac.apply(model, GATES))
    assert found == saved_by_rule(sac.apply(built(llama_stack), GATES))
