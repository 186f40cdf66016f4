"""Ops of every kind are replayed: views, writes, several results, lists, sparse, complex, higher-order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.blocks import FunctionBlock, square
from tests.support.replay_programs import (
    ON_EACH,
    POLICIES,
    applied,
    assert_gave_way,
    assert_replayed,
    block_of,
    replay,
    warning_of,
)
from tests.support.training import assert_same, built, train

BODIES: dict[str, Callable[[FunctionBlock, Tensor], Tensor]] = {}


def body(function: Callable[[FunctionBlock, Tensor], Tensor]) -> Callable[[FunctionBlock, Tensor], Tensor]:
    """Note a region's body."""
    BODIES[function.__name__] = function
    return function


@body
def views_of_views_are_written_to(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).clone()
    part = h.view(4, 2, 8)[1:3].transpose(0, 2)[2:5]
    part.mul_(2)
    part.permute(2, 1, 0)[0].add_(1)
    return h.sin() * h.t().cos()


@body
def shapes_are_changed_in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a)[:, :4] * 1.0
    h.t_()
    h.unsqueeze_(0)
    h.squeeze_(0)
    return (h.sin() @ x).tanh() @ block.b


@body
def several_results(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    variance, mean = torch.var_mean(h, 1, keepdim=True)
    q, k, v = h.split([2, 3, 3], 1)
    rows = torch.unbind(h.sin(), 0)
    values, _ = h.sort(1)
    return torch.stack(rows) * (h - mean) * torch.rsqrt(variance + 1) + torch.cat([k, v, q], 1).cos() * values


@body
def lists_of_tensors(block: FunctionBlock, x: Tensor) -> Tensor:
    doubled, halved = torch._foreach_mul([x @ block.a, x], [2.0, 0.5])
    with torch.no_grad():
        written = [x.detach().clone(), x.detach() * 2]
        torch._foreach_add_(written, [x.detach(), x.detach()])
        torch._foreach_mul_(written, 0.5)
    return (doubled * written[0]).sin() + (halved * written[1]).cos()


@body
def complex_numbers(block: FunctionBlock, x: Tensor) -> Tensor:
    c = torch.complex(x @ block.a, x)
    d = c.conj() * c.sin()
    real = torch.view_as_real(d).sum(-1) + d.imag.neg().cos() + torch._neg_view(c.real).sin()
    return real @ block.b + (c.conj().sin().conj() @ c).abs()


@body
def sparse_tensors(block: FunctionBlock, x: Tensor) -> Tensor:
    sparse = (x * (x > 0)).to_sparse()
    h = torch.sparse.mm(sparse, block.a).sin()
    rows = (x.detach() * (x.detach() > 0)).to_sparse_csr()
    return h @ block.b + (rows @ h).cos()


@body
def values_decide(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h = h.sin() * h.mean().item() if h.sum().item() > 0 else h.cos()
    picked = h[(h > 0).nonzero(as_tuple=True)].sum() + h.masked_select(h < 0).sum()
    return h * (int(h.argmax()) % 3 + 1) @ block.b + picked


@body
def fresh_memory_filled_by_ops(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    some = torch.zeros(8, 8)
    some[torch.arange(4)] = h[:4].detach()
    ordered = torch.empty_like(h)
    ordered[torch.tensor([3, 1, 2, 0, 4, 5, 6, 7])] = h
    summed = torch.zeros_like(h).index_add_(0, torch.tensor([1, 1, 2, 3, 4, 5, 6, 0]), h)
    halves = torch.empty(8, 8)
    halves[:4].copy_(h[4:])
    halves[4:].copy_(h[:4])
    return (some * h).sin() + ordered.sin() * summed * halves


@body
def constants(block: FunctionBlock, x: Tensor) -> Tensor:
    mask = torch.full((8, 8), float("-inf")).triu(1)
    scale = torch.tensor([1.0, 2.0] * 4) * torch.tensor(3.0)
    return ((x @ block.a + mask).softmax(-1) * scale * torch.arange(8)).sin() @ block.b


@body
def nothing_in_it(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    return torch.cat([h[:0], torch.empty(0, 8), h.sin()], 0) @ block.b


@body
def an_input_given_other_data(block: FunctionBlock, x: Tensor) -> Tensor:
    x.data = torch.full((8, 8), 0.3)
    return (x * x).cos() @ block.b


@body
def written_behind_autograds_back(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h.data.mul_(2)
    h.data[1:3].view(-1)[:5].add_(1)
    return (h.sin() + x.data * 2) @ block.b


@body
def saved_and_then_written_behind_autograds_back(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    alias = h.data
    y = h * 2.0
    del h
    alias.mul_(3)
    return (y.sin() @ block.b) * alias


@body
def autocast(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = (x @ block.a).sin() @ block.b
        with torch.autocast("cpu", enabled=False):
            y = x @ block.a
    return h.float() * y


@body
def partly_without_grad(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = F.dropout(x @ block.b, 0.3).tanh()
    detached = (x @ block.a).detach().requires_grad_()
    return (x @ block.a * scale).sin() * detached.cos()


@ON_EACH
@pytest.mark.parametrize("name", BODIES)
def test_replayed(name: str, chosen: dict[str, Any]) -> None:
    assert_replayed(block_of(BODIES[name]), replay(chosen))


def results_written_to_arguments(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        doubled = torch.empty(0)
        torch.mul(x, 2, out=doubled)
        values, places = torch.empty(8, 1), torch.empty(8, 1, dtype=torch.long)
        torch.max(x, 1, keepdim=True, out=(values, places))
    return (x @ block.a * doubled).sin() * values * places


def lies_elsewhere(block: FunctionBlock, x: Tensor) -> Tensor:
    other = x.detach() * 3
    moved = torch.empty(0).set_(other)
    other.add_(1)
    return (x @ block.a).sin() * moved


def takes_a_storage(block: FunctionBlock, x: Tensor) -> Tensor:
    doubled = x.detach() * 2
    return (x @ block.a).sin() * torch.empty(0).set_(doubled.untyped_storage(), 0, doubled.shape, doubled.stride())


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (results_written_to_arguments, "aten.max.dim_max reads memory that no op has written to"),
        (lies_elsewhere, "aten.set_.source_Tensor gives a tensor other memory"),
        (takes_a_storage, "aten.set_.source_Storage_storage_offset takes a storage"),
    ],
)
def test_gives_way(function: Callable[..., Tensor], found: str) -> None:
    assert_gave_way(block_of(function), replay(POLICIES["nothing"]), warning_of(found))


def test_inference_mode_in_later_calls() -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        with torch.inference_mode(block.calls > 2):
            scale = (x.detach() * 2).tanh()
        return (x @ block.a).sin() * scale.clone()

    ours = train(applied(block_of(body), replay(POLICIES["nothing"])), steps=4, make_input=square)
    assert_same(train(built(block_of(body)), steps=4, make_input=square), ours)
