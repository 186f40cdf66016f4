"""Danger 2: autocast, and its cache of the casts of weights, in which a region may find what an earlier one cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.blocks import Stack
from tests.support.custom_ops import Luck, lucky
from tests.support.oracle import assert_exact, assert_same_results, built_model, on_every_way
from tests.support.pairs import in_pairs
from tests.support.programs import CATALOGUE, WIDTH, Block, Program
from tests.support.recording import Recorder, without_collector
from tests.support.training import gradients
from tests.support.ways import POLICIES, WAYS

BF16, FP16 = torch.bfloat16, torch.float16
Surrounding = Callable[[], AbstractContextManager[Any]]


def cast(dtype: torch.dtype = BF16, **options: Any) -> Surrounding:
    return lambda: torch.autocast("cpu", dtype, **options)


# -- Casts that an earlier region made


def one_weight_several_times(block: Block, x: Tensor) -> Tensor:
    return block.down((F.linear(x, block.up.weight).sin() @ block.up.weight).cos())


# a reentrant region has a graph of its own, in which each region's gradients of the shared cast are summed separately
SHARED = Program("one_weight_several_times", one_weight_several_times, not_under=frozenset({"reentrant"}))
TWO_PRODUCTS = CATALOGUE["two_products"]


def micro_batches_in_one_autocast(model: Stack) -> dict[str, Tensor]:
    """The second region, and the second micro-batch, find weights cast; a recomputation after autocast does not."""
    model.blocks[1].up, seen = model.blocks[0].up, {}
    for step in range(2):
        with torch.autocast("cpu", BF16):
            losses = [model(torch.randn(WIDTH, WIDTH)).float().square().sum() for _ in range(2)]
        torch.stack(losses).sum().backward()
        seen |= {f"{step} {name}": gradient for name, gradient in gradients(model).items()}
    return seen


def backward_inside_the_autocast(model: Stack) -> dict[str, Tensor]:
    """The casts of the first micro-batch still wait when the second one's forward runs."""
    with torch.autocast("cpu", BF16):
        for _ in range(2):
            model(torch.randn(WIDTH, WIDTH)).float().square().sum().backward()
    return gradients(model)


