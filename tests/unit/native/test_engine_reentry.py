"""Python that runs in the middle of the library's work: finalizers, signal handlers, the collector, another thread."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.blocks import FunctionBlock, Stack
from tests.support.native_engine import needs_library, recorded, with_library
from tests.support.replay_programs import ON_EACH, applied, block_of, gradients, replay
from tests.support.training import assert_same, built

pytestmark = needs_library
OUTSIDE = [torch.linspace(0.5, 2, 64).view(8, 8) * scale for scale in (1, 2, 3)]


def steps(model: Stack, before: Callable[[int], None] = lambda step: None, count: int = 5) -> dict[str, Tensor]:
    """The gradients of some steps; `before` is called before each forward."""
    torch.manual_seed(0)
    seen = {}
    for step in range(count):
        model.zero_grad()
        x = torch.randn(8, 8, requires_grad=True)
        before(step)
        loss = model(x).square().sum()
        Garbage.is_collected = False
        loss.backward()
        seen |= {f"{step} {name}": one for name, one in gradients(model).items()} | {f"{step} x": x.grad}
    return seen


class Garbage:
    """A cycle whose collection runs ops and leaves another cycle."""

    is_collected = False
    count = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        if Garbage.is_collected:
            Garbage.count += 1
            torch.ones(8, 8).sin().cos()
            Garbage()


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """The collector runs whenever it may."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


def assert_same_beside_garbage(body: Any, chosen: dict[str, Any], *, least: int) -> None:
    """Gradients are those without us while the collector runs ops; the library has recorded ``least`` ops or more."""

    def collected(step: int) -> None:
        Garbage.is_collected = step > 1
        Garbage()

    expected = steps(built(block_of(body)))
    Garbage.count = 0
    with with_library(), recorded() as seen:
        assert_same(expected, steps(applied(block_of(body), replay(chosen)), collected))
    assert Garbage.count
    assert seen.ops[-1] >= least


@ON_EACH
def test_ops_of_the_collector(chosen: dict[str, Any], eager_collector: None) -> None:
    """They run while Python gives numbers to tensors from outside, of which the library has numbered some."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = x
        for index in range(3):
            h = (h @ block.a) * OUTSIDE[index]
            h = torch.addcmul(h, OUTSIDE[index - 1], h.sin()) @ block.b
        return h

    assert_same_beside_garbage(body, chosen, least=10)


@ON_EACH
def test_ops_of_the_collector_between_writes(chosen: dict[str, Any], eager_collector: None) -> None:
    """They run while the library makes Python's objects for factories, writes, kept and routed values."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).relu_()
        best, chosen = h.topk(2, 1)
        out = torch.zeros_like(h) * torch.full((8, 8), 2.0)
        for index in range(3):
            row, slot = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, row, h[row].sin() * best[row, slot].unsqueeze(-1))
            h = h * OUTSIDE[index]
            h.add_(out)
        return h.view(8, 8).sin().clamp_(max=0.9) @ block.b

    assert_same_beside_garbage(body, chosen, least=21)


@ON_EACH
def test_a_finalizer_under_which_autograd_saves(chosen: dict[str, Any]) -> None:
    """The library holds the last reference to a tensor that autograd has saved; freeing it saves others."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = x @ block.a
        for _ in range(3):
            h = h.sin()
            result = h.tanh()
            weakref.finalize(result, save_more, h, found)
            del result
            h = h + h.data
        return h @ block.b

    def save_more(held: Tensor, found: list[bool]) -> None:
        results = [held.sin() for _ in range(40)]
        found.append(all(one.requires_grad for one in results))

    found: list[bool] = []
    expected = steps(built(block_of(body)))
    with with_library(), recorded() as seen:
        assert_same(expected, steps(applied(block_of(body), replay(chosen))))
    assert found[-1]
    assert seen.ops[-1] > 5
