"""Sharded models used otherwise than forward, backward, step, and sharded otherwise than block by block."""

from __future__ import annotations

import functools
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import sac
from tests.dangers.test_11_published_kernels import TOKENS as KERNEL_ROWS
from tests.dangers.test_11_published_kernels import Decoder as Kernels
from tests.stacks.composition import Outcome, differences, outcome, train
from tests.stacks.data_parallel import Batches, put, shard_fsdp2, trained, units_of
from tests.stacks.decoders import BLOCK_OF, BLOCKS, Decoder, ExpertsBlock, decoder
from tests.support.model_zoo import tiny
from tests.support.programs import WIDTH as KERNEL_WIDTH
from tests.support.rank_programs import FunctionalSum
from tests.support.ranks import run_ranks
from tests.support.training import assert_same

Seen = dict[str, Tensor]
SCATTERED = {"mode": "selective", "distribute_saved_activations": True}
BOTH = ("full", "selective")
CHUNKS = {"mode": "full", "layers": {"uniform": 2}}


def around(order: str, value: Any, model: Any, shard: Callable[[Any], object], **options: Any) -> Any:
    """Put a mode on the model before it is sharded, or after."""
    if order == "before":
        sac.apply(model, value, **options)
    shard(model)
    if order == "after":
        sac.apply(model, value, **options)
    return model


def sharded(value: Any, order: str) -> Decoder:
    """Each expert is a unit inside a block, which is one too."""
    return around(order, value, decoder("experts"), lambda model: shard_fsdp2(model, nested=True))


def several_forwards(value: Any, order: str) -> Outcome:
    """Two forwards before their one backward, with one for evaluation in between."""
    model, batches = sharded(value, order), Batches(same_data=False)

    def step() -> Tensor:
        first = model(batches.next()).square().mean()
        with torch.no_grad():
            model.eval()(batches.next())
        second = model.train()(batches.next()).sin().mean()
        (first * second).backward()
        return first

    return outcome(step, model)


def backward_twice(value: Any, order: str) -> Outcome:
    """Two losses of one graph, each with a backward of its own."""
    model, batches = sharded(value, order), Batches(same_data=False)

    def step() -> Tensor:
        out = model(batches.next())
        out.square().mean().backward(retain_graph=True)
        out.sin().mean().backward()
        return out.mean()

    return outcome(step, model)


def one_block(value: Any, order: str) -> Outcome:
    """The region is the root of the sharded units."""
    torch.manual_seed(1)

    def shard(model: Any) -> None:
        for expert in model.experts:
            fully_shard(expert)
        fully_shard(model)

    return trained(around(order, value, ExpertsBlock(), shard), steps=3)


def from_meta(value: Any, order: str) -> Outcome:
    """The model gets its memory and weights when all has been put on it."""
    with torch.device("meta"):
        model = Decoder("experts")
    around(order, value, model, lambda model: shard_fsdp2(model, nested=True))
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter.to_local(), std=0.2)
    return trained(model)


def removed(value: Any, order: str) -> Outcome:
    """Regions are taken off a sharded model that has been trained with them, and put on again."""
    model, batches, values = sharded(value, order), Batches(same_data=False), iter([value, "none"])

    def step() -> Tensor:
        sac.remove(model)
        put(model, next(values, value))
        loss = model(batches.next()).square().mean()
        loss.backward()
        return loss

    return outcome(step, model, steps=3)


class AroundUnit(nn.Module):
    """Calls a sharded unit as a function that is recomputed."""

    def __init__(self, checkpoint: bool) -> None:
        super().__init__()
        self.inner = decoder("experts").blocks[0]
        self.checkpoint = checkpoint

    def forward(self, x_BTD: Tensor) -> Tensor:
        run = sac.checkpoint if self.checkpoint else lambda function, *args: function(*args)
        return run(lambda h_BTD: self.inner(h_BTD * 2).tanh(), x_BTD).exp()


def function_around_unit(value: Any, order: str) -> Outcome:
    model = AroundUnit(value != "none")
    fully_shard(model.inner)
    return trained(fully_shard(model), steps=3)


def hugging_face(value: Any, order: str, bf16: bool = False) -> Outcome:
    """Experts and attention are units inside the layers, which are units themselves."""
    model, batch = tiny("qwen3_moe", dropout=0.1)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()

    def shard(model: Any) -> None:
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                fully_shard(layer.mlp.experts, mp_policy=policy)
            fully_shard(layer.self_attn, mp_policy=policy)
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)

    return train(around(order, value, model, shard), lambda model: model(**batch, use_cache=False).loss)


