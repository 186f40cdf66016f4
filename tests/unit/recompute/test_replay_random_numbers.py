"""A random op that runs again finds its generator as it stood; one that does not leaves it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.blocks import FunctionBlock, Stack, policy, save
from tests.support.custom_ops import noisy_scale
from tests.support.replay_programs import ON_EACH, assert_replayed, block_of, replay


def dead_draws(block: FunctionBlock, x: Tensor) -> Tensor:
    torch.rand(3)
    F.dropout(x, 0.5)
    h = F.dropout(x @ block.a, 0.3)
    F.dropout(h.detach(), 0.3)
    noise = torch.randn_like(h)
    return F.dropout(h.sin() * noise, 0.5) * h


def saved_draws_in_between(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout(x @ block.a, 0.3)
    mask = torch.bernoulli(torch.full_like(h, 0.6))
    h = F.dropout(h.sin() * mask, 0.5)
    return h * torch.rand_like(h) * F.dropout(x.cos(), 0.2)


def passed_generator(block: FunctionBlock, x: Tensor) -> Tensor:
    torch.rand(2, generator=block.generator)
    h = F.dropout((x @ block.a) * torch.rand(8, 8, generator=block.generator), 0.3)
    kept = torch.empty(8, 8).bernoulli_(0.5, generator=block.generator)
    return (h * kept).sin() * h


def generator_of_its_own(block: FunctionBlock, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(block.calls)
    first = torch.rand(8, 8, generator=generator)
    generator.manual_seed(5)
    return ((x @ block.a) * first).sin() * torch.rand(8, 8, generator=generator) * x


def seeded_inside(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout(x @ block.a, 0.3)
    torch.manual_seed(7)
    return F.dropout(h.sin(), 0.3) * h


def state_put_back_inside(block: FunctionBlock, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    h = F.dropout(x @ block.a, 0.3)
    torch.set_rng_state(state)
    return F.dropout(h.sin(), 0.3) * h


def forked_inside(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(block.calls)
        h = F.dropout(x @ block.a, 0.3)
    return F.dropout(h.sin(), 0.3) * h


def custom_op(block: FunctionBlock, x: Tensor) -> Tensor:
    first, _ = noisy_scale(x @ block.a, 0.4)
    noisy_scale(x, 0.4)
    second, _ = noisy_scale(first.sin(), 0.4)
    return F.dropout(second, 0.3) * first


BODIES: dict[str, Callable[[FunctionBlock, Tensor], Tensor]] = {
    function.__name__: function
    for function in (
        dead_draws,
        saved_draws_in_between,
        passed_generator,
        generator_of_its_own,
        seeded_inside,
        state_put_back_inside,
        forked_inside,
        custom_op,
    )
}
RANDOM = policy({**save("random"), "optional": True})


def holding_a_generator(body: Callable[[FunctionBlock, Tensor], Tensor]) -> Callable[[], Stack]:
    def build() -> Stack:
        model = block_of(body)()
        model.blocks[0].generator = torch.Generator().manual_seed(4)
        return model

    return build


def by_generator(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """What is drawn in between is not drawn from a generator that replay has moved."""
    loss.backward(retain_graph=True)
    between = torch.rand(3)
    loss.backward()
    return [between, torch.rand(3)]


@ON_EACH
@pytest.mark.parametrize("name", BODIES)
def test_replayed(name: str, chosen: dict[str, Any]) -> None:
    assert_replayed(holding_a_generator(BODIES[name]), replay(chosen), steps=3)


@pytest.mark.parametrize("name", BODIES)
def test_with_its_draws_saved(name: str) -> None:
    assert_replayed(holding_a_generator(BODIES[name]), replay(RANDOM), steps=3)


@pytest.mark.parametrize("name", BODIES)
def test_generators_are_where_they_were_after_a_replay(name: str) -> None:
    assert_replayed(holding_a_generator(BODIES[name]), replay(RANDOM), backward=by_generator)
