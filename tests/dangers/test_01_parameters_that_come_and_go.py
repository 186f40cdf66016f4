"""Danger 1: parameters whose data come and go: FSDP1, FSDP2 and ZeRO-3 gather a weight for a use and free it then."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from sac.errors import SacWarning
from tests.stacks.zero3 import Sharded, its_linear
from tests.support.blocks import Stack
from tests.support.oracle import assert_same_results, built_model, on_every_way
from tests.support.programs import WIDTH, Block, Program
from tests.support.ranks import run_ranks
from tests.support.recording import without_collector
from tests.support.training import assert_same
from tests.support.ways import NONE, WAYS, Way


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
    taken = {f"step {step} {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
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


# -- FSDP


class NotedLinear(nn.Linear):
    """Notes the storages of the weights that it was called with; a unit of FSDP has gathered them."""

    used: ClassVar[list[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.used.append(weakref.ref(self.weight.untyped_storage()))
        return super().forward(x)


class Unit(nn.Sequential):
    """A unit of FSDP inside a region, with a write in place."""

    def __init__(self) -> None:
        super().__init__(NotedLinear(WIDTH, 64), nn.ReLU(inplace=True), NotedLinear(64, WIDTH))


def unit_and_product(block: Block, x: Tensor) -> Tensor:
    return block.down(F.dropout(block.inner(x).sin(), 0.3))


UNITS = Program("unit_and_product", unit_and_product, children={"inner": Unit})
IN_RANKS = [
    ("full", "nothing"), ("auto", "nothing"), ("auto", "matmuls"), ("auto", "everything"),
    ("served rerun", "matmuls"), ("reentrant", "nothing"),
]  # fmt: skip


def fsdp1(model: Stack, *, by_name: bool) -> Any:
    policy = ModuleWrapPolicy({Block, Unit})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=by_name)


def fsdp2(model: Stack, *, accumulates: bool) -> Any:
    for block in model.blocks:
        fully_shard(block.inner)
        fully_shard(block)
    fully_shard(model)
    if accumulates:
        model.set_requires_gradient_sync(False), model.set_reshard_after_backward(False)
    return model


SHARDINGS: dict[str, Callable[[Stack], Any]] = {
    "fsdp1": partial(fsdp1, by_name=False),
    "fsdp1, by name": partial(fsdp1, by_name=True),
    "fsdp2": partial(fsdp2, accumulates=False),
    "fsdp2, accumulated": partial(fsdp2, accumulates=True),
}


def assert_sharded_training_is_exact(kind: str) -> None:
    """Hold on this rank that each way trains as without checkpointing and keeps no gathered weight of a unit."""
    reference, _ = trained_units(SHARDINGS[kind], NONE, "nothing")
    for way, policy in IN_RANKS:
        seen, held = trained_units(SHARDINGS[kind], WAYS[way], policy)
        assert_same(reference, seen)
        assert held == [0] * len(held), (way, policy, held)


def trained_units(shard: Callable[[Stack], Any], way: Way, policy: str) -> tuple[dict[str, Tensor], list[int]]:
    """Return gradients, and the bytes of gathered weights of units that live after each forward."""
    model = shard(built_model(UNITS, way, policy))
    seen, held = {}, []
    for step in range(3):
        NotedLinear.used.clear()  # gathered in backward since
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        loss = model(x).square().sum()
        held.append(sum(storage.nbytes() for ref in NotedLinear.used if (storage := ref()) is not None))
        loss.backward()
        seen |= {f"step {step} {name}": local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        seen[f"step {step} input"] = x.grad
    return seen, held


def local(x: Any) -> Tensor:
    return (x.to_local() if hasattr(x, "to_local") else x).detach().clone()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARDINGS)
def test_units_inside_regions(kind: str) -> None:
    """Gathering inside of a region is not the region's write, and what is gathered is not a value to save."""
    run_ranks(2, assert_sharded_training_is_exact, kind)
