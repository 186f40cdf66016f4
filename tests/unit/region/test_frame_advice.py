"""What a ``RegionError`` advises fits what happened: each kind of difference has a text of its own."""

from __future__ import annotations

import pytest
import torch
from sac.region.frame import OTHER_PATH, advised
from torch import Tensor

import sac
from sac.engine.settings import PLAIN, Settings
from sac.errors import Problem, RegionError
from tests.support.cases import WIDTH, hidden


def told(out: Tensor) -> str:
    with pytest.raises(RegionError) as caught:
        out.sum().backward()
    return str(caught.value)


def test_a_variable_that_is_bound_later_is_that_of_the_forward() -> None:
    """`torch.utils.checkpoint` finds the last weight in backward."""
    gradients = []
    start = hidden(4, WIDTH)[1].detach()
    for run in (lambda function, h: function(h), sac.checkpoint):
        weights = [torch.ones(WIDTH, 4, requires_grad=True), torch.ones(4, 2, requires_grad=True)]
        h = start
        for weight in weights:
            h = run(lambda h: torch.tanh(h) @ weight.tanh(), h)  # noqa: B023
        h.sum().backward()
        gradients.append([weight.grad for weight in weights])
    assert all(map(torch.equal, *gradients))


def test_another_path() -> None:
    steps = (one for one in (2, 1))  # a generator is not put back
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
    dtypes = (one for one in (torch.float32, torch.float64))  # a generator is not put back
    h = hidden(4, WIDTH)[1]
    assert told(sac.checkpoint(lambda h: h.to(next(dtypes)).tanh().float(), h)) == (
        "test_another_kind_of_tensor.<locals>.<lambda>: saved tensor 0 was float32[4, 8] on cpu in forward and is "
        "float64[4, 8] on cpu in recomputation\n"
        "    fix: the region found another tensor than in forward, or one of another shape, dtype or device: do not "
        "move, cast or exchange between forward and backward what it uses (modules, attributes, globals)"
    )


def test_other_values() -> None:
    orders = (one for one in ((torch.exp, torch.tanh), (torch.tanh, torch.exp)))  # a generator is not put back
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
    found = advised(error, "f", Settings(preserve_rng_state=False))
    assert str(found) == (
        f"f: something\n    fix: {OTHER_PATH}; preserve_rng_state is off: turn it on if the region draws random numbers"
    )
    assert advised(error, "f", PLAIN) is error


def test_what_another_region_says_is_left_as_it_is() -> None:
    off = Settings(preserve_rng_state=False)
    inner = RegionError(Problem("inner", "something", fix=OTHER_PATH))
    assert advised(inner, "f", off) is inner
    other = RegionError(Problem("f", "something", fix="pass retain_graph=True"))
    assert advised(other, "f", off).problems == other.problems
