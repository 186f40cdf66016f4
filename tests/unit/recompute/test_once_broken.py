"""Programs that once came out wrong, each by the oracle: the same model without us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sac
from tests.support.blocks import (
    ENGINES,
    FULL,
    FunctionBlock,
    Stack,
    alternate,
    policy,
    save,
    selective,
    square,
    under_each_engine,
)
from tests.support.training import assert_same_training, built

EACH = under_each_engine(
    {
        "full": FULL,
        "matmuls": selective(policy(save("matmul"))),
        "products": selective(policy({"id": "products", "ops": "aten.mul", "do": "save", "optional": True})),
        "every second op": selective(policy(alternate("*"))),
    }
)
ON_EACH = pytest.mark.parametrize("value", EACH.values(), ids=EACH.keys())


def assert_same_under(body: Callable[..., Tensor], value: Any, **options: Any) -> None:
    assert_same_training(lambda: Stack(FunctionBlock(body)), value, make_input=square, **options)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.drop(x).sin()).sin()


class TwoDropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = Dropped()
        self.q = Dropped()

    def forward(self, x: Tensor) -> Tensor:
        return self.p(x) * self.q(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_draws_from_one_value_are_not_one_value(engine: str) -> None:
    """Only the second module's product is saved; the first one's has the same arguments but for what was drawn."""
    value = selective(policy({"id": "q", "ops": "aten.mul", "module": "q.drop", "do": "save"}), engine=engine)
    assert_same_training(lambda: Stack(TwoDropped()), value, make_input=square)


def assert_same_calls(calls: list[dict[str, Any]], block: Callable[[], nn.Module], value: Any) -> None:
    """Run calls with different keyword arguments, one after the other, with us and without."""
    results = []
    for put in (False, True):
        model = built(lambda: Stack(block()))
        if put:
            sac.apply(model, value)
        seen: list[Tensor] = []
        for number, arguments in enumerate(calls):
            torch.manual_seed(number)
            rows = arguments.get("rows", 8)
            x = torch.randn(rows, 8, requires_grad=True)
            out = model.blocks[0](x * 1.5, **{key: one for key, one in arguments.items() if key != "rows"})
            out.square().sum().backward()
            seen += [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters()), *model.buffers()]
        results.append([one.clone() for one in seen])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Switched(nn.Module):
    """A flag or a longer input turns on what a recomputation without a mode would get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("count", torch.ones(1))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor, kind: str = "") -> Tensor:
        if x.shape[0] > 8:
            x = x * torch.rand(x.shape, generator=self.generator)
        if kind == "buffer":
            self.count.add_(1.0)
            x = x * self.count.clone()
        if kind == "input":
            x.mul_(2.0)
        h = self.a(x).sin()
        return F.rrelu(h, training=True) if kind == "rrelu" else h


@pytest.mark.parametrize("second", [{"kind": "buffer"}, {"kind": "input"}, {"kind": "rrelu"}, {"rows": 16}], ids=str)
@ON_EACH
def test_what_the_first_call_did_not_do_is_noticed(value: Any, second: dict[str, Any]) -> None:
    assert_same_calls([{}, second, second], Switched, value)


@ON_EACH
@pytest.mark.parametrize("wrap", [nn.Parameter, lambda tensor: tensor * 1.0], ids=["parameters", "tensors"])
def test_parameters_of_a_functional_call_are_found_again(wrap: Callable[[Tensor], Tensor], value: Any) -> None:
    def gradients(put: bool) -> list[Tensor]:
        model = built(lambda: Stack(Dropped(), Dropped()))
        if put:
            sac.apply(model, value)
        torch.manual_seed(0)
        leaves = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
        others = {name: wrap(leaf) for name, leaf in leaves.items()}
        x = torch.randn(8, 8, requires_grad=True)
        torch.func.functional_call(model, others, (x,)).square().sum().backward()
        return [x.grad, *(one.grad for one in (others if wrap is nn.Parameter else leaves).values())]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


@ON_EACH
def test_input_that_is_no_leaf_may_be_written_to(value: Any) -> None:
    def gradients(put: bool) -> list[Tensor]:
        model = built(lambda: Stack(FunctionBlock(lambda block, x: (x.mul_(2.0).sin() @ block.a).cos())))
        if put:
            sac.apply(model, value)
        seen = []
        for seed in range(2):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            model(x * 1.5).square().sum().backward()
            seen.append(x.grad)
        return [*seen, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


@ON_EACH
@pytest.mark.parametrize("outer", ["sac", "torch"])
@pytest.mark.parametrize("count", [1, 2])
def test_applied_blocks_inside_another_checkpoint(count: int, outer: str, value: Any) -> None:
    """From the first step on, in which the blocks' calls are recorded, and those of the outer recomputation are not."""

    def gradients(put: bool) -> list[Tensor]:
        model = built(lambda: Stack(*(Dropped() for _ in range(count))))
        if put:
            sac.apply(model, value)
        torch.manual_seed(0)
        x = torch.randn(8, 8, requires_grad=True)
        if not put:
            out = model(x)
        elif outer == "sac":
            out = sac.checkpoint(model, x)
        else:
            out = torch_checkpoint(model, x, use_reentrant=False)
        out.square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def gradient_inside(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x.sin() @ block.a).sin()
    (g,) = torch.autograd.grad(h.square().sum(), block.a, create_graph=True)
    return (h @ g) * h


@ON_EACH
def test_gradient_taken_inside_a_region(value: Any) -> None:
    assert_same_under(gradient_inside, value)
