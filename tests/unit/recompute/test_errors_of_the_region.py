"""Errors: those that the user's forward raises leave nothing behind; one that does not repeat itself is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

import sac
from sac.errors import RegionError
from tests.support.cases import hidden
from tests.support.oracle import built_model
from tests.support.programs import WIDTH, Block, Program
from tests.support.runs import Noted, note_run
from tests.support.training import assert_same, train
from tests.support.ways import NONE, WAYS


def own_forward(block: Block, x: Tensor) -> Tensor:
    raise AssertionError


class Failing(nn.Module):
    """Draws random numbers, counts itself, and then fails in the run of this number."""

    def __init__(self, fails_in: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.fails_in = fails_in

    def forward(self, x: Tensor) -> Tensor:
        run = note_run(self)
        h = F.dropout(self.up(x).sin(), 0.3)
        with torch.no_grad():
            self.count += 1
        if run == self.fails_in:
            raise KeyError("the user's own")
        return F.dropout(h.cos(), 0.3) * x


def nothing_is_left_behind() -> bool:
    return (
        _get_current_dispatch_mode() is None
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def square(device: str) -> tuple[Tensor, ...]:
    return (torch.randn(WIDTH, WIDTH),)


@pytest.mark.parametrize("way", ["full", "served rerun", "checkpoint", "reentrant"])
def test_error_in_recompute_leaves_generator_and_buffers_as_they_were(way: str) -> None:
    model = built_model(Program("fails", own_forward, block=lambda: Failing(2)), WAYS[way], blocks=1)
    out = model(*square("cpu"))
    before, count = torch.get_rng_state(), model.blocks[0].count.clone()
    with pytest.raises(KeyError, match="the user's own"):
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.blocks[0].count, count)
    assert nothing_is_left_behind()


@pytest.mark.parametrize("way", WAYS)
def test_error_in_forward_leaves_everything_usable(way: str) -> None:
    """The first call of a region kind is the one in which we learn: it may fail like any other."""
    model = built_model(Program("fails", own_forward, block=lambda: Failing(1)), WAYS[way], blocks=1)
    with pytest.raises(KeyError, match="the user's own"):
        model(*square("cpu"))
    assert nothing_is_left_behind()
    model.blocks[0].count.zero_()
    plain = built_model(Program("works", own_forward, block=Failing), NONE, blocks=1)
    assert_same(train(plain, make_input=square, steps=2), train(model, make_input=square, steps=2))


# -- A function that does another thing in recomputation than in forward is an error that says what


class Changing:
    """Runs `first`, and `then` from the second time on."""

    def __init__(self, first: Callable[..., Any], then: Callable[..., Any]) -> None:
        self.bodies = Noted(first, then)

    def __call__(self, h: Tensor) -> Any:
        body = self.bodies[0]
        del self.bodies[:-1]
        return body(h)


TO_THE_END = {"early_stop": False}
REENTRANT = {"use_reentrant": True}
CHANGES = [
    (TO_THE_END, torch.tanh, lambda h: h.tanh().tanh(), "it saved 2 tensors in recomputation, and 1 in forward"),
    (
        {},
        torch.tanh,
        lambda h: h[:2].tanh().repeat(2, 1),
        r"saved tensor 0 was float32\[4, 8\] in forward, but is float32\[2, 8\] in recomputation",
    ),
    (
        REENTRANT,
        torch.sin,
        lambda h: h.sin()[:2],
        r"result 0 was float32\[4, 8\] on cpu in forward and is float32\[2, 8\] on cpu in recomputation",
    ),
    (
        REENTRANT,
        torch.sin,
        Tensor.double,
        r"result 0 was float32\[4, 8\] on cpu in forward and is float64\[4, 8\] on cpu in recomputation",
    ),
    (REENTRANT, lambda h: (h.sin(), h.cos()), torch.sin, "it returned 2 tensors in forward and 1 in recomputation"),
]


@pytest.mark.parametrize(("options", "first", "then", "told"), CHANGES)
def test_another_thing_in_recomputation_is_an_error(
    options: dict[str, Any], first: Callable[..., Any], then: Callable[..., Any], told: str
) -> None:
    x, h = hidden(4, WIDTH)
    *_, out = torch.utils._pytree.tree_leaves(sac.checkpoint(Changing(first, then), h, **options))
    with pytest.raises(RegionError, match=rf"Changing: {told}.*\n    fix: "):
        out.sum().backward()
    assert x.grad is None


def test_determinism_check_none_does_not_compare() -> None:
    x, h = hidden(4, WIDTH)
    body = Changing(lambda h: h.tanh(), lambda h: h.double().tanh().float())
    sac.checkpoint(body, h, determinism_check="none").sum().backward()
    assert x.grad is not None
