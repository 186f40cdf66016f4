"""Inputs scattered over a group: gradients on every rank are those of the plain call."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from tests.support.ranks import run_ranks
from tests.support.runs import Noted
from tests.support.scattering import Run, Seen, differences, mlp, plainly, scattered, summed_up, weights


def of_shape(shape: tuple[int, ...], kind: torch.dtype, run: Run) -> Seen:
    x = torch.randn(shape, dtype=kind, requires_grad=True)
    weight = torch.randn(shape, dtype=kind, requires_grad=True)
    found = summed_up(run(lambda h: torch.tanh(h * weight) * h, x * 1.5), x)
    return found | {"gradient of the weight": weight.grad}


def under_hooks(run: Run) -> Seen:
    x = torch.randn(3, 5, requires_grad=True)
    models = nn.ModuleList([mlp(5) for _ in range(3)])
    with save_on_cpu():
        h = x * 2
        for model in models:
            h = run(model, h)
    return summed_up(h, x) | weights(models)


def parts_of_backward(run: Run) -> Seen:
    x = torch.randn(3, 5, requires_grad=True)
    models = nn.ModuleList([mlp(5) for _ in range(3)])
    h = x * 2
    for model in models:
        h = run(model, h)
    loss = h.square().sum()
    late = torch.autograd.grad(loss, models[2].parameters(), retain_graph=True)
    first = torch.autograd.grad(loss, [x], retain_graph=True)
    (slope,) = torch.autograd.grad(loss, [x], create_graph=True)
    slope.square().sum().backward()
    return {"input": first[0], "again": x.grad, **{f"late {i}": grad for i, grad in enumerate(late)}, **weights(models)}


def retried(run: Run) -> Seen:
    """Recomputation fails once; what is left of the graph works."""
    x = torch.randn(3, 5, requires_grad=True)
    models = nn.ModuleList([mlp(5) for _ in range(3)])
    fails = Noted(False)

    def may_fail(h: Tensor) -> Tensor:
        if fails[0]:
            raise ValueError("once")
        return models[1](h)

    h = run(models[2], run(may_fail, run(models[0], x * 2)))
    loss = h.square().sum()
    if run is not plainly:
        fails[0] = True
        with pytest.raises(ValueError, match="once"):
            loss.backward(retain_graph=True)
        x.grad = None
        weights(models)
        fails[0] = False
    loss.backward()
    return {"input": x.grad, **weights(models)}


def never_backward(run: Run) -> Seen:
    """A graph that is dropped between two that are not."""
    model = mlp(5)
    found = {}
    for turn in range(3):
        x = torch.randn(3, 5, requires_grad=True)
        h = run(model, run(model, x * 2))
        if turn != 1:
            h.square().sum().backward()
            found |= {f"{turn} {name}": grad for name, grad in {"input": x.grad, **weights(model)}.items()}
    return found


PROGRAMS = {one.__name__: one for one in (under_hooks, parts_of_backward, retried, never_backward)}
MORE = {
    "nothing more": {},
    "keep all": {"keep": "all"},
    "host": {"store": "scattered+host"},
}


def on_rank(name: str, more: dict[str, Any]) -> list[str]:
    return differences(PROGRAMS[name], scattered(**more))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("more", MORE)
def test_two_ranks(more, name):
    assert run_ranks(2, on_rank, name, MORE[more]) == [[], []]


SHAPES = [(1,), (7,), (8,), (3, 5), (), (0, 4)]
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


def shapes_and_kinds() -> list[str]:
    return [
        f"{kind} {shape}: {name}"
        for shape in SHAPES
        for kind in KINDS
        for name in differences(partial(of_shape, shape, kind), scattered(), turns=2)
    ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_elements_and_any_dtype(size):
    assert run_ranks(size, shapes_and_kinds) == [[]] * size


def the_callers_tensors() -> list[bool]:
    """Whether what the caller passed is as it was, bit for bit and in the same memory, after each stage."""
    x = torch.randn(3, 5)
    h = (x.requires_grad_() * 2)[1:]
    copy, place, version = h.detach().clone(), h.data_ptr(), h._version
    model = mlp(5)
    same = []

    def look() -> None:
        same.append(torch.equal(h.detach(), copy) and (h.data_ptr(), h._version) == (place, version))

    run = scattered(keep="all")
    with torch.no_grad():
        run(model, h)
    look()
    result = run(model, h)
    look()
    result.sum().backward()
    look()
    return same


def test_the_callers_tensor_is_left_alone():
    assert run_ranks(2, the_callers_tensors) == [[True] * 3] * 2
