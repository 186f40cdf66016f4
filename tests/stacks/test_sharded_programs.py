"""Sharded models used otherwise than forward, backward, step, and sharded otherwise than block by block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import sac
from tests.stacks.composition import Outcome, differences, least_kept, outcome, train
from tests.stacks.data_parallel import Batches, shard_fsdp1, shard_fsdp2, trained, units_of
from tests.stacks.decoders import Decoder, ExpertsBlock, decoder
from tests.support.model_zoo import tiny
from tests.support.ranks import run_ranks
from tests.support.training import assert_same

Seen = dict[str, Tensor]
CHUNKS = {"mode": "full", "layers": {"uniform": 2}}


def around(order: str, value: Any, model: Any, shard: Callable[[Any], object], **options: Any) -> Any:
    """Put a mode on the model before it is sharded, or after."""
    if order == "before":
        sac.apply(model, value, **options)
    shard(model)
    if order == "after":
        sac.apply(model, value, **options)
    return model


def shard_nested(model: Any) -> Any:
    """Each expert is a unit inside a block, which is one too."""
    return shard_fsdp2(model, *units_of(model, nested=True))


def sharded(value: Any, order: str) -> Decoder:
    return around(order, value, decoder("experts"), shard_nested)


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


def from_meta(value: Any, order: str) -> Outcome:
    """The model gets its memory and weights when all has been put on it."""
    with torch.device("meta"):
        model = Decoder("experts")
    around(order, value, model, shard_nested)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter.to_local(), std=0.2)
    for buffer in model.buffers():
        nn.init.uniform_(buffer)
    return trained(model)


def hugging_face(value: Any, order: str) -> Outcome:
    """Experts and attention are units inside the layers, which are units themselves."""
    model, batch = tiny("qwen3_moe", dropout=0.1)

    def shard(model: Any) -> None:
        parts = ((getattr(layer.mlp, "experts", None), layer.self_attn, layer) for layer in model.model.layers)
        units = [part for layer in parts for part in layer if part is not None]
        shard_fsdp2(model, *units, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    return train(around(order, value, model, shard), lambda model: model(**batch, use_cache=False).loss)


def in_chunks(value: Any, order: str) -> Outcome:
    """A region holds two layers, each a unit with units inside."""
    torch.manual_seed(1)
    model = nn.Sequential(*(ExpertsBlock() for _ in range(4)))
    units = [unit for block in model for unit in (*block.experts, block)]
    return trained(around(order, value, model, lambda model: shard_fsdp2(model, *units)))


def name_of(one: Any) -> str:
    return getattr(one, "__name__", str(one))


CASES: list[tuple[Callable[..., Outcome], Any, str]] = [
    (several_forwards, "full", "before"),
    (backward_twice, "selective", "before"),
    (from_meta, "full", "before"),
    (from_meta, "selective", "after"),
    (hugging_face, "selective", "after"),
    (in_chunks, CHUNKS, "before"),
    (in_chunks, CHUNKS | {"use_reentrant": True}, "after"),
]


@functools.cache
def without_us(program: Callable[..., Outcome]) -> list[Outcome]:
    return run_ranks(2, program, "none", "before")


@pytest.mark.parametrize(("program", "value", "order"), CASES, ids=name_of)
def test_as_without_us(program: Callable[..., Outcome], value: Any, order: str) -> None:
    plain, ours = without_us(program), run_ranks(2, program, value, order)
    assert [differences(one, reference) for one, reference in zip(ours, plain, strict=True)] == [[], []]
    assert ours[0].flops > plain[0].flops
    if program not in (several_forwards, backward_twice):  # they do not say when forward is over
        assert least_kept(ours, plain) < 1


def wrapped(stack: str, mode: str) -> nn.Module:
    model: nn.Module = sac.apply(decoder("experts"), mode)
    return shard_nested(model) if stack == "FSDP2" else shard_fsdp1(model, {ExpertsBlock}, use_orig_params=True)


def checkpointed_states(stack: str, mode: str) -> tuple[Seen, Seen]:
    """State of the model and of its optimizer after a step, as a distributed checkpoint names them; loaded once."""
    model, batches = wrapped(stack, mode), Batches(same_data=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(batches.next()).square().mean().backward()
    optimizer.step()
    weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    fresh = wrapped(stack, mode)
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


@pytest.mark.parametrize("stack", ["FSDP1", "FSDP2"])
def test_states_of_a_distributed_checkpoint_have_the_same_names_and_values(stack: str) -> None:
    plain = run_ranks(2, checkpointed_states, stack, "none")
    ours = run_ranks(2, checkpointed_states, stack, "selective")
    for (weights, moments), reference in zip(ours, plain, strict=True):
        assert list(weights) == list(reference[0])
        assert_same(reference[0], weights)
        assert_same(reference[1], moments)
