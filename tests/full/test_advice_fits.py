"""What a ``RegionError`` advises fits what happened: each kind of difference has a text of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from sac.errors import Problem, RegionError
from sac.region.advice import OTHER_KIND, OTHER_PATH, OTHER_VALUE, advised, closure_of
from sac.region.settings import PLAIN, Settings
from tests.support.cases import WIDTH, hidden

LATE = (
    "`weight` of the function's closure is something else now than in forward: bind it when the function is made, by "
    "functools.partial or a default argument (lambda x, layer=layer: …)"
)


def told(out: Tensor) -> str:
    with pytest.raises(RegionError) as caught:
        out.sum().backward()
    return str(caught.value)


def late(weights: list[Tensor], run: Callable[..., Any]) -> Tensor:
    """In backward the lambda would find the last weight."""
    h = hidden(4, WIDTH)[1]
    for weight in weights:
        h = run(lambda h: torch.tanh(h) @ weight.tanh(), h)  # noqa: B023
    return h


def test_a_variable_that_is_bound_later_is_put_back() -> None:
    def gradients(run: Callable[..., Any]) -> tuple[Tensor, ...]:
        weights = [torch.ones(WIDTH, 4, requires_grad=True), torch.ones(4, 2, requires_grad=True)]
        return torch.autograd.grad(late(weights, run).sum(), weights)

    for _ in range(2):
        expected, found = gradients(lambda function, h: function(h)), gradients(sac.checkpoint)
        assert all(map(torch.equal, expected, found))


def test_another_path() -> None:
    steps = iter([2, 1])
    h = hidden(4, WIDTH)[1]

    def function(h: Tensor) -> Tensor:
        for _ in range(next(steps)):
            h = h.tanh()
        return h

    assert told(sac.checkpoint(function, h)) == (
        "test_another_path.<locals>.function: recomputation saved 1 tensors, forward saved 2\n"
        "    fix: recomputation took another path through the region's Python than forward did: look for a branch that "
        "reads a counter, a cache or a global, and pass what it reads as an argument"
    )


def test_another_kind_of_tensor() -> None:
    dtypes = iter([torch.float32, torch.float64])
    h = hidden(4, WIDTH)[1]
    assert told(sac.checkpoint(lambda h: h.to(next(dtypes)).tanh().float(), h)) == (
        "test_another_kind_of_tensor.<locals>.<lambda>: saved tensor 0 was float32[4, 8] on cpu in forward and is "
        "float64[4, 8] on cpu in recomputation\n"
        "    fix: the region found another tensor than in forward, or one of another shape, dtype or device: do not "
        "move, cast or exchange between forward and backward what it uses (modules, attributes, globals)"
    )


def test_other_values() -> None:
    orders = iter([(torch.exp, torch.tanh), (torch.tanh, torch.exp)])
    h = hidden(4, WIDTH)[1]

    def function(h: Tensor) -> Tensor:
        first, second = next(orders)
        return first(h) + second(h)

    assert told(sac.checkpoint(function, h)).splitlines()[-1] == (
        "    fix: the region computed with other tensors than in forward, or in another order: do not exchange between "
        "forward and backward what it uses (data of a weight, attributes, globals), or pass it as an argument"
    )


def test_random_states_that_are_not_put_back() -> None:
    error = RegionError(Problem("f", "something", fix=OTHER_PATH))
    found = advised(error, "f", (), Settings(preserve_rng_state=False))
    assert str(found) == (
        f"f: something\n    fix: {OTHER_PATH}; preserve_rng_state is off: turn it on if the region draws random numbers"
    )
    assert advised(error, "f", (), PLAIN) is error


def test_what_another_region_says_is_left_as_it_is() -> None:
    layer = 1
    closure = closure_of(partial(lambda h: h + layer))
    layer = 2
    for fix in (OTHER_KIND, OTHER_PATH, OTHER_VALUE):
        (problem,) = advised(RegionError(Problem("f", "something", fix=fix)), "f", closure, PLAIN).problems
        assert problem.fix == LATE.replace("weight", "layer")
    inner = RegionError(Problem("inner", "something", fix=OTHER_PATH))
    assert advised(inner, "f", closure, PLAIN) is inner
    other = RegionError(Problem("f", "something", fix="pass retain_graph=True"))
    assert advised(other, "f", closure, PLAIN) is other


def test_functions_without_a_closure() -> None:
    assert closure_of(torch.sin) == ()
    assert closure_of(partial(torch.sin)) == ()
