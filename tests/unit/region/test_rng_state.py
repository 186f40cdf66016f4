"""What a region does to random states: as in forward for its recomputation, and then as they were found."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import sac
from sac.full import FullConfig
from tests.support.runs import Noted
from tests.support.stateful import StateOf
from tests.support.trackers import MAKERS, draws, filled, leaf, states_of

# Off


def test_without_preserving_nothing_is_put_back_and_no_tracker_is_asked():
    tracker = filled(MAKERS["ours"])
    x, y = leaf(), leaf()
    drawn = Noted()

    def drawing(x: Tensor) -> Tensor:
        with tracker.fork():
            drawn.append(torch.rand(3).tolist())
        drawn.append(torch.rand(3).tolist())
        return F.dropout(x.sin(), 0.5)

    def unasked() -> Any:
        raise AssertionError

    out = sac.checkpoint(drawing, x, get_rng_state_tracker=unasked, preserve_rng_state=False)
    out.sum().backward()
    torch.manual_seed(0)
    tracker = filled(MAKERS["ours"])
    expected, drawn = [*drawn], Noted()
    drawing(y)
    drawing(y)
    assert expected == drawn


# Generators that the caller names


def unseen_draw(generator: torch.Generator, x: Tensor) -> Tensor:
    """Numbers made of the generator's state, which no op is given."""
    state = generator.get_state()
    numbers = torch.sin(
        torch.arange(x.numel()) * 1.3 + float(state.double().dot(torch.arange(float(state.numel())).double()) % 97)
    )
    generator.manual_seed(int(state.long().sum()) + 1)
    return numbers.view(x.shape)


def test_a_generator_that_no_op_is_given_is_put_back_on_request():
    outcomes = []
    for region in (False, True):
        generator = torch.Generator().manual_seed(3)
        config = FullConfig(state=(StateOf(generator),))
        function = functools.partial(lambda g, x: (x * unseen_draw(g, x)).sin(), generator)
        x = leaf()
        for _ in range(3):  # the later calls enter no dispatch mode
            out = sac.checkpoint(function, x, config=config) if region else function(x)
            generator.manual_seed(int(generator.initial_seed()) + 5)
            before = generator.get_state()
            out.sum().backward()
            assert torch.equal(generator.get_state(), before)
        outcomes.append(x.grad)
    assert torch.equal(*outcomes)


# What trackers do


def test_the_getter_is_asked_anew_for_the_recomputation():
    """Backward may run on another thread, and a getter may know one tracker per thread."""
    used = Noted(filled(MAKERS["ours"]))
    x, y = leaf(), leaf()
    out = sac.checkpoint(lambda x: draws(used[0], x), x, get_rng_state_tracker=lambda: used[0])
    used[0] = filled(MAKERS["ours"])
    with used[0].fork():
        torch.rand(5)
    before = states_of(used[0])
    out.sum().backward()
    assert states_of(used[0]) == before
    torch.manual_seed(0)
    draws(filled(MAKERS["ours"]), y).sum().backward()
    assert torch.equal(x.grad, y.grad)
