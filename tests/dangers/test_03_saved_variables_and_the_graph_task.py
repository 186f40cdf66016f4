"""Danger 3: what autograd holds in place of a saved tensor, and when it reads it: never, too early, or inside a region.

How often backward may read is `tests/promises/test_05_backward_often.py`, what lives then is `test_07_no_leaks.py`.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.custom_ops import Luck, lucky
from tests.support.oracle import assert_exact, built_model, on_every_way
from tests.support.programs import WIDTH, Block, Program
from tests.support.recording import Recorder, without_collector
from tests.support.ways import NONE, WAYS

# in torch's frame: a value is unpacked once, gradients are taken outside
OF_TORCH = frozenset({"reentrant", "context_fn"})


# -- Reads outside of a backward


@pytest.mark.parametrize("way", [name for name in WAYS if name not in OF_TORCH])
def test_a_value_may_be_read_outside_of_a_backward_and_is_not_held_then(way: str) -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        return x.exp().sin()

    model = built_model(Program("body", body), WAYS[way], blocks=1)
    for _ in range(3):
        x, recorder = torch.randn(3, requires_grad=True), Recorder()
        expected = x.detach().exp()
        with without_collector(), recorder:
            out = model(x)
            exponential = out.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            for _ in range(2):
                assert torch.equal(out.grad_fn._saved_self, expected)  # type: ignore[union-attr]
                assert torch.equal(exponential._saved_result, expected)
            out.sum().backward()
            assert torch.equal(x.grad, expected.cos() * expected)  # type: ignore[arg-type]
            assert recorder.live_bytes(besides=(out, x.grad)) == 0


# -- Gradients that the region takes itself: recomputation goes up to the present point, and drops nothing


def gradient_of_its_own(block: Block, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(block.down(block.up(leaf).sin()).sum(), leaf)
    return block.up(x).sin() * force


def penalty_inside(block: Block, x: Tensor) -> Tensor:
    h = F.dropout(block.up(x).tanh(), 0.3)
    (slope,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
    return block.down(h) + slope.square().sum()


def gradients_at_two_points(block: Block, x: Tensor) -> Tensor:
    h = block.up(x).sin()
    (first,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
    z = block.down(h).sin()
    (second,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
    return block.up(z).sin() * first * second


INSIDE = [
    Program(body.__name__, body, not_under=OF_TORCH)
    for body in (gradient_of_its_own, penalty_inside, gradients_at_two_points)
]


@on_every_way(INSIDE)
def test_gradients_taken_inside_a_region(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


# -- The end of a recomputation


def expects_errors(block: Block, x: Tensor) -> Tensor:
    """Catches what a recomputation that stops early must not raise."""
    try:
        return block.down(block.up(x).sin().exp()).cos()
    except Exception:
        return x


def regions_inside(block: Block, x: Tensor) -> Tensor:
    """The end of an inner recomputation is not that of the outer one."""
    h = sac.checkpoint(lambda h: block.up(h).sin().cos(), x)
    h = checkpoint(lambda h: block.down(h).exp().sin(), h, use_reentrant=False)
    return block.up(h).tanh().sin()


ENDS = [Program(body.__name__, body) for body in (expects_errors, regions_inside)]


@on_every_way(ENDS)
def test_a_recomputation_stops_where_it_should(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


# -- Errors


def fails_without_luck(block: Block, x: Tensor) -> Tensor:
    return block.down(lucky(block.up(x).exp()).sin()).cos()


# What is offloaded is there before the error, and backward has freed the nodes that it has passed by then.
@pytest.mark.parametrize(
    ("way", "again"),
    [
        pytest.param(way, again, marks=() if way in ("full", "auto", "served rerun") else pytest.mark.slow)
        for way in WAYS
        for again in (False, True)
        if not again or way != "offload"
    ],
)
def test_an_error_in_recomputation_loses_nothing_and_holds_nothing(way: str, again: bool) -> None:
    program = Program("fails_without_luck", fails_without_luck)
    plain, ours = built_model(program, NONE, blocks=1), built_model(program, WAYS[way], blocks=1)
    for _ in range(3):
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        plain.zero_grad(), ours.zero_grad(), plain(x).sum().backward()
        expected, x.grad, recorder = x.grad, None, Recorder()
        with without_collector(), recorder:
            h = x * 1
            seen = weakref.ref(h)
            loss = ours(h).sum()
            del h
            Luck.left = False
            with pytest.raises(ValueError, match="luck"):
                loss.backward()
            Luck.left = True
            if again:
                loss.backward()
                assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
            del loss
        x.grad = None
        ours.zero_grad()
        assert seen() is None
        gc.collect()  # the traceback of the error holds frames of Python
        assert recorder.live_bytes() == 0
