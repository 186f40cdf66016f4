"""Errors around random states: what is no tracker, exceptions half-way, graphs that are captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from sac.errors import ConfigError
from tests.support.runs import Noted
from tests.support.trackers import MAKERS, draws, filled, leaf, states_of

SEVERAL = ("ours", "Megatron", "TransformerEngine, graph-safe")
ON_SEVERAL_TRACKERS = pytest.mark.parametrize("maker", [MAKERS[name] for name in SEVERAL], ids=SEVERAL)


# What is no tracker


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, "it returned None, which has no get_states() and set_states(states)"),
        ({"a": 1}, "it returned {'a': 1}, which has no get_states() and set_states(states)"),
    ],
)
def test_a_getter_that_returns_no_tracker_is_an_error_at_the_call(returned, found):
    x, ran = leaf(), []
    with pytest.raises(ConfigError) as error:
        sac.checkpoint(ran.append, x, get_rng_state_tracker=lambda: returned)
    assert str(error.value) == (
        f"get_rng_state_tracker: {found}\n"
        "    legal: a function that returns a tracker of named random states, such as sac.full.RngTracker"
    )
    assert not ran


class Strange:
    """A tracker with states of any sort."""

    def __init__(self, states: Any) -> None:
        self.states = states

    def get_states(self) -> Any:
        return self.states

    def set_states(self, states: Any) -> None:
        self.states = states


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (None, "get_states() of its tracker returned None\n    legal: a mapping of name to state"),
        ({"a": 7}, "the state of 'a' in its tracker is 7\n    legal: a tensor, or a torch.Generator"),
    ],
)
def test_a_tracker_without_states_is_an_error_at_the_call(states, text):
    with pytest.raises(ConfigError) as error:
        sac.checkpoint(torch.sin, leaf(), get_rng_state_tracker=lambda: Strange(states))
    assert str(error.value) == f"get_rng_state_tracker: {text}"


# Errors


class Failure(Exception):
    """Of the user's own."""


@ON_SEVERAL_TRACKERS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_exception_in_recomputation_leaves_no_state_rewound_and_backward_can_be_tried_again(maker, use_reentrant):
    """TransformerEngine and DeepSpeed leave every state as it was in forward."""
    tracker, fails = filled(maker), Noted()

    def failing(x: Tensor) -> Tensor:
        h = draws(tracker, x)
        with tracker.fork("expert-parallel-rng"):
            if fails:
                raise Failure
            return draws(tracker, h)

    x, y = leaf(), leaf()
    out = sac.checkpoint(failing, x, get_rng_state_tracker=lambda: tracker, use_reentrant=use_reentrant)
    torch.rand(7)
    before = states_of(tracker)
    fails.append(1)
    with pytest.raises(Failure):
        out.sum().backward()
    assert states_of(tracker) == before
    fails.clear()
    out.sum().backward()
    assert states_of(tracker) == before
    torch.manual_seed(0)
    tracker = filled(maker)
    failing(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
