"""Sharded models used otherwise than forward, backward, step: each program without us and with us, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import sac
from tests.stacks.composition import gradients_of
from tests.stacks.data_parallel import Batches, put, shard_fsdp2
from tests.stacks.decoders import BLOCK_OF, Decoder, ExpertsBlock, decoder
from tests.support.ranks import run_ranks
from tests.support.training import assert_same

Seen = dict[str, Tensor]
BOTH = pytest.mark.parametrize("mode", ["full", "selective"])


def sharded(mode: str, *, order: str = "before", block: str = "experts") -> Decoder:
    model = decoder(block)
    if order == "before":
        put(model, mode)
    shard_fsdp2(model, nested=block == "experts")
    if order == "after":
        put(model, mode)
    return model


def assert_same_on_ranks(program: Callable[..., Seen], mode: str, *args: Any) -> None:
    for plain, ours in zip(run_ranks(2, program, "none", *args), run_ranks(2, program, mode, *args), strict=True):
        assert_same(plain, ours)


def several_forwards(mode: str) -> Seen:
    """Two forwards before their one backward, with one for evaluation in between."""
    model, batches = sharded(mode), Batches(same_data=False)
    for _ in range(2):
        torch.manual_seed(0)
        first = model(batches.next()).square().mean()
        with torch.no_grad():
            model.eval()(batches.next())
        second = model.train()(batches.next()).sin().mean()
        (first * second).backward()
    return gradients_of(model)


def backward_twice(mode: str) -> Seen:
    """Two losses of one graph, each with a backward of its own."""
    model, batches = sharded(mode), Batches(same_data=False)
    for _ in range(2):
        out = model(batches.next())
        out.square().mean().backward(retain_graph=True)
        out.sin().mean().backward()
    return gradients_of(model)


def one_block(mode: str, order: str) -> Seen:
    """The region is the root of the sharded units."""
    torch.manual_seed(1)
    model, batches = ExpertsBlock(), Batches(same_data=False)
    if order == "before":
        put(model, mode)
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)
    if order == "after":
        put(model, mode)
    for _ in range(3):
        model(batches.next()).square().mean().backward()
    return gradients_of(model)


def from_meta(mode: str) -> Seen:
    """The model gets its memory and weights when all has been put on it."""
    with torch.device("meta"):
        model, batches = Decoder("experts"), Batches(same_data=False)
    put(model, mode)
    shard_fsdp2(model, nested=True)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter.to_local(), std=0.2)
    for _ in range(2):
        model(batches.next()).square().mean().backward()
    return gradients_of(model)


def removed(mode: str) -> Seen:
    """Regions are taken off a sharded model that has been trained with them, and put on again."""
    model, batches = sharded(mode), Batches(same_data=False)
    for value in (mode, "none", mode):
        sac.remove(model)
        put(model, value)
        model(batches.next()).square().mean().backward()
    return gradients_of(model)


class AroundUnit(nn.Module):
    """Calls a sharded unit as a function that is recomputed."""

    def __init__(self, checkpoint: bool) -> None:
        super().__init__()
        self.inner = decoder("experts").blocks[0]
        self.checkpoint = checkpoint

    def forward(self, x_BTD: Tensor) -> Tensor:
        run = sac.checkpoint if self.checkpoint else lambda function, *args: function(*args)
        return run(lambda h_BTD: self.inner(h_BTD * 2).tanh(), x_BTD).exp()


def function_around_unit(mode: str) -> Seen:
    model, batches = AroundUnit(mode != "none"), Batches(same_data=False)
    fully_shard(model.inner)
    fully_shard(model)
    for _ in range(3):
        model(batches.next()).square().mean().backward()
    return gradients_of(model)


@BOTH
@pytest.mark.parametrize("program", [several_forwards, backward_twice, from_meta, removed])
def test_gradients_are_those_without_us(program: Callable[..., Seen], mode: str) -> None:
    assert_same_on_ranks(program, mode)


@BOTH
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_region_that_is_the_root_of_its_units(order: str, mode: str) -> None:
    assert_same_on_ranks(one_block, mode, order)


def test_a_checkpointed_function_around_a_unit() -> None:
    assert_same_on_ranks(function_around_unit, "full")


def wrapped(stack: str, mode: str, order: str) -> nn.Module:
    model: nn.Module = decoder("experts")
    if order == "before":
        put(model, mode)
    if stack == "ddp":
        model = DistributedDataParallel(model)
    elif stack == "fsdp1":
        units = ModuleWrapPolicy({BLOCK_OF["experts"]})
        device = torch.device("cpu")
        model = FullyShardedDataParallel(model, auto_wrap_policy=units, device_id=device, use_orig_params=True)
    else:
        shard_fsdp2(model, nested=True)
    if order == "after":
        put(model, mode)
    return model


def checkpointed_states(stack: str, mode: str, order: str) -> tuple[Seen, Seen]:
    """State of the model and of its optimizer after a step, as a distributed checkpoint names them; loaded once."""
    model, batches = wrapped(stack, mode, order), Batches(same_data=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(batches.next()).square().mean().backward()
    optimizer.step()
    weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    fresh = wrapped(stack, mode, order)
    set_model_state_dict(fresh, dict(weights))
    again = get_model_state_dict(fresh)
    assert list(again) == list(weights)
    state = {f"{name} {key}": value for name, found in moments["state"].items() for key, value in found.items()}
    return {name: held(value) for name, value in again.items()}, {name: held(value) for name, value in state.items()}


def held(value: Any) -> Tensor:
    """What this rank holds of a tensor."""
    if hasattr(value, "local_shards"):  # FSDP1's own kind of sharded tensor
        return torch.cat([shard.tensor.flatten() for shard in value.local_shards()] or [torch.empty(0)])
    return (value.to_local() if hasattr(value, "to_local") else value).detach().clone()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("stack", ["ddp", "fsdp1", "fsdp2"])
def test_states_of_a_distributed_checkpoint_have_the_same_names_and_values(stack: str, order: str) -> None:
    plain = run_ranks(2, checkpointed_states, stack, "none", order)
    for mode in ("full", "selective"):
        for (weights, moments), reference in zip(
            run_ranks(2, checkpointed_states, stack, mode, order), plain, strict=True
        ):
            assert list(weights) == list(reference[0])
            assert_same(reference[0], weights)
            assert_same(reference[1], moments)
