"""Calls on inputs of one sort share a plan where their tapes agree; what differs between them is each call's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.blocks import FunctionBlock, Stack
from tests.support.replay_programs import ON_EACH, applied, assert_replayed, block_of, python_runs, replay
from tests.support.training import assert_same, built


def number(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a) * float(block.calls)
    return (h.sin() + block.calls).cos() * torch.full((8,), 1.0 / block.calls)


def branch(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h = h.sin() if block.calls % 2 else h.cos() * h.tanh()
    return h @ block.b


def branch_of_as_many_ops(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    return (h.sin() if block.calls % 2 else h.cos()).tanh() @ block.b


def other_value_read(block: FunctionBlock, x: Tensor) -> Tensor:
    h, g = x @ block.a, x @ block.b
    return (h.sin() if block.calls % 2 else g.sin()).tanh() * h.cos()


def other_value_saved(block: FunctionBlock, x: Tensor) -> Tensor:
    """Backward wants other values, of the same ops."""
    h, g = (x @ block.a).sin(), (x @ block.b).sin()
    return h * g.detach() if block.calls % 2 else h.detach() * g


def tensor_or_number(block: FunctionBlock, x: Tensor) -> Tensor:
    scale = x.mean() if block.calls % 2 else 0.5
    h = (x @ block.a) * scale
    where = torch.where(x > 0, h.sin(), scale)
    other = torch.where(x > 0, scale, h.sin()) if block.calls % 3 else torch.where(x > 0, h.sin(), scale)
    return (where + other).tanh() @ block.b


def number_in_either_place(block: FunctionBlock, x: Tensor) -> Tensor:
    """The same values are read by the same ops; which argument is the number changes."""
    h = x @ block.a
    subtract = torch.ops.aten.sub.Tensor
    return (subtract(h, 2.0) if block.calls % 2 else subtract(2.0, h)).sin() * h


def other_half_without_grad(block: FunctionBlock, x: Tensor) -> Tensor:
    """The same ops run on the same values; autograd saves others."""
    odd = block.calls % 2 == 1
    with torch.set_grad_enabled(odd):
        h = (x @ block.a).sin()
    with torch.set_grad_enabled(not odd):
        g = (x @ block.b).sin()
    return h * g


def argument_left_out(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    bound, odd = x.detach().abs(), block.calls % 2
    return torch.clamp(h * h, min=bound if odd else None, max=None if odd else bound).sin() @ block.b


def written_now_and_then(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    y = h * 2
    if block.calls % 2:
        h.mul_(3)
    return y.sin() * h.cos()


def drawn_now_and_then(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h = torch.nn.functional.dropout(h, 0.5, training=block.calls % 2 == 0)
    return h.sin() * torch.nn.functional.dropout(h, 0.1 * block.calls)


BODIES: dict[str, Callable[[FunctionBlock, Tensor], Tensor]] = {
    function.__name__: function
    for function in (
        number,
        branch,
        branch_of_as_many_ops,
        other_value_read,
        other_value_saved,
        tensor_or_number,
        number_in_either_place,
        other_half_without_grad,
        argument_left_out,
        written_now_and_then,
        drawn_now_and_then,
    )
}


@ON_EACH
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("verify", ["never", "always"])
def test_replayed(name: str, verify: str, chosen: dict[str, Any]) -> None:
    assert_replayed(block_of(BODIES[name]), replay(chosen, verify), steps=5)


def four_at_once(model: Stack) -> dict[str, Tensor]:
    """As in a pipeline: the plans of several calls of one region wait at once."""
    torch.manual_seed(0)
    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
    outputs = [model(x) for x in inputs]
    for out in [outputs[1], outputs[0], outputs[3], outputs[2]]:
        out.square().sum().backward()
    found = {f"input {index}": x.grad for index, x in enumerate(inputs)}
    return found | {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@ON_EACH
@pytest.mark.parametrize("name", BODIES)
def test_forwards_first_and_backwards_last(name: str, chosen: dict[str, Any]) -> None:
    model = applied(block_of(BODIES[name]), replay(chosen))
    assert_same(four_at_once(built(block_of(BODIES[name]))), four_at_once(model))
    assert python_runs(model) == 4


def of_any_length(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    z = torch.zeros(len(x), 8)
    z.index_add_(0, torch.arange(len(x)), h.detach())
    return (h * z).sin() + torch.ones(len(x), 1) * h.mean(0)


@ON_EACH
def test_inputs_of_many_lengths(chosen: dict[str, Any]) -> None:
    lengths = iter([3, 7, 3, 1, 12, 7, 3] * 2)
    assert_replayed(
        block_of(of_any_length), replay(chosen), steps=7, make_input=lambda device: (torch.randn(next(lengths), 8),)
    )
