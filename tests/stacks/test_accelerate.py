"""Accelerate: `sac.apply` before and after `prepare`, under DDP and FSDP2, with accumulation and bfloat16."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from sac.blocks.kv_cache import turn_off_cache
from sac.errors import SacError
from tests.stacks.composition import Outcome, forward_done, outcome
from tests.support.model_zoo import tiny
from tests.support.ranks import run_ranks

pytest.importorskip("accelerate", reason="tests of Accelerate need accelerate")


@contextmanager
def its_state() -> Iterator[None]:
    """State of Accelerate, which is global, for the process group that there is, or for none; it is taken back."""
    from accelerate.state import AcceleratorState, GradientState

    environment = {"ACCELERATE_USE_CPU": "true"}
    if dist.is_initialized():
        rank = str(dist.get_rank())
        environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # asked for, and not used again
    with mock.patch.dict(os.environ, environment):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@contextmanager
def accelerator(**options: Any) -> Iterator[Any]:
    from accelerate import Accelerator

    with its_state():
        yield Accelerator(cpu=True, **options)


def prepared(accelerate: Any, value: Any, when: str) -> tuple[nn.Module, dict[str, Any]]:
    model, batch = tiny("llama", dropout=0.1)
    turn_off_cache(model)
    if when == "before":
        sac.apply(model, value)
    model, _ = accelerate.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if when == "after":
        sac.apply(model, value)
    assert value == "none" or len(list(regions_of(model))) == 2
    return model, batch


def accumulated(accelerate: Any, model: nn.Module, batch: dict[str, Any]) -> Outcome:
    """Two micro-batches a step, gradients being exchanged in the second alone."""
    ids = [batch["input_ids"], batch["labels"].roll(dist.get_rank() + 1 if dist.is_initialized() else 1)]

    def step() -> Tensor:
        for micro in ids:
            with accelerate.accumulate(model):
                loss: Tensor = model(input_ids=micro, labels=micro).loss
                forward_done()
                accelerate.backward(loss)
        return loss

    return outcome(step, model)


def run(value: Any, when: str = "before", precision: str = "no") -> Outcome:
    with accelerator(mixed_precision=precision, gradient_accumulation_steps=2) as accelerate:
        model, batch = prepared(accelerate, value, when)
        return accumulated(accelerate, model, batch)


def shards(accelerate: Any, plugin: Any, precision: str) -> None:
    """Let the plugin be in force. Accelerate itself asks for a device and takes DDP on a CPU, plugin or not."""
    from accelerate.utils import DistributedType

    accelerate.state.distributed_type = DistributedType.FSDP
    accelerate.state.fsdp_plugin = plugin
    if precision != "no":
        plugin.set_mixed_precision(precision)


def run_fsdp(value: Any, when: str = "before", precision: str = "no", *, own: bool = False) -> Outcome:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=own,
        cpu_ram_efficient_loading=False,
    )
    with accelerator(mixed_precision=precision, gradient_accumulation_steps=2) as accelerate:
        shards(accelerate, plugin, precision)
        model, batch = prepared(accelerate, value, when)
        assert type(model).__name__.startswith("FSDP")
        return accumulated(accelerate, model, batch)


def refused_with_its_own(value: Any, when: str) -> str:
    with pytest.raises(SacError) as caught:
        run_fsdp(value, when, own=True)
    return str(caught.value)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_plugins_own_checkpointing_beside_ours(when: str) -> None:
    told = run_ranks(2, refused_with_its_own, "selective", when)
    found = "the model's own checkpointing is on: checkpoint_wrapper at model.layers.0"
    assert all(found in text for text in told)
