"""Inputs scattered over a group: gradients on every rank are those of the plain call."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F

import sac
from tests.support.ranks import run_ranks
from tests.support.runs import Noted
from tests.support.scattering import Run, Seen, differences, mlp, plainly, scattered, summed_up, weights


def of_shape(shape: tuple[int, ...], kind: torch.dtype, run: Run) -> Seen:
    x = torch.randn(shape, dtype=kind, requires_grad=True)
    weight = torch.randn(shape, dtype=kind, requires_grad=True)
    found = summed_up(run(lambda h: torch.tanh(h * weight) * h, x * 1.5), x)
    return found | {"gradient of the weight": weight.grad}


def chain(run: Run) -> Seen:
    """A residual around each region, dropout in it, the hidden state written to in between by the caller."""
    x = torch.randn(3, 5, requires_grad=True)
    layers = [mlp(5) for _ in range(3)]
    h = x * 1.0
    for layer in layers:
        out = run(lambda h, layer=layer: F.dropout(layer(h), 0.3), h)
        h = h + out
        out.data.zero_()  # the caller's own
    found = summed_up(h, x)
    return found | {f"{i} {name}": grad for i, layer in enumerate(layers) for name, grad in weights(layer).items()}


def input_is_overwritten(run: Run) -> Seen:
    x = torch.randn(3, 5, requires_grad=True)
    model = mlp(5)
    h = torch.randn(3, 5)  # as a buffer into which batches are loaded
    first = run(model, h + x)
    second = run(model, h)
    kept = h.clone()
    if run is not plainly:
        h.zero_()
    found = summed_up(first + second, x)
    return found | weights(model) | {"h": kept}


def written_in_the_region(run: Run) -> Seen:
    x = torch.randn(3, 5, requires_grad=True)
    model = mlp(5)

    def function(h: Tensor, again: Tensor) -> Tensor:
        out = model(h + 1)
        h.mul_(2)
        return out * again.exp()

    h = x * 1.5
    found = summed_up(run(function, h, h), x)
    return found | weights(model) | {"h": h.detach()}


def nested_plain_in_scattered(run: Run) -> Seen:
    return nested(lambda f, *a: run(lambda *b: sac.checkpoint(f, *b) if run is not plainly else f(*b), *a), plainly)


def nested_scattered_in_plain(run: Run) -> Seen:
    return nested(sac.checkpoint if run is not plainly else plainly, run)


def nested(outer: Run, inner: Run) -> Seen:
    x = torch.randn(3, 5, requires_grad=True)
    models = nn.ModuleList([mlp(5) for _ in range(4)])

    def pair(h: Tensor, at: int) -> Tensor:
        return inner(models[at + 1], F.dropout(inner(models[at], h), 0.5))

    return summed_up(outer(pair, outer(pair, x * 2, 0), 2), x) | weights(models)


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


def two_graphs(run: Run) -> Seen:
    models = nn.ModuleList([mlp(5) for _ in range(3)])
    sources = [torch.randn(3, 5, requires_grad=True) for _ in range(2)]
    results = []
    for x in sources:
        h = x * 2
        for model in models:
            h = run(model, h)
        results.append(h)
    found = summed_up(results[0], sources[0])  # the earlier one first
    return found | {"second": summed_up(results[1], sources[1])["gradient of the input"], **weights(models)}


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


PROGRAMS = {
    program.__name__: program
    for program in (
        chain,
        input_is_overwritten,
        written_in_the_region,
        nested_plain_in_scattered,
        nested_scattered_in_plain,
        under_hooks,
        parts_of_backward,
        two_graphs,
        retried,
        never_backward,
    )
}
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


# It can take no part of a gradient, is equal to rounding only when nested, and cannot write to a tensor passed twice.
NESTED = ("nested_scattered_in_plain", "nested_plain_in_scattered")
NOT_REENTRANT = ("parts_of_backward", "written_in_the_region", *NESTED)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NOT_REENTRANT])
def test_the_reentrant_mode(name):
    assert run_ranks(2, on_rank, name, {"use_reentrant": True}) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_four_ranks(name):
    assert run_ranks(4, on_rank, name, {}) == [[]] * 4


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


def every_leaf_scattered() -> list[str]:
    """Kept by a predicate: integers, booleans and low precision too."""

    def program(run: Run) -> Seen:
        x = torch.randn(4, 6, requires_grad=True)
        leaves = {
            "index": torch.randint(0, 4, (5,)),
            "mask": torch.rand(4, 6) > 0.5,
            "scale": torch.randn(6).to(torch.float8_e4m3fn),
            "plain": 3,
            "deep": [torch.randn(2, 3).half(), (torch.randn(3, 1),)],
        }

        def function(h: Tensor, index: Tensor, mask: Tensor, scale: Tensor, plain: int, deep: Any) -> Tensor:
            h = h.masked_fill(mask, 0.5) * scale.float() * plain
            return (h.view(8, 3) @ deep[1][0]).view(4, 2)[index].sigmoid() @ deep[0].float()

        return summed_up(run(function, x * 2, **leaves), x)

    return differences(program, scattered(keep=lambda position, tensor: True))


def test_every_leaf_scattered():
    assert run_ranks(2, every_leaf_scattered) == [[], []]


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


def without_grad() -> Any:
    """A forward without grad: nothing of ours happens, so it does not matter that there is no group."""
    with torch.no_grad():
        return sac.checkpoint(torch.sin, torch.ones(3), distribute_saved_activations=True)


def test_without_grad_it_is_the_plain_call():
    for result in run_ranks(2, without_grad):
        assert torch.equal(result, torch.ones(3).sin())
