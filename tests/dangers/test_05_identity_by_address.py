"""Danger 5: identity by address. Objects, storages and their memory get the addresses of others that are gone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.blocks import Stack
from tests.support.oracle import assert_exact, assert_same_results, on_every_way
from tests.support.programs import CATALOGUE, WIDTH, Block, Program
from tests.support.training import gradients
from tests.support.ways import WAYS

TWO_PRODUCTS = CATALOGUE["two_products"]


# -- Tensors that live shortly


def fresh_from_outside(block: Block, x: Tensor) -> Tensor:
    """No op has made them; autograd holds one of two, and the memory of the other is given to the next."""
    h = x
    for number in range(6):
        array = (torch.arange(64.0).view(WIDTH, WIDTH) / 64 + number).numpy().copy()
        h = h * torch.from_numpy(array)
        h = block.up(h.sin() + torch.from_numpy(array * 0.5))
    return h


def freed_intermediates(block: Block, x: Tensor) -> Tensor:
    """Values of one size die at once, so that later ones lie where they lay."""
    total = block.up(x)
    for number in range(6):
        total = total + (total.detach() * number).sin().cos() * x.neg().exp().clamp(max=2.0)
        with torch.no_grad():
            torch.full_like(total, float(number)).mul_(2).add_(total)
    return block.down(total.tanh())


def views_that_are_dropped(block: Block, x: Tensor) -> Tensor:
    """Each row is an object of its own, gone before the next one is made."""
    h = block.up(x).sin()
    rows = [block.down(h[number].clone() * h.detach()[number].exp()) for number in range(len(h))]
    return torch.stack([row.view(WIDTH) for row in rows])


SHORT_LIVED = [
    Program(body.__name__, body) for body in (fresh_from_outside, freed_intermediates, views_that_are_dropped)
]


@on_every_way(SHORT_LIVED)
def test_tensors_that_come_and_go_in_a_region(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


# -- Between steps and between the passes


def weights_exchanged_between_steps(model: Stack) -> dict[str, Tensor]:
    """New parameters lie where the old ones lay, or elsewhere."""
    seen: dict[str, Tensor] = {}
    for step in range(4):
        model(torch.randn(WIDTH, WIDTH)).square().sum().backward()
        seen |= {f"{step} {name}": gradient for name, gradient in gradients(model).items()}
        for block in model.blocks:
            for layer in (block.up, block.down):
                layer.weight = nn.Parameter(layer.weight.detach() * 1.1)
    return seen


def parameters_of_a_functional_call(model: Stack) -> dict[str, Tensor]:
    """Each step has tensors of its own in the place of the parameters."""
    seen: dict[str, Tensor] = {}
    for step in range(3):
        leaves = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
        x = torch.randn(WIDTH, WIDTH)
        torch.func.functional_call(model, {n: leaf * 1.0 for n, leaf in leaves.items()}, (x,)).square().sum().backward()
        seen |= {f"{step} {name}": leaf.grad for name, leaf in leaves.items()}
    return seen


def parameters_gone(model: Stack) -> dict[str, Tensor]:
    """Only the graph is left, and the memory of what nothing holds is used for something else."""
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    loss = model(x).square().sum()
    for block in model.blocks:
        for layer in (block.up, block.down):
            layer.weight = layer.bias = None
    rubbish = [torch.full((WIDTH, WIDTH), float("nan")) for _ in range(50)]
    loss.backward()
    del rubbish
    return {"x": x.grad}


def many_micro_batches(model: Stack) -> dict[str, Tensor]:
    """Their tapes live at once, and end in another order."""
    inputs = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(4)]
    losses = [model(x).square().sum() for x in inputs]
    for number in (2, 0, 3, 1):
        losses[number].backward()
        losses[number] = torch.zeros(())
        model(torch.randn(WIDTH, WIDTH))
    return {str(number): x.grad for number, x in enumerate(inputs)} | gradients(model)


@pytest.mark.parametrize("run", [weights_exchanged_between_steps, many_micro_batches])
@on_every_way([TWO_PRODUCTS], *(name for name in WAYS if name != "reentrant"))
def test_tensors_that_come_and_go_around_regions(program: Program, way: str, policy: str, run: Any) -> None:
    assert_same_results(run, program, way, policy)


@on_every_way([TWO_PRODUCTS], "full", "auto", "replay", "served rerun", "checkpoint")
def test_parameters_of_a_functional_call(program: Program, way: str, policy: str) -> None:
    assert_same_results(parameters_of_a_functional_call, program, way, policy)


@pytest.mark.parametrize("way", ["auto", "replay"])
def test_the_parameters_are_gone_when_backward_runs(way: str) -> None:
    """Autograd holds what it reads; the tape must not hold, nor take another tensor for, what it does not."""
    assert_same_results(parameters_gone, TWO_PRODUCTS, way, "matmuls")


# -- Arguments


def one_or_two(block: Block, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Another path if both arguments are one tensor."""
    h = block.up(x).sin() if x is y else block.down(x) * y
    return h.cos() * y, h


@pytest.mark.parametrize("first", [True, False], ids=["one first", "two first"])
@on_every_way([Program("one_or_two", one_or_two)])
def test_arguments_that_are_one_tensor_in_some_calls(program: Program, way: str, policy: str, first: bool) -> None:
    def run(model: Stack) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        for step in range(4):
            x, y = (torch.randn(WIDTH, WIDTH, requires_grad=True) * 1.5 for _ in range(2))
            x.retain_grad(), y.retain_grad()
            torch.cat(model(x, x if (step % 2 == 0) == first else y)).square().sum().backward()
            seen |= {f"{step} {name}": value.grad for name, value in (("x", x), ("y", y)) if value.grad is not None}
        return seen | gradients(model)

    assert_same_results(run, program, way, policy)


# -- Ops that run while the region's ops do


class Garbage:
    """A cycle whose collection runs ops and leaves another cycle."""

    leaves_more = False
    count = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        if Garbage.leaves_more:
            Garbage.count += 1
            torch.ones(WIDTH, WIDTH).sin().cos()
            Garbage()


@on_every_way([SHORT_LIVED[0], CATALOGUE["mixture_of_experts"]], "full", "auto", "replay", "checkpoint")
def test_ops_of_the_collector(program: Program, way: str, policy: str) -> None:
    """Tensors are made and freed, and get numbers, at any point of a forward."""
    before, Garbage.leaves_more, Garbage.count = gc.get_threshold(), True, 0
    try:
        Garbage()
        gc.set_threshold(20, 2, 2)
        assert_exact(program, way, policy, steps=2)
    finally:
        Garbage.leaves_more = False
        gc.set_threshold(*before)
    assert Garbage.count