def optimizer_step_between(model: Stack) -> dict[str, Tensor]:
    """A cast made in recomputation must not reach the next step's forward."""
    seen = {}
    for step in range(3):
        with torch.autocast("cpu", BF16):
            loss = model(torch.randn(WIDTH, WIDTH)).float().square().sum()
        loss.backward()
        seen |= {f"{step} {name}": gradient for name, gradient in gradients(model).items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    return seen


@pytest.mark.parametrize("run", [micro_batches_in_one_autocast, backward_inside_the_autocast, optimizer_step_between])
@on_every_way([SHARED])
def test_casts_of_earlier_regions_are_found_again(program: Program, way: str, policy: str, run: Any) -> None:
    assert_same_results(run, program, way, policy)


@pytest.mark.parametrize("way", ["full", "auto", "replay", "served rerun", "checkpoint"])
def test_no_cast_of_a_weight_waits_for_backward(way: str) -> None:
    """Only inputs of regions do: what a cast is made of is a parameter, whichever region made it."""
    model, matrix = built_model(SHARED, WAYS[way]), WIDTH * WIDTH
    model.blocks[1].up = model.blocks[0].up
    for _ in range(3):
        recorder = Recorder()
        with recorder, without_collector():
            with torch.autocast("cpu", BF16):
                x = torch.randn(WIDTH, WIDTH, requires_grad=True)
                out = model(x)
            assert recorder.live_bytes(besides=(out, x)) <= 2 * matrix  # the second region's input
        out.float().sum().backward()


@contextmanager
def autocast_without_end(dtype: torch.dtype) -> Iterator[None]:
    """Autocast that is switched on by hand and does not clear its cache at its end."""
    torch.set_autocast_enabled("cpu", True), torch.set_autocast_dtype("cpu", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", False), torch.set_autocast_dtype("cpu", BF16)


@pytest.mark.parametrize("way", WAYS)
def test_casts_made_in_recomputation_do_not_outlive_it(way: str) -> None:
    """The cache would give the next step's forward the weights of this one."""
    model = built_model(TWO_PRODUCTS, WAYS[way])
    for _ in range(2):
        with torch.autocast("cpu", BF16):
            out = model(torch.ones(WIDTH, WIDTH, requires_grad=True))
        out.float().sum().backward()
    weight, x = model.blocks[0].up.weight, torch.ones(WIDTH, WIDTH)
    with torch.no_grad():
        weight.fill_(2.0)
    with autocast_without_end(BF16):
        assert (F.linear(x, weight) == 2 * WIDTH).all()
    torch.clear_autocast_cache()


# -- The autocast of the forward, whatever backward runs under


@contextmanager
def nested(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


SURROUNDINGS: dict[str, Surrounding] = {
    "off": nullcontext,
    "bf16": cast(BF16),
    "fp16": cast(FP16),
    "no cache": cast(BF16, cache_enabled=False),
    "disabled": cast(BF16, enabled=False),
    "disabled in bf16": lambda: nested(cast(BF16)(), cast(BF16, enabled=False)()),
    "disabled in fp16": lambda: nested(cast(FP16)(), cast(FP16, enabled=False)()),
    "fp16 in bf16": lambda: nested(cast(BF16)(), cast(FP16)()),
    "enabled in disabled": lambda: nested(cast(BF16, enabled=False)(), cast(FP16)()),
}


def switches_inside(block: Block, x: Tensor) -> Tensor:
    h = block.up(x.float()).sin()
    with torch.autocast("cpu", enabled=False):
        h = F.linear(h.float(), block.down.weight)
    with torch.autocast("cpu"):  # with the dtype that surrounds the region
        return block.up(h.cos()).sigmoid() @ block.down.weight.tanh()


def under(forward: Surrounding, backward: Surrounding, model: Stack) -> dict[str, Tensor]:
    for _ in range(3):
        with forward():
            loss = model(torch.randn(WIDTH, WIDTH, requires_grad=True)).float().square().sum()
        with backward():
            loss.backward()
    return gradients(model)


@in_pairs(forward=SURROUNDINGS.keys(), backward=["off", "bf16", "fp16"], way=WAYS.keys())
def test_recomputation_runs_under_the_autocast_of_the_forward(forward: str, backward: str, way: str) -> None:
    """A replay runs below autocast, the casts being on the tape; a rerun under that of the forward."""
    program = Program("switches_inside", switches_inside)
    assert_same_results(partial(under, SURROUNDINGS[forward], SURROUNDINGS[backward]), program, way, "matmuls")


def autocast_now() -> tuple[Any, ...]:
    """The state and the depth of autocast on this thread."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return (
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(), depth
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backward", ["off", "fp16"])
def test_autocast_is_as_before_after_backward_and_after_an_error(backward: str, way: str) -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        return block.down(lucky(block.up(x)).sin()).cos()

    model = built_model(Program("body", body), WAYS[way])
    for has_luck in (True, False, True):
        with torch.autocast("cpu", BF16):
            out = model(torch.randn(WIDTH, WIDTH, requires_grad=True))
        with SURROUNDINGS[backward]():
            before, Luck.left = autocast_now(), has_luck
            try:
                out.float().sum().backward()
            except ValueError:
                assert not has_luck
            finally:
                Luck.left = True
            assert autocast_now() == before


# -- Bodies of custom ops, in which a dispatch mode turns autocast off


@torch.library.custom_op("sactest::product_in_autocast", mutates_args=())
def product_in_autocast(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).float() if x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu") else (x @ w) * 2


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return grad.float() @ w.float().T, x.float().T @ grad.float()


product_in_autocast.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def custom_product(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return product_in_autocast(x, block.up.weight).float().sin() * x


def custom_product_switched_off(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16), torch.autocast("cpu", enabled=False):
        return product_in_autocast(x, block.up.weight).float().sin() * x


CUSTOM = [Program(body.__name__, body) for body in (custom_product, custom_product_switched_off)]


@pytest.mark.parametrize(
    ("way", "policy"), [(way, policy) for way in WAYS for policy in (POLICIES if WAYS[way].policies else ["nothing"])]
)
@pytest.mark.parametrize("program", CUSTOM, ids=str)
def test_the_body_of_a_custom_op_sees_the_autocast_of_its_caller(program: Program, way: str, policy: str) -> None:
    """In the forward and in a replay, which leaves no cast in the cache for the next step's forward."""
    assert_exact(program, way, policy)
