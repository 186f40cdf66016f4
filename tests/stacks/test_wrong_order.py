"""`sac.apply` before, after and between everything else that is done to a model: each order works.

Works means what a row of the matrix promises: the training of the same steps without us, more FLOPs and fewer bytes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sac
from tests.stacks.composition import Outcome, differences, train
from tests.stacks.data_parallel import shard_fsdp1, shard_fsdp2
from tests.stacks.matrix import assert_as_promised, line_of
from tests.stacks.registry import NONE
from tests.stacks.registry import Stack as Row
from tests.support.blocks import GatedMLP, Stack

APPLY = "apply"


def compile_whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def compile_blocks(model: nn.Module) -> nn.Module:
    for block in blocks_of(model):
        block.compile(backend="aot_eager")
    return model


def wrap_compiled_blocks(model: nn.Module) -> nn.Module:
    """Put each block into the wrapper that `torch.compile` returns."""
    owner = next(module for module in model.modules() if isinstance(module, Stack))
    for index, block in enumerate(owner.blocks):
        owner.blocks[index] = torch.compile(block, backend="aot_eager")
    return model


def shard(model: nn.Module) -> nn.Module:
    return shard_fsdp2(model, *blocks_of(model))


def shard_flat(model: nn.Module) -> nn.Module:
    return shard_fsdp1(model, {GatedMLP}, use_orig_params=True)


def parallelize(model: nn.Module) -> nn.Module:
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for block in blocks_of(model):
        parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return model


def adapt(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft", reason="adapters are one of the steps")
    torch.manual_seed(8)
    config = peft.LoraConfig(target_modules=["gate_proj", "down_proj"], r=2, lora_alpha=4, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def load(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: value.clone() * 1.01 for name, value in model.state_dict().items()})
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GatedMLP)]


ALONE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": compile_whole,
    "compile in place": compile_in_place,
    "compile blocks": compile_blocks,
    "wrap compiled blocks": wrap_compiled_blocks,
    "PEFT": adapt,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "load": load,
    "deepcopy": copy.deepcopy,
}
IN_RANKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP1": shard_flat,
    "FSDP2": shard,
    "TP": parallelize,
}
STEPS = ALONE | IN_RANKS
EACH = [order for step in STEPS for order in ((APPLY, step), (step, APPLY))]
SEVERAL = [("PEFT", "FSDP2", APPLY), (APPLY, "compile", "deepcopy"), ("FSDP2", APPLY, "compile")]


def small_model() -> nn.Module:
    """Two blocks of few ops: compiling takes time for each op."""
    torch.manual_seed(1)
    return Stack(GatedMLP(32, 64), GatedMLP(32, 64))


def trained(value: str, *, order: tuple[str, ...]) -> Outcome:
    """Build a model, do the steps in this order, train, and measure; orders of the same steps share a reference."""
    return in_order(value, order if value != NONE else tuple(name for name in order if name != APPLY))


@functools.cache
def in_order(value: str, order: tuple[str, ...]) -> Outcome:
    torch._dynamo.reset()
    model = small_model()
    for name in order:
        model = sac.apply(model, value) if name == APPLY else STEPS[name](model)
    return measured(model, compiled=any("compile" in name for name in order))


def measured(model: nn.Module, *, compiled: bool) -> Outcome:
    torch.manual_seed(2)
    x = torch.randn(2, 16, 32, dtype=next(model.parameters()).dtype)
    found = train(model, lambda model: model(x).square().mean(), compiled=compiled)
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    "order",
    [pytest.param(order, marks=pytest.mark.slow if order in SEVERAL else []) for order in EACH + SEVERAL],
    ids=" > ".join,
)
def test_any_order(order: tuple[str, ...]) -> None:
    world = 2 if any(name in IN_RANKS for name in order) else 1
    assert_as_promised(line_of(Row(" > ".join(order), "test_wrong_order:trained", world, options={"order": order})))


@pytest.mark.parametrize("step", [None, "compile", "compile blocks"])
def test_put_on_and_taken_off_a_model_that_has_trained(step: str | None) -> None:
    """What has been compiled by then was compiled without regions: it must not be used any more."""
    torch._dynamo.reset()
    model = small_model()
    model = STEPS[step](model) if step else model
    plain = measured(model, compiled=step is not None)
    for value, is_more in (("full", True), (None, False)):
        if value:
            sac.apply(model, value)
        else:
            sac.remove(model)
        found = measured(model, compiled=step is not None)
        assert differences(found, plain) == []
        assert (found.flops > plain.flops, found.kept_bytes < plain.kept_bytes) == (is_more, is_more)
