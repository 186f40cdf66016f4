"""Buffers advance once with `freeze_buffers`, and again in recomputation without it; gradients are equal in both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sac
from sac.full import FullConfig
from tests.support.blocks import FULL, Stack, install
from tests.support.custom_ops import Luck, lucky
from tests.support.stateful import MATMULS, ON_EACH_WAY, Scaled, Way, as_it_is, by_function, stack, stepped
from tests.support.training import assert_same, built

Run = Callable[..., Any]
LOOSE = FullConfig(freeze_buffers=False)
FROZEN = FullConfig()


class Normed(nn.Module):
    """Running statistics and counters in place, and one counter bound anew; the value depends on none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("largest", None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(F.dropout(x, 0.3)))
        self.calls = self.calls + 1
        self.largest = h.detach().amax(0) if self.largest is None else self.largest.maximum(h.detach().amax(0))
        return h.sin() * x.cos()


@ON_EACH_WAY
def test_buffers_advance_once(way: Way) -> None:
    build = stack(Normed, Scaled)
    assert_same(stepped(build, as_it_is), stepped(build, way))


@ON_EACH_WAY
def test_buffers_advance_once_in_eager_use_without_training(way: Way) -> None:
    """Evaluation in between learns other things of a region than training."""

    def build() -> Stack:
        model = Stack(Normed(), Scaled())
        model.eval()
        return model

    assert_same(stepped(build, as_it_is), stepped(build, way))


LOOSE_WAYS: dict[str, Way] = {
    "function": lambda model: by_function(model, LOOSE),
    "full": lambda model: install(model, {**FULL, "freeze_buffers": False}),
    "selective": lambda model: install(model, {**MATMULS, "freeze_buffers": False}),
}


class Stock(Stack):
    """Blocks under torch's own checkpoint."""

    def _call(self, index: int, block: nn.Module, *values: Tensor) -> Any:
        return checkpoint(block, *values, use_reentrant=False)


def by_torch(model: Stack) -> Stack:
    model.__class__ = Stock
    return model


def closures(module: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "the module": module,
        "a lambda": lambda x: module(x),
        "a method of the module": module.forward,
        "nested": lambda x: (lambda y: module(y))(x),
    }


@pytest.mark.parametrize("name", closures(nn.Identity()))
@pytest.mark.parametrize("block", [Normed, Scaled])
def test_modules_are_found_behind_functions(block: type[nn.Module], name: str) -> None:
    def train(run: Run) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = block()
        function = closures(module)[name]
        seen = {}
        for step in range(3):
            x = torch.randn(8, 8, requires_grad=True)
            run(function, x).square().sum().backward()
            seen[f"{step} input"] = x.grad
            seen |= {f"{step} {name}": buffer.clone() for name, buffer in module.named_buffers()}
            seen |= {f"{step} {name}": parameter.grad.clone() for name, parameter in module.named_parameters()}
        return seen

    assert_same(train(lambda function, x: function(x)), train(sac.checkpoint))


def test_buffers_of_nested_regions_advance_once() -> None:
    def train(run: Run) -> dict[str, Tensor]:
        torch.manual_seed(0)
        inner, outer = Scaled(), Normed()

        def both(x: Tensor) -> Tensor:
            return outer(run(inner, x) + run(lambda x: inner(outer(x)), x))

        seen = {}
        for step in range(3):
            x = torch.randn(8, 8, requires_grad=True)
            run(both, x).square().sum().backward()
            seen[f"{step} input"] = x.grad
            for place, module in enumerate((inner, outer)):
                seen |= {f"{step} {place} {name}": buffer.clone() for name, buffer in module.named_buffers()}
        return seen

    assert_same(train(lambda function, x: function(x)), train(sac.checkpoint))


def test_a_nested_region_that_writes_to_the_input_of_the_outer_one() -> None:
    """What the inner one copies of it is not taken by the outer one for something of its own."""

    def train(run: Run) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module, seen = Scaled(), {}

        def outer(h: Tensor) -> Tensor:
            return run(lambda h: module(h.mul_(2)), h).cos() * h

        for step in range(3):
            x = torch.randn(8, 8, requires_grad=True)
            h = x * 1
            run(outer, h).square().sum().backward()
            seen |= {f"{step} input": x.grad, f"{step} changed": h.detach().clone()}
        return seen

    assert_same(train(lambda function, x: function(x)), train(sac.checkpoint))


@ON_EACH_WAY
def test_two_forwards_before_the_first_backward(way: Way) -> None:
    """As in a pipeline: recomputation of the first goes back over what the second changed."""

    def train(way: Way) -> dict[str, Tensor]:
        model = way(built(stack(Scaled, Normed, Scaled)))
        torch.manual_seed(2)
        seen = {}
        for step in range(2):
            batches = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
            losses = [model(x).square().sum() for x in batches]
            for loss in losses:
                loss.backward()
            seen |= {f"{step} input {place}": x.grad for place, x in enumerate(batches)}
            seen |= {f"{step} {name}": buffer.clone() for name, buffer in model.named_buffers()}
        return seen

    assert_same(train(as_it_is), train(way))


@ON_EACH_WAY
def test_one_that_raises_in_recomputation_leaves_buffers_as_they_were(way: Way) -> None:
    class Failing(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return lucky(super().forward(x)).cos()

    model = way(Stack(Failing()))
    x = torch.randn(8, 8, requires_grad=True)
    out = model(x)
    Luck.left = False
    try:
        with pytest.raises(ValueError, match="out of luck"):
            out.sum().backward()
    finally:
        Luck.left = True
    assert (float(model.blocks[0].bound), float(model.blocks[0].counted)) == (1, 1)
    assert [*model.blocks[0]._buffers] == ["bound", "counted"]


class Functional(nn.Module):
    """A region inside a module whose buffers and parameters are exchanged for one call."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.block, self.run = Scaled(), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.block, x)


def test_buffers_put_in_place_for_one_call_are_found_again() -> None:
    def grads(run: Run) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module, seen = Functional(run), {}
        for step in range(3):
            x = torch.randn(8, 8, requires_grad=True)
            others = {"block.bound": torch.full((), 5.0), "block.counted": torch.full((), 3.0 + step)}
            out = torch.func.functional_call(module, others, (x,))
            out.sum().backward()
            seen |= {f"{step} input": x.grad, f"{step} bound": module.block.bound.clone()}
            seen |= {f"{step} counted": others["block.counted"].clone(), f"{step} own": module.block.counted.clone()}
        return seen

    assert_same(grads(lambda function, x: function(x)), grads(sac.checkpoint))
