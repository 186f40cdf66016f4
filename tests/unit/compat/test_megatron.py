"""Megatron-Core's activation checkpointing: its functions and trackers, and what its own tests of them hold."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sac.compat import megatron
from sac.errors import ConfigError
from sac.rng_tracker import RngTracker, process_tracker
from tests.support.ranks import run_ranks
from tests.support.stored_regions import plainly
from tests.support.training import assert_same
from tests.unit.compat.programs import forking, trained, unequal_in_a_residual

RANDOM = "megatron.core.tensor_parallel.random"
STATE = "megatron.core.parallel_state"


@pytest.fixture(autouse=True)
def _nothing_was_said_before():
    process_tracker.cache_clear()


def whole(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call Megatron's `checkpoint`, which has no keywords for the function."""
    return megatron.checkpoint(lambda *inputs: function(*inputs, **kwargs), False, *args)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_gradients_are_those_of_the_plain_call(needs_grad):
    assert_same(trained(plainly, needs_grad=needs_grad), trained(whole, needs_grad=needs_grad))


def test_the_tracker_is_put_back_whose_ever_it_is(monkeypatch):
    assert_same(forking(plainly, RngTracker()), forking(whole, megatron.get_cuda_rng_tracker()))
    theirs = RngTracker()
    asked: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(get_cuda_rng_tracker=lambda *flags: asked.append(flags) or theirs)
    monkeypatch.setitem(sys.modules, RANDOM, fake)
    assert megatron.get_cuda_rng_tracker() is theirs
    assert_same(forking(plainly, RngTracker()), forking(whole, theirs))
    assert set(asked) == {()}


def scattering(function: Any, *args: Any) -> Any:
    return megatron.checkpoint(function, True, *args)


def megatrons_group() -> bool:
    group = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            sys.modules, STATE, SimpleNamespace(get_tensor_model_parallel_group=lambda check_initialized: group)
        )
        return unequal_in_a_residual(scattering) == []


def test_scattering_over_megatrons_group_where_megatron_is_wrong():
    assert run_ranks(2, megatrons_group) == [True] * 2


def test_megatron_seeds_its_own_tracker(monkeypatch):
    asked = []
    fake = SimpleNamespace(model_parallel_cuda_manual_seed=lambda *args, **kwargs: asked.append((args, kwargs)))
    monkeypatch.setitem(sys.modules, RANDOM, fake)
    megatron.model_parallel_cuda_manual_seed(3, tp_rank=1, force_reset_rng=True)
    assert asked == [((3,), {"tp_rank": 1, "force_reset_rng": True})]


def test_seeds_without_megatron():
    megatron.model_parallel_cuda_manual_seed(11, tp_rank=3)
    states = megatron.get_cuda_rng_tracker().get_states()
    for name, seed in (("model-parallel-rng", 11 + 2718 + 3), ("expert-parallel-rng", 11 + 1024 + 3)):
        assert torch.equal(states[name], torch.Generator().manual_seed(seed).get_state())


def before_megatron_is_initialised() -> None:
    def answer(*, check_initialized: bool) -> None:
        assert not check_initialized, "tensor model parallel group is not initialized"

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, STATE, SimpleNamespace(get_tensor_model_parallel_group=answer))
        megatron.checkpoint(torch.exp, True, torch.ones(2))


FAILS: dict[str, Any] = {  # what is told, and the call
    r"there is no group to scatter them over\n": before_megatron_is_initialised,
    r"distribute_saved_activations is a value of type Tensor\n    legal: true, false": lambda: megatron.checkpoint(
        torch.exp, torch.ones(2)
    ),
    r"tp_rank: None is not a rank\n    legal: a whole": lambda: megatron.model_parallel_cuda_manual_seed(5),
    r"this type of tracker belongs to Megatron\n    fix: leave": lambda: megatron.get_cuda_rng_tracker(True),
}


@pytest.mark.parametrize("text", FAILS)
def test_what_is_refused(text):
    with pytest.raises(ConfigError, match=text):
        FAILS[text]()
