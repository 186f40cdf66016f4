"""Memory that a kernel fills, or NumPy writes to, where the dispatcher does not see it; and constants.

An allocation is not a constant, zeros need not stay zeros, and a saved result may be overwritten after it was read.
What a `torch.autograd.Function` writes is exact in every way. What Python writes between two ops is exact in every way
that runs Python again; where ops are replayed, the first step compares, and it is exact or reported.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sac
from sac.errors import SacError, SacWarning
from tests.support.blocks import selective
from tests.support.custom_ops import Wobble, wobble
from tests.support.oracle import assert_exact, assert_replayed_exactly, built_model, on_every_way, train_program
from tests.support.programs import WIDTH, Block, Program, programs
from tests.support.recording import without_collector
from tests.support.replay_kernels import at, tanh_into
from tests.support.training import assert_same
from tests.support.ways import POLICIES, SELECTIVE, WAYS, Way

REPLAYED = ("auto", "replay")
PYTHON_AGAIN = ("full", "checkpoint", "reentrant")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_needs_no_comparison_to_be_exact(policy: str) -> None:
    for program in programs("kernel"):
        if program.name != "autograd_is_not_told":  # only a comparison shows it
            assert_replayed_exactly(program, policy, blocks=1)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_kernel_wrote_to_is_not_served(policy: str) -> None:
    for program in programs("kernel"):
        assert_exact(program, "served rerun", policy, blocks=1)


# -- Allocations

FACTORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: torch.empty(x.shape),
    "a view of empty": lambda x: torch.empty(2, *x.shape)[1],
    "zeros": lambda x: torch.zeros(x.shape),
    "a view of a view of zeros": lambda x: torch.zeros(2, x.numel()).view(2, *x.shape)[1],
    "full": lambda x: torch.full(x.shape, 3.0),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "numbers": lambda x: torch.tensor([[0.0] * x.shape[1]] * x.shape[0]),
    "a range": lambda x: torch.arange(float(x.numel())).view(x.shape),
}
AFTER: dict[str, Callable[[Tensor], Any] | None] = {
    "nothing": None,
    "an op": lambda out: out.add_(1),
    "an op on a view": lambda out: out.view(-1)[3:].add_(1),
}


@pytest.mark.parametrize("way", ["full", *SELECTIVE])
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_kernel_fills_an_allocation_and_an_op_goes_on_writing(factory: str, way: str) -> None:
    for place, (name, after) in enumerate(AFTER.items()):

        def body(block: Block, x: Tensor, after: Any = after) -> Tensor:
            return block.down(tanh_into(block.up(x), FACTORIES[factory], after).sin())

        policy = [*POLICIES][place + (way == "replay")]
        if way == "replay":
            assert_replayed_exactly(Program(f"{factory}, then {name}", body), policy, blocks=1, steps=2)
        assert_exact(Program(f"{factory}, then {name}", body), way, policy, blocks=1, steps=2)


# -- What Python writes between two ops


def changed_product(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    before = h * 1.5
    h.detach().numpy()[0] += 1
    return before.sin() * h.cos()


def changed_numbers(block: Block, x: Tensor) -> Tensor:
    scale = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]] * WIDTH)
    values = at(scale)
    values *= 1.5
    return block.down((block.up(x) * scale).sin())


def changed_ones(block: Block, x: Tensor) -> Tensor:
    scale = torch.ones(WIDTH, WIDTH)
    h = block.up(x) + scale
    scale.numpy()[2] = block.calls + 1  # not what it was, so that the first step shows it
    return block.down((h * scale).sin())


def memory_filled_by_python(block: Block, x: Tensor) -> Tensor:
    out = torch.empty(WIDTH, WIDTH)
    at(out)[:] = 1.0 / (1 + block.calls)
    return block.down((block.up(x) + out).sin())  # autograd saves the sum alone


def order_of_rows_changed(block: Block, x: Tensor) -> Tensor:
    """A sum of all values would not show it."""
    mask = block.up(x).detach().abs()
    mask.numpy()[:] = mask.numpy()[::-1].copy()
    return block.down(block.up(x).sin() * mask)


def array_that_nothing_holds(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    return block.down((h + torch.from_dlpack(h.detach().numpy() * 2)).sin())


BETWEEN_OPS = [
    Program(body.__name__, body)
    for body in (
        changed_product,
        changed_numbers,
        changed_ones,
        memory_filled_by_python,
        order_of_rows_changed,
        array_that_nothing_holds,
    )
]


@on_every_way(BETWEEN_OPS, *PYTHON_AGAIN)
def test_what_python_writes_is_written_again_where_python_runs_again(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


@on_every_way(BETWEEN_OPS, *SELECTIVE)
def test_what_python_writes_is_never_silently_wrong(program: Program, way: str, policy: str) -> None:
    assert_exact_or_reported(program, WAYS[way], policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_python_fills_needs_no_comparison(policy: str) -> None:
    for body in (changed_numbers, memory_filled_by_python):
        assert_replayed_exactly(Program(body.__name__, body), policy)


def assert_exact_or_reported(program: Program, way: Way, policy: str = "nothing", **options: Any) -> None:
    """Hold that training is exact, or that an error or a warning of sac says that it may not be."""
    reference = train_program(program, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ours = train_program(program, way, policy, **options)
        except SacError:
            return
    if not any(issubclass(warning.category, SacWarning) for warning in caught):
        assert_same(reference, ours)


def reads_a_sign_that_is_not_a_tensor(block: Block, x: Tensor) -> Tensor:
    Wobble.sign = 1.0
    return block.down(wobble(block.up(x)).sin())


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("engine", REPLAYED)
def test_a_kernel_that_does_not_repeat_itself_is_reported(
    engine: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state changes before backward: in the first step, or in one whose forward looks like an earlier one."""
    monkeypatch.setattr(Wobble, "sign", 1.0)
    steps = iter(range(9))

    def backward(loss: Tensor, *_: Any) -> list[Tensor]:
        if next(steps) % 3 == step:
            Wobble.sign = -1e5
        loss.backward()
        return []

    value = selective(POLICIES["nothing"], engine=engine, verify="always")
    program = Program("wobbling", reads_a_sign_that_is_not_a_tensor)
    assert_exact_or_reported(program, Way(engine, lambda model, _: sac.apply(model, value)), backward=backward)


