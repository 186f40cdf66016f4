"""Backward as often as autograd allows, gradients inside the region, regions in regions, other checkpoints, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.blocks import FunctionBlock, Stack
from tests.support.replay_programs import (
    ON_EACH,
    applied,
    assert_replayed,
    block_of,
    python_runs,
    replay,
    warning_of,
)
from tests.support.training import assert_same, built, gradient_penalty, inputs_then_weights

Body = Callable[[FunctionBlock, Tensor], Tensor]


def smooth(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout((x @ block.a).add_(1).tanh(), 0.3)
    return F.layer_norm((h * 1.0).add_(1) @ block.b, (8,)) * x.sin()


def twice(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    loss.backward(retain_graph=True)
    first = [one.grad.clone() for one in parameters if one.grad is not None]
    loss.backward()
    return list(first)


def on_another_thread(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return []


@ON_EACH
@pytest.mark.parametrize("backward", [twice, inputs_then_weights, gradient_penalty, on_another_thread])
def test_backward_of_any_kind(backward: Callable[..., Any], chosen: dict[str, Any]) -> None:
    build = lambda: Stack(FunctionBlock(smooth), FunctionBlock(smooth))  # noqa: E731
    assert_replayed(build, replay(chosen, "always"), backward=backward)


# Gradients inside


def of_a_weight(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x.sin() @ block.a).sin()
    (grad,) = torch.autograd.grad(h.square().sum(), block.a, create_graph=True)
    return (h @ grad) * h


def of_an_energy(block: FunctionBlock, x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    (force,) = torch.autograd.grad((y @ block.a.detach()).sin().sum(), y)
    return ((x @ block.a) * force).sin()


def of_what_is_written_to_later(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin()
    y = h * 1.0
    (grad,) = torch.autograd.grad(y.sin().sum(), block.a, retain_graph=True)
    y.add_(1)
    return (h @ grad) * y.cos()


@ON_EACH
@pytest.mark.parametrize("body", [of_a_weight, of_an_energy])
def test_gradient_inside(body: Body, chosen: dict[str, Any]) -> None:
    assert_replayed(block_of(body), replay(chosen))


def assert_same_as_without(build: Callable[[], Stack], value: Any, found: str) -> None:
    """The gradient inside runs the Python of a rerun once more, so that the runs are not counted."""
    with pytest.warns(sac.errors.SacWarning) as said:
        ours = three_steps(applied(build, value))
    assert [str(one.message) for one in said] == [warning_of(found)]
    assert_same(three_steps(built(build)), ours)


def three_steps(model: nn.Module, inputs: Callable[[], Tensor] = lambda: torch.randn(8, 8)) -> dict[str, Tensor]:
    torch.manual_seed(0)
    for _ in range(3):
        model(inputs()).square().sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


# Regions inside


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(FunctionBlock(smooth) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        return (x @ self.weight).relu_()


class Around(nn.Module):
    """Other checkpoints around blocks that are regions inside."""

    def __init__(self, blocks: nn.ModuleList, around: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = blocks
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.around(block, x)
        return x


AROUND: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "nothing": lambda block, x: block(x),
    "sac": lambda block, x: sac.checkpoint(block, x),
    "torch": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "torch, reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
}


@ON_EACH
@pytest.mark.parametrize("around", AROUND)
def test_regions_inside_other_checkpoints(around: str, chosen: dict[str, Any]) -> None:
    def build() -> nn.Module:
        return Around(nn.ModuleList([Outer(), Outer()]), AROUND[around])

    model = sac.apply(built(build), replay(chosen, blocks=["blocks.*.inner.*"]))
    plain = built(lambda: Around(nn.ModuleList([Outer(), Outer()]), AROUND["nothing"]))
    leaf = lambda: torch.randn(8, 8, requires_grad=True)  # noqa: E731
    assert_same(three_steps(plain, leaf), three_steps(model, leaf))
    assert python_runs(model) == (1 if around == "nothing" else 2) * 3 * 4


@ON_EACH
def test_regions_inside_regions(chosen: dict[str, Any]) -> None:
    """The outer ones are full, of this package too."""

    def build() -> Stack:
        return Stack(Outer(), Outer())

    model = sac.apply(built(build), replay(chosen, blocks=["blocks.*.inner.*"]))
    outer = Around(model.blocks, lambda block, x: sac.checkpoint(lambda y: block(y).sin(), x))
    plain = Around(built(build).blocks, lambda block, x: block(x).sin())
    assert_same(three_steps(plain), three_steps(outer))


# Threads


@ON_EACH
def test_threads_that_train_one_model(chosen: dict[str, Any]) -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return ((x @ block.a).add_(1).sin() @ block.b).cos()

    def trained(model: Stack) -> dict[str, Tensor]:
        inputs = [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
        found: dict[str, Tensor] = {}

        def train(seed: int) -> None:
            x = inputs[seed].requires_grad_()
            for step in range(5):
                (found[f"{seed} {step}"],) = torch.autograd.grad(model(x).square().sum(), x)

        threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    model = applied(block_of(body), replay(chosen, "always"))
    assert_same(trained(built(block_of(body))), trained(model))
    assert python_runs(model) == 15


def writes_to_a_weight(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.scale.mul_(0.9).clamp_(0.5, 2.0)
    return (x @ block.a).sin() * block.scale


def with_scale() -> Stack:
    model = block_of(writes_to_a_weight)()
    model.blocks[0].scale = nn.Parameter(torch.ones(8))
    return model


@ON_EACH
def test_a_parameter_that_the_region_writes_to(chosen: dict[str, Any]) -> None:
    assert_replayed(with_scale, replay(chosen), steps=3)
