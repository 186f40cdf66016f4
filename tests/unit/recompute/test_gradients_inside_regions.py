"""A region may take gradients in its own forward: forces, gradient penalties; with early stop and without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.blocks import FunctionBlock, Stack, policy, save, selective, square
from tests.support.training import assert_same, built, train
from tests.support.whole_module_blocks import WIDTH, Apply, product, whole


def energy(block: Any, x: Tensor) -> Tensor:
    return (((x @ block.a).sin() @ block.b).cos() * x).sum()


def forces(block: Any, x: Tensor) -> Tensor:
    """Of a leaf of its own: nothing of it is backward's."""
    leaf = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(energy(block, leaf), leaf)
    return (x @ block.a).sin() * force


def forces_that_are_trained(block: Any, x: Tensor) -> Tensor:
    leaf = x if x.requires_grad else x.detach().requires_grad_()
    (force,) = torch.autograd.grad(energy(block, leaf), leaf, create_graph=True)
    return (force @ block.b).sin() * x


def penalty(block: Any, x: Tensor) -> Tensor:
    y = (x @ block.a).tanh()
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y @ block.b + grad.square().sum()


def two_gradients(block: Any, x: Tensor) -> Tensor:
    y = (x @ block.a).sin()
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    z = (y @ block.b).sin()
    (second,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
    return (z @ block.a).sin() * first * second


def second_order(block: Any, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(energy(block, x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return (second @ block.b).sin() + x


def with_dropout(block: Any, x: Tensor) -> Tensor:
    y = torch.dropout((x @ block.a).sin(), 0.5, True)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return torch.dropout(grad @ block.b, 0.5, True).sin() * y


def of_a_module(block: Any, x: Tensor) -> Tensor:
    y = block.part(x).cos()
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return block.part(grad).sin() * block.norm(y)


BODIES = (
    forces,
    forces_that_are_trained,
    penalty,
    two_gradients,
    second_order,
    with_dropout,
    of_a_module,
)


def through(run: Callable[..., Any]) -> Callable[[Stack], Stack]:
    """Run each block through a function that checkpoints."""

    def install(model: Stack) -> Stack:
        for block in model.blocks:
            block.forward = partial(run, block.forward)
        return model

    return install


ENGINES = ("auto", "replay", "rerun")
MODES: dict[str, Callable[..., Any]] = {
    "sac.checkpoint": lambda early: through(partial(sac.checkpoint, early_stop=early)),
    "torch": lambda early: through(partial(checkpoint, use_reentrant=False, early_stop=early)),
    "full": lambda early: applied({"mode": "full", "blocks": ["blocks.*"]}, early),
    **{
        f"products, {engine}": partial(lambda engine, early: applied(PRODUCTS, early, engine), engine)
        for engine in ENGINES
    },
    **{
        f"nothing, {engine}": partial(lambda engine, early: applied(selective(policy()), early, engine), engine)
        for engine in ENGINES
    },
    "all": lambda early: applied(selective(policy(default="save")), early),
    "modules": lambda early: applied(selective(policy(whole("part", optional=True), save("aten.sin"))), early),
}
PRODUCTS = selective(policy(save("matmul")))


def applied(value: dict[str, Any], early: bool, engine: str = "auto") -> Callable[[Stack], Stack]:
    more = {"engine": engine} if value["mode"] == "selective" else {}
    return lambda model: sac.apply(model, {**value, **more, "early_stop": early})


def stack_of(body: Callable[..., Any]) -> Stack:
    return Stack(*(FunctionBlock(body, WIDTH, part=Apply(product), norm=nn.BatchNorm1d(WIDTH)) for _ in range(2)))


@pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize(
    ("body", "mode"),
    [
        (body, mode)
        for body in BODIES
        for mode in MODES
        if (body, mode) != (of_a_module, "torch")  # torch's checkpoint advances the statistics of batch norms twice
    ],
)
def test_training_is_the_same(body: Callable[..., Any], mode: str, early: bool) -> None:
    model = MODES[mode](early)(built(lambda: stack_of(body)))
    reference = train(built(lambda: stack_of(body)), steps=3, make_input=square)
    assert_same(reference, train(model, steps=3, make_input=square))


@pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("mode", MODES)
def test_double_backward_outside(mode: str, early: bool) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [x, *(p for b in model.blocks for p in (b.a, b.b))]))

    model = MODES[mode](early)(built(lambda: stack_of(penalty)))
    plain = built(lambda: stack_of(penalty))
    for _ in range(3):
        assert all(map(torch.equal, gradients(model), gradients(plain)))


class Potential(nn.Module):
    """Takes the force through blocks that are regions themselves, and may be one as a whole."""

    def __init__(self, outer: Callable[..., Any] | None) -> None:
        super().__init__()
        self.stack = Stack(*(FunctionBlock(with_dropout, WIDTH), FunctionBlock(penalty, WIDTH)))
        self.outer = outer

    def forward(self, x: Tensor) -> Any:
        return self.forces(x) if self.outer is None else self.outer(self.forces, x)

    def forces(self, x: Tensor) -> Tensor:
        y = self.stack(x.sin())
        (force,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (force * y).sin()


OUTER = {
    "alone": None,
    "in a region": sac.checkpoint,
    "in a region, to the end": partial(sac.checkpoint, early_stop=False),
    "in torch's": partial(checkpoint, use_reentrant=False),
}


@pytest.mark.parametrize("mode", ["full", *(f"products, {engine}" for engine in ENGINES)])
@pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("outer", OUTER)
def test_forces_through_regions(outer: str, early: bool, mode: str) -> None:
    value = {"mode": "full"} if mode == "full" else {**PRODUCTS, "engine": mode.removeprefix("products, ")}
    model = built(lambda: Potential(OUTER[outer]))
    sac.apply(model, {**value, "blocks": ["stack.blocks.*"], "early_stop": early})
    reference = train(built(lambda: Potential(None)), steps=3, make_input=square)
    assert_same(reference, train(model, steps=3, make_input=square))
