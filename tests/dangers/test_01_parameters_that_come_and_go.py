"""Danger 1: parameters whose data come and go: FSDP1, FSDP2 and ZeRO-3 gather a weight for a use and free it then."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sac.errors import SacWarning
from tests.stacks.zero3 import Sharded, its_linear
from tests.support.blocks import Stack
from tests.support.oracle import assert_same_results, built_model, on_every_way
from tests.support.programs import WIDTH, Block, Program
from tests.support.recording import without_collector
from tests.support.training import assert_same, gradients
from tests.support.ways import WAYS


def dropped_products(block: Block, x: Tensor) -> Tensor:
    return block.down(F.dropout(block.up(x).relu_().sin(), 0.3))


def norm_and_products(block: Block, x: Tensor) -> Tensor:
    return x + block.norm(dropped_products(block, x))


CHILDREN = {"norm": lambda: nn.LayerNorm(WIDTH)}
REPLAY = frozenset({"replay"})  # may be an error where data of a weight have moved; `auto` runs the region again
PLAIN = Program("dropped_products", dropped_products, not_under=REPLAY)
NORMED = Program("norm_and_products", norm_and_products, children=CHILDREN, not_under=REPLAY)
# torch's own frame compares shapes of saved tensors, and an empty frozen weight has another one in backward
FROZEN = Program("frozen_weights", norm_and_products, children=CHILDREN, not_under=REPLAY | {"context_fn"})
TRAINED = {NORMED.name: "", FROZEN.name: "norm"}


# -- Weights that hold nothing between their uses, as in ZeRO-3


def sharded_gradients(program: Program, model: Stack) -> dict[str, Tensor]:
    """Shard the model, train it, and return the gradients of each step."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED[program.name] in name)
    Sharded(model)
    seen: dict[str, Tensor] = {}
    for step in range(3):
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        with its_linear():
            model(x).square().sum().backward()
        seen[f"step {step} input"] = x.grad
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                seen[f"step {step} {name}"], parameter.ds_grad = parameter.ds_grad, None
    return seen


@on_every_way([NORMED, FROZEN])
def test_weights_gathered_for_each_use(program: Program, way: str, policy: str) -> None:
    """Weights of equal sizes come and go at equal addresses, so that an address says nothing about a weight."""
    assert_same_results(partial(sharded_gradients, program), program, way, policy, blocks=3)


@on_every_way([NORMED])
def test_no_gathered_weight_waits_for_backward(program: Program, way: str, policy: str) -> None:
    """An alias of the weight in place of the weight itself would hold the gathered data."""
    model = built_model(program, WAYS[way], policy)
    sharded = Sharded(model)
    with its_linear(), without_collector():
        for _ in range(3):
            out = model(torch.randn(WIDTH, WIDTH, requires_grad=True))
            assert sharded.held == 0
            out.sum().backward()


# -- Weights that are elsewhere, or nowhere, between forward and backward


def exchanged(model: Stack) -> dict[str, Tensor]:
    """The weights lie at another address in backward."""
    seen: dict[str, Tensor] = {}
    for step in range(3):
        loss = model(torch.randn(WIDTH, WIDTH)).square().sum()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        loss.backward()
        seen |= taken_gradients(model, step)
    return seen


def freed_and_filled(model: Stack) -> dict[str, Tensor]:
    """The storages of the weights are empty from the end of the forward to the start of backward."""
    seen: dict[str, Tensor] = {}
    for step in range(3):
        out = model(torch.randn(WIDTH, WIDTH))
        values = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.untyped_storage().resize_(0)
        out.register_hook(partial(fill, model, values))
        out.square().sum().backward()
        seen |= taken_gradients(model, step)
    return seen


def fill(model: nn.Module, values: list[Tensor], grad: Tensor | None = None) -> None:
    for parameter, data in zip(model.parameters(), values, strict=True):
        parameter.untyped_storage().resize_(data.nbytes)
        parameter.data.copy_(data)


def taken_gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    taken = {f"step {step} {name}": gradient for name, gradient in gradients(model).items()}
    model.zero_grad()
    return taken


@pytest.mark.parametrize("run", [exchanged, freed_and_filled])
@on_every_way([PLAIN], *(name for name in WAYS if name != "reentrant"))
def test_weights_whose_data_went_away_in_between(program: Program, way: str, policy: str, run: Any) -> None:
    assert_same_results(run, program, way, policy)


class GatheredByItsPython(nn.Linear):
    """Fills its empty weight when it is called, as a sharded unit inside a region does in a recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.weight.untyped_storage().nbytes():
            fill(self, self.kept)
        return super().forward(x)


def gathered(block: Block, x: Tensor) -> Tensor:
    return block.down(block.part(x).sin()).cos()


GATHERED = Program("gathered", gathered, children={"part": lambda: GatheredByItsPython(WIDTH, WIDTH)})


def gradients_of_gathered(model: Stack, frees: bool) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for step in range(3):
        part = model.blocks[0].part
        part.kept = [parameter.detach().clone() for parameter in part.parameters()]
        loss = model(torch.randn(WIDTH, WIDTH)).square().sum()
        if frees:
            part.weight.untyped_storage().resize_(0)
        loss.backward()
        seen |= taken_gradients(model, step)
    return seen


@pytest.mark.parametrize("way", ["full", "auto", "served rerun", "context_fn", "checkpoint"])
def test_weights_that_only_the_python_of_the_region_gathers(way: str) -> None:
    """The tape finds no data in backward, so the region runs again, and gathers."""
    reference = gradients_of_gathered(built_model(GATHERED), frees=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        ours = gradients_of_gathered(built_model(GATHERED, WAYS[way]), frees=True)
    assert_same(reference, ours)
