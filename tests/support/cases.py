"""Programs for the matrix of modes and stores: each runs once plainly and once with regions, from the same seeds.

A case is called with `run`, which calls a function as a region or plainly; it returns what must not differ, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Run = Callable[..., Any]
Seen = dict[str, Tensor]
Program = Callable[[Run], Seen]
WIDTH = 8


@dataclass(frozen=True)
class Case:
    """One program. ``rounds``: a weight serves in several regions; reentrant frames add gradients in another order,
    so that those are compared in float64.
    """

    name: str
    program: Program
    rounds: bool = False


CASES: dict[str, Case] = {}


def case(program: Program | None = None, **traits: Any) -> Any:
    """Put a program into `CASES` under its name."""
    if program is None:
        return lambda one: case(one, **traits)
    CASES[program.__name__] = Case(program.__name__, program, **traits)
    return program


def hidden(*shape: int) -> tuple[Tensor, Tensor]:
    """A leaf, and an activation made of it: what a region's input mostly is."""
    x = torch.randn(*shape, requires_grad=True)
    return x, x * 1.5


def layer(width: int = WIDTH, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
    )


def seen(result: Any, *sources: Tensor | nn.Module) -> Seen:
    """Run backward from everything differentiable in `result`; return results, gradients and the random state."""
    outputs = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
    loss_of(outputs).backward()
    found = {f"output {place}": one.detach().clone() for place, one in enumerate(outputs)}
    for place, source in enumerate(sources):
        tensors = source.parameters() if isinstance(source, nn.Module) else [source]
        for number, tensor in enumerate(tensors):
            if tensor.grad is not None:
                found[f"gradient {place}.{number}"] = tensor.grad.clone()
    found["random state"] = torch.get_rng_state()
    return found


def loss_of(outputs: list[Tensor]) -> Tensor:
    """A loss with another weight for every element of every differentiable output."""
    parts = []
    for place, one in enumerate(outputs):
        if one.requires_grad:
            ramp = torch.linspace(-1, 1.5 + place, one.numel()).view(one.shape)
            parts.append((one.double() * ramp).sum() + one.double().square().sum())
    return torch.stack(parts).sum()


@case
def two_regions_in_a_row(run: Run) -> Seen:
    first, second, (x, h) = layer(dropout=0.2), layer(dropout=0.2), hidden(4, WIDTH)
    return seen(run(second, run(first, h)), x, first, second)


@case(rounds=True)
def nested(run: Run) -> Seen:
    inner, outer, (x, h) = layer(dropout=0.3), layer(dropout=0.3), hidden(4, WIDTH)
    return seen(run(lambda h: outer(run(inner, outer(h)) + h), h), x, inner, outer)


@case
def arguments_of_every_kind(run: Run) -> Seen:
    model, (x, h), (y, g), (z, other) = layer(), hidden(4, WIDTH), hidden(4, WIDTH), hidden(4, WIDTH)
    mask = torch.rand(4, WIDTH) > 0.5

    def body(nothing: None, two: int, text: str, mask: Tensor, nested: dict[str, Any], *, other: Tensor) -> Tensor:
        assert (nothing, two, text) == (None, 2, "text")
        (first, (second, _)), size = nested["pair"], nested["size"]
        return model((first * second * size + other).masked_fill(mask, two))

    nested = {"pair": [h, (g, None)], "size": 3}
    return seen(run(body, None, 2, "text", mask, nested, other=other), x, y, z, model)


@case
def views(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(6, 2 * WIDTH)
    left, right = h.chunk(2, dim=1)
    return seen([run(model, left), run(model, right[::2]), run(model, h.view(12, WIDTH)[3:])], x, model)


@case
def strided(run: Run) -> Seen:
    convolution, linear, (x, h), (y, g) = nn.Conv2d(4, 4, 3), layer(), hidden(2, 4, 6, 6), hidden(1, WIDTH)
    results = [run(convolution, h.to(memory_format=torch.channels_last)), run(convolution, h.transpose(2, 3))]
    return seen([*results, run(linear, g.expand(5, WIDTH))], x, y, convolution, linear)


@case
def sizes_that_do_not_divide(run: Run) -> Seen:
    model, results, sources = layer(7), [], []
    for rows in (1, 3, 5):
        x, h = hidden(rows, 7)
        sources.append(x)
        results.append(run(model, h))
    x, h = hidden(1)
    results += [run(lambda one: one.sin(), h), run(lambda one: one.exp(), hidden(0, 7)[1])]
    return seen(results, *sources, x, model)


@case
def shared_input(run: Run) -> Seen:
    query, key, (x, h) = layer(), layer(), hidden(4, WIDTH)
    return seen(run(query, h) @ run(key, h).t(), x, query, key)


@case
def frozen_input(run: Run) -> Seen:
    model = layer(dropout=0.3)
    return seen(run(model, torch.randn(4, WIDTH)), model)


@case(rounds=True)
def backward_twice(run: Run) -> Seen:
    first, second, (x, h) = layer(dropout=0.3), layer(dropout=0.3), hidden(4, WIDTH)
    out = run(second, run(first, h))
    loss_of([out]).backward(retain_graph=True)
    return seen(out, x, first, second)


@case
def micro_batches_in_flight(run: Run) -> Seen:
    model, (x, h), (y, g) = layer(dropout=0.3), hidden(4, WIDTH), hidden(3, WIDTH)
    first, second = run(model, h), run(model, g)
    loss_of([second]).backward()
    return seen(first, x, y, model)


@case
def complex_numbers(run: Run) -> Seen:
    x = torch.randn(3, 5, dtype=torch.complex64, requires_grad=True)
    weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
    out = run(lambda h: torch.view_as_real((h @ weight).sin()), (x * 2).conj())
    return seen(out, x, weight)


def written_inside(run: Run) -> Seen:
    """The region writes to its input; the caller reads what was written."""
    model, (x, h) = layer(), hidden(4, WIDTH)
    out = run(lambda h: model(h.mul_(2).add_(1)), h)
    return seen([out, h * 3], x, model)


def written_after(run: Run) -> Seen:
    """The caller overwrites the input between forward and backward."""
    model, x = layer(), torch.randn(4, WIDTH)
    out = run(lambda h: model(h.sin()), x)
    x.fill_(100.0)
    loss_of([out]).backward()
    return {f"gradient {number}": one.grad for number, one in enumerate(model.parameters())}
