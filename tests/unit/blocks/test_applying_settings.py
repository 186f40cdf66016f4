"""`sac.apply` with the keys of the full path: switches, copies, scattered inputs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from tests.support.blocks import FULL, Stack, llama_stack, policy, save, selective, tokens, with_dropout
from tests.support.ranks import run_ranks
from tests.support.training import assert_same, built, train


def dropping_stack() -> nn.Module:
    return with_dropout(llama_stack(3), 0.2, attention=0.1)


WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "full": (FULL, dropping_stack),
    "selective": (selective(policy(save("matmul", module="mlp.**"))), dropping_stack),
    "chunks": ({"mode": "full", "layers": {"uniform": 2}}, lambda: nn.Sequential(*dropping_stack().blocks)),
}


def test_switches() -> None:
    value = {**FULL, "preserve_rng_state": False, "early_stop": False}
    reference = train(built(llama_stack))
    assert_same(reference, train(sac.apply(built(llama_stack), value)))
    dropping = train(sac.apply(built(dropping_stack), value))
    unequal = [name for name, x in train(built(dropping_stack)).items() if not torch.equal(x, dropping[name])]
    assert any("gradient" in name for name in unequal)  # random states were not put back, as asked
    assert not any("output" in name for name in unequal)


class WithOptions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = llama_stack(1).blocks[0]

    def forward(self, x: Tensor, options: object) -> tuple[Tensor, object]:
        return self.inner(x), options


def test_copies_of_a_model_that_was_trained_with_objects() -> None:
    """What a region remembers of its calls refers to them, and is not copied."""
    model = sac.apply(built(lambda: Stack(WithOptions(), WithOptions())), FULL)
    (x,), options = tokens(), object()
    model(x, options)[0].sum().backward()
    expected = [p.grad for p in model.parameters()]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.zero_grad()
        twin(x, options)[0].sum().backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(twin.parameters(), expected, strict=True))


def train_scattered(way: str) -> list[int]:
    """Train with inputs scattered over all ranks; return the bytes that each region held of its inputs."""
    value, build = WAYS[way]
    model = sac.apply(built(build), {**value, "distribute_saved_activations": True}, tp_group=dist.group.WORLD)
    assert_same(train(built(build), steps=2), train(model, steps=2))
    return [one.region.stats.input_bytes for one in regions_of(model)]


@pytest.mark.parametrize("way", WAYS)
def test_scattered_inputs(way: str) -> None:
    for held in run_ranks(2, train_scattered, way):
        assert held == [tokens()[0].nbytes // 2] * (2 if way == "chunks" else 3)
