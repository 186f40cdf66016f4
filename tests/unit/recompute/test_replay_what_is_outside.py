"""Tensors that the region did not make: parameters, buffers, what a module or a closure holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sac.errors import RegionError, SacWarning
from tests.support.blocks import FunctionBlock, Stack, selective
from tests.support.replay_programs import (
    ON_EACH,
    POLICIES,
    Run,
    applied,
    assert_replayed,
    assert_same_run,
    block_of,
    gradients,
    python_runs,
    replay,
)
from tests.support.runs import Noted
from tests.support.training import assert_same, built

# Parameters


def two_products(block: FunctionBlock, x: Tensor) -> Tensor:
    return F.dropout((x @ block.a).sin(), 0.3) @ block.b


def exchanged(model: Stack) -> dict[str, Tensor]:
    """The weights' data lie elsewhere in backward, as a sharding system lays them."""
    torch.manual_seed(0)
    out = model(torch.randn(8, 8))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    out.square().sum().backward()
    return gradients(model)


# What is run in place of a region's own body; a global, which is not put back.
GATHERS: list[Callable[[FunctionBlock, Tensor], Tensor]] = []


def two_products_or_gathered(block: FunctionBlock, x: Tensor) -> Tensor:
    return (GATHERS or [two_products])[0](block, x)


def freed_and_filled(model: Stack) -> dict[str, Tensor]:
    """The weights' storages are empty between forward and backward."""
    torch.manual_seed(0)
    out = model(torch.randn(8, 8))
    data = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)

    def fill(grad: Tensor) -> None:
        for parameter, values in zip(model.parameters(), data, strict=True):
            parameter.untyped_storage().resize_(values.nbytes)
            parameter.data.copy_(values)

    out.register_hook(fill)
    out.square().sum().backward()
    return gradients(model)


@ON_EACH
@pytest.mark.parametrize("run", [exchanged, freed_and_filled])
def test_weights_whose_data_went_away_in_between(run: Run, chosen: dict[str, Any]) -> None:
    assert_same_run(block_of(two_products), chosen, run, 1)


@pytest.mark.filterwarnings("error")
def test_weights_whose_data_are_not_there_in_backward() -> None:
    """Inside a nested unit that gathers its weights again when its Python runs: so it does."""
    model = applied(block_of(two_products_or_gathered), replay(POLICIES["nothing"]))
    x = torch.randn(8, 8)
    model(x).sum().backward()
    model.zero_grad()
    block = model.blocks[0]
    data = block.a.detach().clone()

    def gathered(block: FunctionBlock, x: Tensor) -> Tensor:
        block.a.untyped_storage().resize_(data.nbytes)
        block.a.data.copy_(data)
        return two_products(block, x)

    torch.manual_seed(1)
    out = model(x)
    block.a.untyped_storage().resize_(0)
    GATHERS.append(gathered)
    try:
        with pytest.warns(SacWarning) as said:
            out.sum().backward()
    finally:
        GATHERS.clear()
    assert [str(one.message).splitlines()[0] for one in said] == [
        "blocks.0: replay cannot be used here: the data of a parameter that an op read has moved"
    ]
    plain = built(block_of(two_products))
    torch.manual_seed(1)
    plain(x).sum().backward()
    assert_same(gradients(plain), gradients(model))


# What is changed


def reads_outside(block: FunctionBlock, x: Tensor) -> Tensor:
    return ((x @ block.a) * block.outside + block.outside.sin()).sin()


def with_outside() -> Stack:
    model = block_of(reads_outside)()
    model.blocks[0].outside = torch.arange(64.0).view(8, 8) / 64
    return model


def rebound(model: Stack) -> dict[str, Tensor]:
    torch.manual_seed(0)
    out = model(torch.randn(8, 8))
    model.blocks[0].outside = model.blocks[0].outside + 1
    out.square().sum().backward()
    return gradients(model)


@ON_EACH
def test_name_from_outside_that_means_something_else_in_backward(chosen: dict[str, Any]) -> None:
    """What it meant in forward is held by autograd, so that it is there."""
    assert_same_run(with_outside, chosen, rebound, 1)


HELD_ELSEWHERE = Noted(torch.ones(64, 8))  # a tensor that nothing of the region's leads to


def reads_what_autograd_does_not_save(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a + HELD_ELSEWHERE[0].cos().mean(0)).sin()


def advances(block: FunctionBlock, x: Tensor) -> Tensor:
    h = block.norm(x @ block.a)
    with torch.no_grad():
        block.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    block.steps = block.steps + 1
    return (h - block.mean).sin() * block.steps


def with_buffers() -> Stack:
    blocks = []
    for _ in range(2):
        block = FunctionBlock(advances, norm=nn.BatchNorm1d(8))
        block.register_buffer("mean", torch.zeros(8))
        block.register_buffer("steps", torch.zeros(8, 8))
        blocks.append(block)
    return Stack(*blocks)


def three_forwards_first(model: Stack) -> dict[str, Tensor]:
    torch.manual_seed(0)
    outputs = [model(torch.randn(8, 8)) for _ in range(3)]
    for out in outputs:
        out.square().sum().backward()
    return gradients(model) | dict(model.named_buffers())


@ON_EACH
def test_buffers_that_the_region_writes_to(chosen: dict[str, Any]) -> None:
    assert_replayed(with_buffers, replay(chosen), steps=3)
    assert_same_run(with_buffers, chosen, three_forwards_first, 6)


def test_engine_rerun_is_the_same_without_a_tape() -> None:
    """These programs are what they say: only the count of Python's runs tells the engines apart."""
    model = applied(with_buffers, selective(POLICIES["matmuls"], engine="rerun"))
    assert_same(three_forwards_first(built(with_buffers)), three_forwards_first(model))
    assert python_runs(model) == 12


# Inputs


def reads_its_input_before_a_product(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x.cos() @ block.a).sin()


@pytest.mark.parametrize("engine", ["replay", "auto"])
@pytest.mark.parametrize("is_detached", [False, True], ids=["of the caller", "with a graph"])
def test_large_input_that_is_written_to_after_the_forward(engine: str, is_detached: bool) -> None:
    model = applied(block_of(reads_its_input_before_a_product), {**replay(POLICIES["matmuls"]), "engine": engine})
    x = torch.randn(64, 8)
    given = x.requires_grad_() * 1 if is_detached else x
    out = model(given)
    given.detach().add_(1)
    with pytest.raises(RegionError, match=r"input 0 \(float32\[64, 8\]\) was changed in place after the forward"):
        out.sum().backward()
