"""`fully_shard` around Hugging Face models with experts, chunks of layers, and meshes of two dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sac
from tests.stacks.composition import Outcome, differences, forward_done, outcome
from tests.stacks.data_parallel import trained, units_of
from tests.stacks.decoders import BLOCKS, ExpertsBlock, decoder
from tests.support.model_zoo import tiny
from tests.support.ranks import run_ranks

SCATTERED = {"mode": "selective", "distribute_saved_activations": True}
CHUNKS = {"mode": "full", "layers": {"uniform": 2}}


def hugging_face(value: Any, family: str, bf16: bool, order: str = "before") -> Outcome:
    """Experts and attention are units inside the layers, which are units themselves."""
    model, batch = tiny(family, dropout=0.1)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    if order == "before":
        sac.apply(model, value)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            fully_shard(layer.mlp.experts, mp_policy=policy)
        fully_shard(layer.self_attn, mp_policy=policy)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if order == "after":
        sac.apply(model, value)

    def step() -> Tensor:
        loss = model(**batch, use_cache=False).loss
        forward_done()
        loss.backward()
        return loss

    return outcome(step, model)


def in_chunks(value: Any, order: str = "before") -> Outcome:
    """A region holds two layers, each a unit with units inside."""
    torch.manual_seed(1)
    model = nn.Sequential(*(ExpertsBlock() for _ in range(4)))
    if order == "before":
        sac.apply(model, value)
    for block in model:
        for expert in block.experts:
            fully_shard(expert)
        fully_shard(block)
    fully_shard(model)
    if order == "after":
        sac.apply(model, value)
    return trained(model)


def replicated_and_sharded(value: Any) -> Outcome:
    """Hybrid sharding; inputs are scattered over the ranks among which parameters are sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sac.apply(decoder("experts"), value, tp_group=mesh["shard"])
    for unit in units_of(model, nested=True):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, same_data=True)


@functools.cache
def without_us(program: Callable[..., Outcome], *args: Any, world: int) -> list[Outcome]:
    return run_ranks(world, program, "none", *args)


def assert_same_gradients(
    program: Callable[..., Outcome], value: Any, *args: Any, order: str = "", world: int = 2
) -> tuple[Outcome, Outcome]:
    """The outcomes of the first rank without us and with us, whose gradients are the same on every rank."""
    plain = without_us(program, *args, world=world)
    ours = run_ranks(world, program, value, *args, *([order] if order else []))
    assert [differences(one, reference) for one, reference in zip(ours, plain, strict=True)] == [[]] * world
    assert ours[0].kept_bytes < plain[0].kept_bytes
    assert ours[0].flops > plain[0].flops
    return plain[0], ours[0]


@pytest.mark.parametrize(
    ("value", "order", "bf16"),
    [("full", "after", False), ("selective", "before", False), ("selective", "after", True)],
)
def test_experts_of_a_hugging_face_model(value: str, order: str, bf16: bool) -> None:
    pytest.importorskip("transformers", reason="the model is one of transformers")
    assert_same_gradients(hugging_face, value, "qwen3_moe", bf16, order=order)


@pytest.mark.parametrize(
    ("value", "order"),
    [(CHUNKS, "before"), (CHUNKS, "after"), (CHUNKS | {"use_reentrant": True}, "after")],
    ids=str,
)
def test_regions_of_two_layers(value: Any, order: str) -> None:
    assert_same_gradients(in_chunks, value, order=order)


@pytest.mark.parametrize("value", ["full", SCATTERED], ids=str)
def test_replicated_and_sharded(value: Any) -> None:
    plain, ours = assert_same_gradients(replicated_and_sharded, value, world=4)
    gathers = BLOCKS if value is SCATTERED else 0  # the input of each region, once
    assert ours.collectives["gloo:all_gather"] == plain.collectives["gloo:all_gather"] + gathers
