"""Tensors in and out of wrapper subclasses, which come about where no mode looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from sac.errors import RegionError
from tests.support.blocks import FunctionBlock, Stack
from tests.support.replay_programs import ON_EACH, POLICIES, applied, assert_replayed, block_of, python_runs, replay
from tests.support.training import assert_same, built


class Marked(torch.Tensor):
    """A subclass that holds its data itself."""


def around_and_out(block: FunctionBlock, x: Tensor) -> Tensor:
    pair = (TwoTensor(x @ block.a, x.sin()) * 2).sin()
    return (pair.a * pair.b) @ block.b


def in_one_another(block: FunctionBlock, x: Tensor) -> Tensor:
    first = TwoTensor(x @ block.a, x.cos())
    second = TwoTensor(first.a, first.b.sin())
    both = (TwoTensor(first, second) * 2).sin()
    return both.a.a @ block.b + both.b.b * both.a.b


def written_through_a_part(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        pair = TwoTensor(x.detach().clone(), x.detach() * 2)
    pair.a.add_(1)
    part = pair.b.view(-1)[3:11]
    part.mul_(2)
    return (x @ block.a * (pair * 2).sin().a).cos() * pair.b * part


def written_behind_the_wrapper(block: FunctionBlock, x: Tensor) -> Tensor:
    held = (x.detach() * 2).clone()
    pair = TwoTensor(held, x.detach().cos())
    held.mul_(2)
    return (x @ block.a).sin() * pair.sin().a * held


def without_a_wrapper(block: FunctionBlock, x: Tensor) -> Tensor:
    marked = (x @ block.a).as_subclass(Marked)
    return (marked * 2).sin().as_subclass(torch.Tensor) @ block.b


def jagged(block: FunctionBlock, x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(x @ block.a, OFFSETS)
    return F.linear(rows.sin(), block.b).values()


OFFSETS = torch.tensor([0, 3, 8])
BODIES: dict[str, Callable[[FunctionBlock, Tensor], Tensor]] = {
    body.__name__: body
    for body in (
        around_and_out,
        in_one_another,
        written_through_a_part,
        written_behind_the_wrapper,
        without_a_wrapper,
        jagged,
    )
}


@ON_EACH
@pytest.mark.parametrize("name", BODIES)
def test_made_inside(name: str, chosen: dict[str, Any]) -> None:
    assert_replayed(block_of(BODIES[name]), replay(chosen), steps=3)


def gradients(model: Stack) -> dict[str, Tensor]:
    """After three steps on a wrapper, of each part."""
    torch.manual_seed(0)
    seen: dict[str, Tensor] = {}
    for step in range(3):
        x = TwoTensor(torch.randn(8, 8), torch.randn(8, 8)).requires_grad_()
        out = model(x)
        (out * out).sum().backward(TwoTensor(torch.tensor(1.0), torch.tensor(2.0)))
        wrappers = [("input", x), *model.named_parameters()]
        for name, one in wrappers:
            if isinstance(one.grad, TwoTensor):
                seen |= {f"{step} {name} {part}": getattr(one.grad, part).clone() for part in ("a", "b")}
    return seen


def with_wrapped_weight() -> Stack:
    model = block_of(lambda block, x: F.dropout((x @ block.w).sin(), 0.3) * x)()
    model.blocks[0].w = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))
    return model


@ON_EACH
def test_wrapped_inputs_and_weights(chosen: dict[str, Any]) -> None:
    model = applied(with_wrapped_weight, replay(chosen, "always"))
    expected = gradients(built(with_wrapped_weight))
    assert len(expected) == 3 * 4
    assert_same(expected, gradients(model))
    assert python_runs(model) == 3


def writing_its_wrapped_weight(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.w.mul_(0.9)
    return (x @ block.w).sin() * x


def with_written_weight() -> Stack:
    model = block_of(writing_its_wrapped_weight)()
    model.blocks[0].w = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))
    return model


def test_a_wrapped_weight_that_the_region_writes_to_is_refused_where_backward_would_need_a_copy() -> None:
    model = applied(with_written_weight, replay(POLICIES["nothing"]))
    with pytest.raises(RegionError, match="was changed in place: it is at version 2, backward expects version 1"):
        gradients(model)