def in_chunks(value: Any, order: str) -> Outcome:
    """A region holds two layers, each a unit with units inside."""
    torch.manual_seed(1)

    def shard(model: Any) -> None:
        for block in model:
            for expert in block.experts:
                fully_shard(expert)
            fully_shard(block)
        fully_shard(model)

    return trained(around(order, value, nn.Sequential(*(ExpertsBlock() for _ in range(4))), shard))


def replicated_and_sharded(value: Any, order: str) -> Outcome:
    """Hybrid sharding; inputs are scattered over the ranks among which parameters are sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def shard(model: Any) -> None:
        for unit in units_of(model, nested=True):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)

    return trained(around(order, value, decoder("experts"), shard, tp_group=mesh["shard"]), same_data=True)


class WithKernels(Kernels):
    """A layer of kernels, and a Function that communicates."""

    def forward(self, x: Tensor) -> Tensor:
        return FunctionalSum.apply(super().forward(x).tanh()).sin()


def kernels_accumulated(value: Any, order: str) -> Outcome:
    """Two micro-batches per step, of which the first does not reduce gradients."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())

    def shard(model: Any) -> None:
        for block in model:
            fully_shard(block)
        fully_shard(model)

    model = around(order, value, nn.Sequential(*(WithKernels() for _ in range(3))), shard)

    def step() -> Tensor:
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            loss = model(torch.randn(KERNEL_ROWS, KERNEL_WIDTH, generator=generator)).square().mean()
            loss.backward()
        return loss

    return outcome(step, model)


@functools.cache
def without_us(program: Callable[..., Outcome], world: int, *args: Any) -> list[Outcome]:
    return run_ranks(world, program, "none", "before", *args)


def name_of(one: Any) -> str:
    return getattr(one, "__name__", str(one))


CASES: list[tuple[Callable[..., Outcome], Any, str, tuple[Any, ...]]] = [
    *((one, value, "before", ()) for one in (several_forwards, backward_twice, removed) for value in BOTH),
    *((one, value, order, ()) for one in (one_block, from_meta) for value in BOTH for order in ("before", "after")),
    (function_around_unit, "full", "before", ()),
    (hugging_face, "full", "after", ()),
    (hugging_face, "selective", "before", ()),
    (hugging_face, "selective", "after", (True,)),
    (in_chunks, CHUNKS, "before", ()),
    (in_chunks, CHUNKS, "after", ()),
    (in_chunks, CHUNKS | {"use_reentrant": True}, "after", ()),
    *((kernels_accumulated, value, order, ()) for value in BOTH for order in ("before", "after")),
    (replicated_and_sharded, "full", "before", ()),
    (replicated_and_sharded, SCATTERED, "before", ()),
]


@pytest.mark.parametrize(("program", "value", "order", "more"), CASES, ids=name_of)
def test_as_without_us(program: Callable[..., Outcome], value: Any, order: str, more: tuple[Any, ...]) -> None:
    world = 4 if program is replicated_and_sharded else 2
    plain = without_us(program, world, *more)
    ours = run_ranks(world, program, value, order, *more)
    assert [differences(one, reference) for one, reference in zip(ours, plain, strict=True)] == [[]] * world
    assert ours[0].flops > plain[0].flops
    if program is kernels_accumulated:  # all that it sends belongs to units
        assert ours[0].collectives.keys() == ours[1].collectives.keys() == plain[0].collectives.keys()
        assert ours[0].collectives == ours[1].collectives
    elif program not in (several_forwards, backward_twice, removed):  # they do not say when forward is over
        assert ours[0].kept_bytes < plain[0].kept_bytes
    if world == 4:
        gathers = BLOCKS if value is SCATTERED else 0  # the input of each region, once
        assert ours[0].collectives["gloo:all_gather"] == plain[0].collectives["gloo:all_gather"] + gathers


# -- Distributed checkpoints


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
        ours = run_ranks(2, checkpointed_states, stack, mode, order)
        for (weights, moments), reference in zip(ours, plain, strict=True):
            assert list(weights) == list(reference[0])
            assert_same(reference[0], weights)
            assert_same(reference[1], moments)
