"""Wrapper subclasses: a tensor that consists of other tensors, which autograd and modes see as a single one.

A wrapper made inside a region has parts that ops made; a write to a part is a write to the wrapper, and the other way
round. DTensors, which carry their mesh and send inside of their ops, and weights in low precision are in
tests/stacks/test_matrix.py and tests/promises/test_09_same_on_every_rank.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.blocks import FunctionBlock, Stack
from tests.support.oracle import assert_exact, assert_replayed_exactly, on_every_way
from tests.support.programs import Block, Program
from tests.support.training import assert_same, built
from tests.support.ways import POLICIES, WAYS

# -- Made inside a region


class Marked(torch.Tensor):
    """A subclass that holds its data itself."""


def around_and_out(block: Block, x: Tensor) -> Tensor:
    pair = (TwoTensor(block.up(x), x.sin()) * 2).sin()
    return block.down(pair.a * pair.b)


def in_one_another(block: Block, x: Tensor) -> Tensor:
    first = TwoTensor(block.up(x), x.cos())
    second = TwoTensor(first.a, first.b.sin())
    both = (TwoTensor(first, second) * 2).sin()
    return block.down(both.a.a) + both.b.b * both.a.b


def written_through_the_wrapper(block: Block, x: Tensor) -> Tensor:
    pair = TwoTensor(block.up(x).clone(), x.sin())
    other = TwoTensor(x.detach().clone(), x.detach().clone())
    other.mul_(3)
    return block.down((pair * other).sin().a) + other.b.cos()


def written_through_a_part(block: Block, x: Tensor) -> Tensor:
    pair = TwoTensor(x.detach().clone(), x.detach() * 2)
    pair.a.add_(1)
    part = pair.b.view(-1)[3:11]
    part.mul_(2)
    return (block.up(x) * (pair * 2).sin().a).cos() * pair.b * part


def written_behind_the_wrapper(block: Block, x: Tensor) -> Tensor:
    held = x.detach() * 2
    pair = TwoTensor(held, x.detach().cos())
    held.mul_(2)
    return block.up(x).sin() * pair.sin().a * held


def two_wrappers_of_one_part(block: Block, x: Tensor) -> Tensor:
    part = block.up(x).detach().clone()
    first, second = TwoTensor(part, x.detach() * 1), TwoTensor(part, x.detach().sin())
    first.mul_(2)
    return block.down(x) * (second * 1.5).sin().a


def without_a_wrapper(block: Block, x: Tensor) -> Tensor:
    marked = block.up(x).as_subclass(Marked)
    return block.down((marked * 2).sin().as_subclass(torch.Tensor))


OFFSETS = torch.tensor([0, 3, 8])  # new offsets would be other lengths to torch


def rows_of_other_lengths(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, OFFSETS)


def jagged(block: Block, x: Tensor) -> Tensor:
    return F.linear(rows_of_other_lengths(block.up(x)).sin(), block.down.weight).values()


def jagged_and_written(block: Block, x: Tensor) -> Tensor:
    """The op writes to the values, not to the offsets."""
    rows = rows_of_other_lengths(block.up(x) * 1.0)
    rows.mul_(0.5)
    return F.linear(rows.sin(), block.down.weight).values() * rows.offsets().sum()


INSIDE = [
    Program(body.__name__, body, tags=frozenset({"wrapper"}))
    for body in (
        around_and_out,
        in_one_another,
        written_through_the_wrapper,
        written_through_a_part,
        written_behind_the_wrapper,
        two_wrappers_of_one_part,
        without_a_wrapper,
        jagged,
        jagged_and_written,
    )
]


@on_every_way(INSIDE)
def test_made_inside(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_needs_no_comparison_to_be_exact(policy: str) -> None:
    for program in INSIDE:
        assert_replayed_exactly(program, policy, blocks=1)


# -- Inputs and weights

WAYS_OF_WRAPPERS = [name for name in WAYS if name not in ("whole modules", "reentrant")]


def wrapped_weight() -> Stack:
    blocks = [FunctionBlock(lambda block, x: F.dropout((x @ block.w).sin(), 0.3) * x) for _ in range(2)]
    for block in blocks:
        block.w = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))
    return Stack(*blocks)


def gradients_of_parts(model: Stack) -> dict[str, Tensor]:
    """Of three steps on a wrapper, by part."""
    torch.manual_seed(0)
    seen: dict[str, Tensor] = {}
    for step in range(3):
        x = TwoTensor(torch.randn(8, 8), torch.randn(8, 8)).requires_grad_()
        model(x * 1).square().sum().backward(TwoTensor(torch.tensor(1.0), torch.tensor(2.0)))
        for name, tensor in [("input", x), *((n, p) for n, p in model.named_parameters() if n.endswith("w"))]:
            seen |= {f"{step} {name} {part}": getattr(tensor.grad, part).clone() for part in ("a", "b")}
    return seen


@pytest.mark.parametrize("policy", ["nothing", "matmuls"])
@pytest.mark.parametrize("way", WAYS_OF_WRAPPERS)
def test_wrapped_inputs_and_weights(way: str, policy: str) -> None:
    model = built(wrapped_weight)
    WAYS[way].put(model, POLICIES[policy])
    expected = gradients_of_parts(built(wrapped_weight))
    assert len(expected) == 3 * 3 * 2
    assert_same(expected, gradients_of_parts(model))


@pytest.mark.parametrize("way", WAYS_OF_WRAPPERS)
def test_jagged_input(way: str) -> None:
    def gradients(model: Stack) -> dict[str, Tensor]:
        seen = {}
        for step in range(2):
            values = torch.randn(10, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
            rows = torch.nested.nested_tensor_from_jagged(values * 1.0, torch.tensor([0, 4, 10]))
            model(rows).values().square().sum().backward()
            seen |= {f"{step} input": values.grad}
        return seen | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def build() -> Stack:
        return Stack(*(FunctionBlock(lambda block, x: F.linear(x.sin(), block.a).cos()) for _ in range(2)))

    model = built(build)
    WAYS[way].put(model, POLICIES["matmuls"])
    assert_same(gradients(built(build)), gradients(model))