class CopiedInto(torch.autograd.Function):
    """An op copies memory that the kernel has allocated by itself into the argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        x.copy_(torch.from_numpy(x.detach().numpy() * 0.5))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5 + 0 * ctx.saved_tensors[0]


COPIED = Program("copied into", lambda block, x: block.down(CopiedInto.apply(block.up(x) * 2).tanh()).sin())


@on_every_way([COPIED])
def test_an_op_writes_what_a_kernel_has_made(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


# -- Nothing is held that backward does not read


@pytest.mark.parametrize("way", WAYS)
def test_memory_that_no_op_made_is_free_when_the_forward_ends(way: str) -> None:
    """If backward does not read it; and where Python runs again, as that makes it again, if recomputation reads it."""
    seen: list[weakref.ref[Any]] = []

    def outside() -> Tensor:
        made = torch.from_numpy(np.ones((WIDTH, WIDTH), np.float32))
        seen.append(weakref.ref(made.untyped_storage()))
        return made

    def body(block: Block, x: Tensor) -> Tensor:
        h = block.up(x).sin()
        if way in ("full", "checkpoint", "served rerun"):
            h = (h + outside()).cos()
        return block.down(h) + outside()

    model = built_model(Program("ends in an array", body), WAYS[way], "matmuls")
    for _ in range(3):
        seen.clear()
        with without_collector():
            out = model(torch.randn(WIDTH, WIDTH, requires_grad=True))
            assert not any(ref() is not None for ref in seen)
        out.sum().backward()
