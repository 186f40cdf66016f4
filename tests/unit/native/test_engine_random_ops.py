"""Ops that draw random numbers: in C++ if they draw from the default generator of the CPU, and the same ones again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sac
from tests.support.blocks import FULL, FunctionBlock, Stack, policy, save, selective, square
from tests.support.native_engine import assert_same_with_library, needs_library, recorded, with_library
from tests.support.replay_programs import POLICIES, applied, block_of, replay
from tests.support.training import Backward, assert_same, built, train

pytestmark = needs_library
ENGINES = {
    "replay": replay(POLICIES["matmuls"], "always"),
    "unverified": replay(POLICIES["nothing"], "never"),
    "alternate": replay(POLICIES["every second op"], "always"),
    "rerun": selective(policy(save("matmul")), engine="rerun"),
    "full": FULL,
}
ON_ENGINES = pytest.mark.parametrize("value", ENGINES.values(), ids=ENGINES.keys())


def drops(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout(x @ block.a, 0.3)
    return F.dropout(h.sin(), 0.5).cos() @ block.b


def drops_in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout((x @ block.a).sin() + 1, 0.3, inplace=True)
    return F.dropout(h * 2, 0.5, inplace=True) @ block.b


def fills(block: FunctionBlock, x: Tensor) -> Tensor:
    noise = torch.empty(8, 8).normal_() + torch.zeros(8, 8).uniform_(-1, 1) + torch.empty(8, 8).exponential_()
    noise = noise + torch.empty(8, 8).bernoulli_(torch.full((8, 8), 0.4)) + torch.empty(8, 8).random_(5)
    return (x @ block.a * noise).sin() @ block.b


def makes_noise(block: FunctionBlock, x: Tensor) -> Tensor:
    """From no tensor, or from one."""
    noise = torch.rand(8, 8) + torch.randn(8, 8, device="cpu") + torch.randint(3, (8, 8)) + torch.randperm(8)
    h = x @ block.a
    return (h * noise + torch.rand_like(h) + torch.normal(0.0, 1.0, (8, 8))).sin() @ block.b


def draws_again(block: FunctionBlock, x: Tensor) -> Tensor:
    """Into what autograd has saved a view of."""
    h = (x @ block.a).sin()
    mask = torch.empty_like(h).bernoulli_(0.5)
    first = h * mask
    return (first + h * mask.clone().bernoulli_(0.5)) @ block.b


def has_a_generator(block: FunctionBlock, x: Tensor) -> Tensor:
    if block.generator is None:
        block.generator = torch.Generator().manual_seed(3)
    mask = torch.empty(8, 8).bernoulli_(0.5, generator=block.generator)
    return F.dropout(x @ block.a * mask, 0.3).sin() @ block.b


def has_the_default_generator(block: FunctionBlock, x: Tensor) -> Tensor:
    mask = torch.empty(8, 8).bernoulli_(0.5, generator=torch.default_generator)
    return F.dropout(x @ block.a * mask, 0.3).sin() @ block.b


def draws_by_another_object(block: FunctionBlock, x: Tensor) -> Tensor:
    """Python has another object for the default generator that is passed. From the third call on it moves it, too."""
    h = (x @ block.a).sin()
    first = torch.empty(8, 8).bernoulli_(0.5)
    state = torch.get_rng_state()
    second = torch.empty(8, 8).uniform_(generator=torch.default_generator if block.calls > 2 else None)
    torch.set_rng_state(state)
    return (h * first * second * torch.empty(8, 8).uniform_()).cos() @ block.b


def seeds(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout(x @ block.a, 0.3)
    torch.manual_seed(block.calls)
    return F.dropout(h.sin(), 0.3) @ block.b


def puts_a_state_back(block: FunctionBlock, x: Tensor) -> Tensor:
    """Both masks are the same, and the third one is another."""
    state = torch.get_rng_state()
    h = F.dropout(x @ block.a, 0.3).sin()
    torch.set_rng_state(state)
    return F.dropout(F.dropout(h, 0.3).cos(), 0.3) @ block.b


def draws_at_times(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin()
    if block.calls % 3:
        h = F.dropout(h, 0.3).cos()
    if block.calls % 2:
        torch.rand(block.calls)  # nothing reads it
    return F.dropout(h, 0.0) @ block.b


def draws_last(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin() @ block.b
    return F.dropout(h, 0.3)


def draws_what_nothing_reads(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout((x @ block.a).sin(), 0.3)
    F.dropout(h.detach(), 0.5)
    return F.dropout(h.cos(), 0.3) @ block.b


def mixes_with_python(block: FunctionBlock, x: Tensor) -> Tensor:
    """An op that Python records draws between two that the library records."""
    h = F.dropout(x @ block.a, 0.3)
    block.seen.bernoulli_(0.5)
    return F.dropout(h.sin() * block.seen, 0.3) @ block.b


def attends(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout(x @ block.a, 0.3)
    h = F.scaled_dot_product_attention(h[None], h[None], x[None], dropout_p=0.4)[0]
    return F.dropout(h, 0.3) @ block.b


def halves(block: FunctionBlock, x: Tensor) -> Tensor:
    return (F.dropout((x @ block.a).half(), 0.3).float() + F.dropout((x @ block.a).double(), 0.3).float()) @ block.b


def strided(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout((x @ block.a).t(), 0.3)
    return F.dropout(h[:, ::2], 0.3).sum() * (h @ block.b)


BODIES = (
    *(drops, drops_in_place, fills, makes_noise, draws_again, has_a_generator, seeds, puts_a_state_back),
    *(draws_at_times, draws_last, draws_what_nothing_reads, mixes_with_python, attends, halves, strided),
)
ON_BODIES = pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
Body = Callable[[FunctionBlock, Tensor], Tensor]


def stack_of(body: Body) -> Callable[[], Stack]:
    def build() -> Stack:
        stack = Stack(FunctionBlock(body), FunctionBlock(body))
        for block in stack.blocks:
            block.register_buffer("seen", torch.zeros(8, 8))
        return stack

    return build


@ON_ENGINES
@ON_BODIES
def test_the_same_numbers_are_drawn_again(body: Body, value: dict[str, Any]) -> None:
    assert_same_with_library(stack_of(body), value, ops=None, steps=5)


@ON_ENGINES
@pytest.mark.parametrize("body", [has_the_default_generator, draws_by_another_object], ids=lambda body: body.__name__)
def test_the_default_generator_may_be_passed(body: Body, value: dict[str, Any]) -> None:
    build = stack_of(body)
    plain = train(built(build), steps=5, make_input=square)
    for native in (True, False):
        with with_library(native):
            assert_same(plain, train(applied(build, value), steps=5, make_input=square))


@ON_ENGINES
@pytest.mark.parametrize("body", [drops, fills, makes_noise, draws_what_nothing_reads], ids=lambda body: body.__name__)
def test_draws_of_the_default_generator_need_no_python(body: Body, value: dict[str, Any]) -> None:
    with with_library():
        model = applied(block_of(body), value)
        train(model, steps=3, make_input=square)
        with recorded() as seen:
            train(model, steps=2, make_input=square)
    assert seen.trips == []


def draws_between(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """Others draw between forward and backward, and between two backwards."""
    torch.rand(5)
    first = torch.autograd.grad(loss, [*inputs, *parameters], retain_graph=True, allow_unused=True)
    torch.rand(3)
    second = torch.autograd.grad(loss, [*inputs, *parameters], allow_unused=True)
    return [*first, *second, torch.get_rng_state()]


@ON_ENGINES
@pytest.mark.parametrize("body", [drops, mixes_with_python, seeds], ids=lambda body: body.__name__)
def test_what_others_draw_is_not_disturbed(body: Body, value: dict[str, Any]) -> None:
    backward: Backward = draws_between
    assert_same_with_library(stack_of(body), value, ops=None, steps=4, backward=backward)


@pytest.mark.parametrize("value", [ENGINES["replay"], ENGINES["rerun"]], ids=["replay", "rerun"])
def test_a_gradient_inside_of_the_region_draws_them_again(value: dict[str, Any]) -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = F.dropout((x @ block.a).sin(), 0.3)
        (inner,) = torch.autograd.grad(F.dropout(h.cos(), 0.3).sum(), [h], retain_graph=True)
        return F.dropout(h * inner, 0.3).cos() @ block.b

    assert_same_with_library(block_of(body), value, ops=None, steps=4)


def test_an_error_after_a_draw_leaves_nothing_behind() -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = F.dropout((x @ block.a).sin(), 0.3)
        if block.calls == 3:
            h = h @ torch.ones(3, 3)
        return F.dropout(h.cos(), 0.3) @ block.b

    def run(model: Stack) -> list[Tensor]:
        found = []
        for step in range(5):
            torch.manual_seed(step)
            x = torch.randn(8, 8)
            try:
                model(x).sum().backward()
            except RuntimeError:
                assert step == 2
            found += [torch.get_rng_state(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
        return found

    torch.manual_seed(0)
    plain = block_of(body)()
    for value in ENGINES.values():
        assert all(map(torch.equal, run(copy.deepcopy(plain)), run(sac.apply(copy.deepcopy(plain), value))))
