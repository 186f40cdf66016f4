"""Kernels that the dispatcher does not see: what they wrote is held, and no gradient is made from anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.blocks import FunctionBlock, policy, save, selective
from tests.support.replay_kernels import FromOutside, TanhInPlace, tanh_into, twice_in_place
from tests.support.replay_programs import (
    ON_EACH,
    assert_replayed,
    block_of,
    replay,
)
from tests.support.training import assert_same_training

FACTORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "full": lambda x: torch.full(x.shape, 3.0),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "a view of empty": lambda x: torch.empty(2, *x.shape)[1],
    "a view of zeros": lambda x: torch.zeros(2, *x.shape)[1],
    "a view of a view": lambda x: torch.zeros(2, x.numel()).view(2, *x.shape)[1],
}
ON_EACH_FACTORY = pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES.keys())


@ON_EACH
@ON_EACH_FACTORY
def test_fresh_memory_that_a_kernel_fills(make: Callable[[Tensor], Tensor], chosen: dict[str, Any]) -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return tanh_into(x @ block.a, make).sin() @ block.b

    assert_replayed(block_of(body), replay(chosen), steps=3)


@ON_EACH
@ON_EACH_FACTORY
@pytest.mark.parametrize(
    "after", [lambda out: out.add_(1), lambda out: out.view(-1)[3:].add_(1)], ids=["whole", "view"]
)
def test_an_op_goes_on_writing_where_a_kernel_wrote_first(
    after: Callable[[Tensor], Any], make: Callable[[Tensor], Tensor], chosen: dict[str, Any]
) -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return tanh_into(x @ block.a, make, after).sin()

    assert_replayed(block_of(body), replay(chosen))


@ON_EACH
def test_one_op_makes_zeros_that_stay_and_zeros_that_a_kernel_fills(chosen: dict[str, Any]) -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        first, second = torch.zeros(8, 8), x @ block.a
        h = second + first
        return (tanh_into(h, lambda x: torch.zeros(8, 8)) * h).sin()

    assert_replayed(block_of(body), replay(chosen))


IN_PLACE: dict[str, Callable[[FunctionBlock, Tensor], Tensor]] = {
    "at once": lambda block, h: twice_in_place(h).sin() @ block.b,
    "after an op that writes": lambda block, h: twice_in_place(h.add_(1)).sin() @ block.b,
    "before an op that writes": lambda block, h: twice_in_place(h).add_(1).sin() @ block.b,
    "twice": lambda block, h: twice_in_place(twice_in_place(h).mul_(0.5)).sin() @ block.b,
    "and it is saved": lambda block, h: TanhInPlace.apply(h) @ block.b,
    "and it is saved, after an op that writes": lambda block, h: TanhInPlace.apply(h.add_(1)) @ block.b,
}


@ON_EACH
@pytest.mark.parametrize("name", IN_PLACE)
def test_kernel_in_place_that_tells_autograd(name: str, chosen: dict[str, Any]) -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return IN_PLACE[name](block, x @ block.a)

    assert_replayed(block_of(body), replay(chosen))


@ON_EACH
def test_kernel_in_place_on_a_view(chosen: dict[str, Any]) -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a) * 1.5
        rows = h[2:4]
        twice_in_place(rows)
        return (h.sin() @ block.b) * rows.sum()

    assert_replayed(block_of(body), replay(chosen))


def read_before_and_after(block: FunctionBlock, x: Tensor) -> Tensor:
    """A product is read, doubled by a kernel, and read again: what was held of it is what was read last."""
    h = x @ block.a
    before = h * 1.5
    return before.sin() * twice_in_place(h).cos()


@pytest.mark.parametrize("name", IN_PLACE)
def test_rerun_does_not_serve_what_a_kernel_overwrote(name: str) -> None:
    """The engine that replay gives way to."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return IN_PLACE[name](block, x @ block.a)

    value = selective(policy(save("matmul")), engine="rerun")
    assert_same_training(block_of(body), value, make_input=lambda device: (torch.randn(8, 8),), steps=2)
    assert_same_training(block_of(read_before_and_after), value, make_input=lambda device: (torch.randn(8, 8),))


def kept_from_autograd(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    return twice_in_place(h, says_so=False).sin() @ block.b


def read_in_between(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    before = h * 1.5
    return before.sin() * twice_in_place(h, says_so=False).cos()


@ON_EACH
def test_tensor_that_no_op_made_and_that_backward_reads(chosen: dict[str, Any]) -> None:
    """Autograd has it, so it is there when it is read again."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return FromOutside.apply(x @ block.a).sin() @ block.b

    assert_replayed(block_of(body), replay(chosen))


@ON_EACH
def test_tensor_made_of_an_array_is_held(chosen: dict[str, Any]) -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = x @ block.a
        return (h + torch.from_numpy(h.detach().numpy() * 2)).sin() @ block.b

    assert_replayed(block_of(body), replay(chosen))
