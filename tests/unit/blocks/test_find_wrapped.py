"""Wrapped models and parts: blocks are found, and rules name modules as the author of the model wrote them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import sac
from sac.blocks.find import Block, find_blocks
from sac.policy.patterns import PathPattern
from tests.support.blocks import GatedMLP, llama_stack, policy, save, selective, tokens
from tests.support.plain_zoo import Block as PlainBlock
from tests.support.plain_zoo import plain
from tests.support.training import built

LAYERS = ["layers.0", "layers.1", "layers.2"]


def paths(blocks: tuple[Block, ...]) -> list[str]:
    return [block.path for block in blocks]


def patterns(*texts: str) -> list[PathPattern]:
    return [PathPattern.parse(text) for text in texts]


class PeftModel(nn.Module):
    """Laid out as PEFT lays out an adapted model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = LoraModel(model)


class BaseTuner(nn.Module):
    pass


class LoraModel(BaseTuner):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _each_block(model: nn.Module, wrap) -> nn.Module:
    for key in model.layers:
        model.layers[key] = wrap(model.layers[key])
    return model


WRAPPED = {
    "data-parallel": nn.DataParallel,
    "averaged": torch.optim.swa_utils.AveragedModel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled-blocks": lambda model: _each_block(model, lambda block: torch.compile(block, backend="eager")),
    "checkpoint-wrapped": lambda model: _each_block(model, checkpoint_wrapper),
    "both": lambda model: _each_block(model, lambda b: torch.compile(checkpoint_wrapper(b), backend="eager")),
    "peft": PeftModel,
    "compiled-peft": lambda model: torch.compile(PeftModel(model), backend="eager"),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_wrappers_are_looked_through(wrap) -> None:
    plain_model, _ = plain("titan")
    inner = list(plain_model.layers.values())
    model = wrap(plain_model)
    blocks = find_blocks(model)
    assert paths(blocks) == LAYERS
    assert [b.layer for b in blocks] == [0, 1, 2]
    assert all(type(block.module) is PlainBlock for block in blocks)
    if wrap is not torch.optim.swa_utils.AveragedModel:  # which copies the model
        assert [block.module for block in blocks] == inner
    raw = next(name for name, _ in model.named_modules() if name.endswith("layers.1"))
    for pattern in ("layers.1", raw):
        assert paths(find_blocks(model, patterns=patterns(pattern))) == ["layers.1"]


@pytest.fixture
def group():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_distributed_wrappers_are_looked_through() -> None:
    model, _ = plain("titan")
    inner = list(model.layers.values())
    mesh = init_device_mesh("cpu", (1,))
    for block in inner:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert [(b.path, b.module) for b in find_blocks(model)] == list(zip(LAYERS, inner, strict=True))

    replicated = nn.parallel.DistributedDataParallel(plain("titan")[0])
    assert paths(find_blocks(replicated)) == LAYERS
    assert paths(find_blocks(replicated, patterns=patterns("module.layers.1", "layers.2"))) == ["layers.1", "layers.2"]


def test_a_module_that_only_has_the_name_of_a_wrapped_one_keeps_it() -> None:
    ordinary = nn.Module()
    ordinary.module = plain("titan")[0]
    assert paths(find_blocks(ordinary)) == [f"module.{path}" for path in LAYERS]


# Parts of blocks

GATES = selective(policy(save("matmul", module="mlp.gate_proj"), save("matmul", module="mlp.*")), strict=True)


def rules_of(model: nn.Module) -> list[dict[str, Any]]:
    sac.apply(model, GATES)
    model(*tokens()).square().mean().backward()
    return sac.report(model).to_dict()["kinds"][0]["rules"]


@pytest.mark.usefixtures("group")
def test_rules_reach_sharded_units_inside_a_block() -> None:
    units = ModuleWrapPolicy({GatedMLP, nn.Linear})
    model = FullyShardedDataParallel(built(llama_stack), auto_wrap_policy=units, device_id=torch.device("cpu"))
    found = rules_of(model)
    assert found == rules_of(built(llama_stack))
    assert all(rule["hits"] for rule in found)
