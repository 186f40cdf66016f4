"""Megatron-Core's activation checkpointing: its functions and trackers, and what its own tests of them hold."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sac.compat import megatron
from sac.compat import megatron as megatron_job
from sac.errors import ConfigError
from sac.full import RngTracker
from tests.support.ranks import run_ranks
from tests.support.training import assert_same
from tests.unit.compat.programs import WIDTH, forking, gradients_of, plainly, same_everywhere, trained

RANDOM = "megatron.core.tensor_parallel.random"
STATE = "megatron.core.parallel_state"


@pytest.fixture(autouse=True)
def _nothing_was_said_before(monkeypatch):
    monkeypatch.setattr(megatron_job, "_job", megatron_job._Job())


def whole(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call Megatron's `checkpoint`, which has no keywords for the function."""
    return megatron.checkpoint(lambda *inputs: function(*inputs, **kwargs), False, *args)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_gradients_are_those_of_the_plain_call(needs_grad):
    assert_same(trained(plainly, needs_grad=needs_grad), trained(whole, needs_grad=needs_grad))


def test_the_tracker_is_put_back_without_being_named():
    assert_same(forking(plainly, RngTracker()), forking(whole, megatron.get_cuda_rng_tracker()))


def test_arguments_that_are_no_tensors():
    """Megatron takes None and nothing else."""
    x = torch.ones(2, requires_grad=True)
    out = megatron.checkpoint(lambda h, none, two, parts: h * two + parts["b"][0], False, x, None, 2, {"b": [x]})
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize("scatters", [False, None])
def test_two_arguments_without_scattering(scatters):
    a, b = torch.ones(4, 4, requires_grad=True), torch.full((4, 4), 2.0)
    out = megatron.checkpoint(lambda one, two: one + two, scatters, a, b)
    assert torch.equal(out, torch.full((4, 4), 3.0))
    out.backward(torch.ones(4, 4))
    assert torch.equal(a.grad, torch.ones(4, 4))


def scattering() -> tuple[tuple[int, ...], bool, Tensor, tuple[int, ...]]:
    """Megatron's own test of `checkpoint` on two ranks; the caller's tensor stays whole here."""
    megatron.set_tensor_model_parallel_group(dist.group.WORLD)
    first, second = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    out = megatron.checkpoint(lambda a, b: (a + b).exp(), True, first, second)
    during = tuple(first.data.shape)
    is_right = torch.equal(out, torch.full((4, 4), 2.0).exp())
    out.backward(torch.ones(4, 4))
    return during, is_right, first.grad, tuple(first.data.shape)


def test_two_arguments_of_which_the_first_is_scattered():
    for during, is_right, grad, after in run_ranks(2, scattering):
        assert (during, is_right, after) == ((4, 4), True, (4, 4))
        assert torch.equal(grad, torch.full((4, 4), 2.0).exp())


def scattered_where_megatron_is_wrong() -> list[list[str]]:
    """A residual around the region, a number of elements that the ranks cannot share, a view, one input in two."""
    megatron.set_tensor_model_parallel_group(dist.group.WORLD)

    def residual(call: Any) -> dict[str, Tensor]:
        linear, x = seeded_linear(), torch.randn(3, WIDTH, requires_grad=True)
        h = x * 2
        return gradients_of((h + call(lambda t: linear(t).tanh(), h)).square().sum(), x, linear)

    def odd_number(call: Any) -> dict[str, Tensor]:
        seeded_linear()
        x = torch.randn(7, requires_grad=True)
        return gradients_of(call(torch.exp, x * 2).sum(), x)

    def view(call: Any) -> dict[str, Tensor]:
        linear, x = seeded_linear(), torch.randn(WIDTH, 6, requires_grad=True)
        return gradients_of(call(lambda t: linear(t).tanh(), (x * 2).t()[1:]).square().sum(), x, linear)

    def twice(call: Any) -> dict[str, Tensor]:
        linear, x = seeded_linear(), torch.randn(4, WIDTH, requires_grad=True)
        h = x * 2
        one, two = call(lambda t: linear(t).exp(), h), call(lambda t: linear(t).tanh(), h)
        return gradients_of((one * two).sum(), x, linear)

    def scatters(function: Any, *args: Any) -> Any:
        return megatron.checkpoint(function, True, *args)

    return [same_everywhere(program(plainly), program(scatters)) for program in (residual, odd_number, view, twice)]


def seeded_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def test_scattering_where_megatron_is_wrong_or_fails():
    assert run_ranks(2, scattered_where_megatron_is_wrong) == [[[], [], [], []]] * 2


def test_scattering_without_a_group_is_an_error():
    with pytest.raises(
        ConfigError, match="there is no tensor-parallel group to scatter over\n    fix: call set_tensor_"
    ):
        megatron.checkpoint(torch.exp, True, torch.ones(2))


def test_a_forgotten_flag_is_an_error():
    with pytest.raises(ConfigError, match=r"checkpoint\.distribute_saved_activations: a Tensor is not true or false"):
        megatron.checkpoint(torch.exp, torch.ones(2))


def test_a_wrong_group_is_an_error_when_it_is_set():
    with pytest.raises(ConfigError, match=r"^megatron\.set_tensor_model_parallel_group"):
        megatron.set_tensor_model_parallel_group("tp")
    megatron.set_tensor_model_parallel_group(None)


def test_without_grad_mode_it_is_the_plain_call():
    with torch.no_grad():
        assert torch.equal(megatron.checkpoint(torch.exp, True, torch.zeros(2)), torch.ones(2))


def test_fp8_in_an_unknown_version_of_transformer_engine_is_refused(monkeypatch):
    state = type("Manager", (), {"is_fp8_enabled": staticmethod(lambda: True)})
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", SimpleNamespace(FP8GlobalStateManager=state))
    for call in (lambda x: megatron.checkpoint(torch.exp, False, x), checkpoint_without_output):
        with pytest.raises(ConfigError, match="FP8 is on around the region"):
            call(torch.ones(2))


def checkpoint_without_output(x: Tensor) -> Tensor:
    return megatron.CheckpointWithoutOutput().checkpoint(torch.exp, x)


# Megatron loaded together with sac


def megatrons_group() -> tuple[int, bool]:
    megatron.set_tensor_model_parallel_group(None)  # the rank is the one of earlier tests
    group = dist.new_group([0, 1])
    asked = []

    def answer() -> Any:
        asked.append(1)
        return group

    sys.modules[STATE] = SimpleNamespace(get_tensor_model_parallel_group=answer)
    try:
        x = torch.randn(5, generator=torch.Generator().manual_seed(0)).requires_grad_()
        megatron.checkpoint(lambda h: h.exp().exp(), True, x).sum().backward()
    finally:
        del sys.modules[STATE]
    (expected,) = torch.autograd.grad(x.exp().exp().sum(), x)
    return len(asked), torch.equal(x.grad, expected)


def test_megatrons_own_group_is_taken():
    assert run_ranks(2, megatrons_group) == [(1, True)] * 2


def test_a_parallel_state_that_is_not_initialised_is_none(monkeypatch):
    def answer() -> Any:
        raise AssertionError("tensor model parallel group is not initialized")

    monkeypatch.setitem(sys.modules, STATE, SimpleNamespace(get_tensor_model_parallel_group=answer))
    with pytest.raises(ConfigError, match="no tensor-parallel group to scatter over"):
        megatron.checkpoint(torch.exp, True, torch.ones(2))


def test_megatrons_own_tracker_is_put_back(monkeypatch):
    theirs = RngTracker()
    asked: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(get_cuda_rng_tracker=lambda *flags: asked.append(flags) or theirs)
    monkeypatch.setitem(sys.modules, RANDOM, fake)
    assert megatron.get_cuda_rng_tracker() is theirs
    assert_same(forking(plainly, RngTracker()), forking(whole, theirs))
    assert set(asked) == {(False, False, False)}


def test_megatron_seeds_its_own_tracker(monkeypatch):
    asked = []
    fake = SimpleNamespace(model_parallel_cuda_manual_seed=lambda *args, **kwargs: asked.append((args, kwargs)))
    monkeypatch.setitem(sys.modules, RANDOM, fake)
    megatron.model_parallel_cuda_manual_seed(3, tp_rank=1, force_reset_rng=True)
    ranks = {"tp_rank": 1, "ep_rank": None, "etp_rank": None, "force_reset_rng": True}
    assert asked == [((3, False, False, False), ranks)]


# Trackers and seeds


def test_a_tracker_gives_back_what_was_set():
    tracker = megatron.CudaRNGStatesTracker()
    assert not tracker.is_initialized()
    tracker.add("state1", 1234)
    assert tracker.is_initialized()
    torch.manual_seed(1234)
    assert torch.equal(tracker.get_states()["state1"], torch.get_rng_state())
    states = tracker.get_states()
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.set_states(states)
    assert torch.equal(tracker.get_states()["state1"], states["state1"])


def test_seeds_are_those_of_megatrons_formula():
    megatron.model_parallel_cuda_manual_seed(5, tp_rank=3, ep_rank=2, etp_rank=1)
    tracker = megatron.get_cuda_rng_tracker()
    seeds = {
        megatron.get_data_parallel_rng_tracker_name(): 5,
        "model-parallel-rng": 5 + 2718 + 3,
        megatron.get_expert_parallel_rng_tracker_name(): 5 + 1024 + 200 + 1,
    }
    assert tracker.names == tuple(seeds)
    assert torch.initial_seed() == 5
    for name, seed in seeds.items():
        assert torch.equal(tracker.get_states()[name], torch.Generator().manual_seed(seed).get_state())
    megatron.model_parallel_cuda_manual_seed(5, tp_rank=3, ep_rank=2, etp_rank=1)  # again: the tracker is reset
    assert megatron.get_cuda_rng_tracker() is tracker
    megatron.model_parallel_cuda_manual_seed(5, tp_rank=3, force_reset_rng=True)
    assert megatron.get_cuda_rng_tracker() is not tracker


def seeds_of_the_group() -> tuple[Tensor, Tensor]:
    megatron.set_tensor_model_parallel_group(dist.group.WORLD)
    megatron.model_parallel_cuda_manual_seed(11)
    states = megatron.get_cuda_rng_tracker().get_states()
    return states["model-parallel-rng"], states["expert-parallel-rng"]


def test_ranks_are_those_in_the_group_that_was_set():
    for rank, (model, expert) in enumerate(run_ranks(2, seeds_of_the_group)):
        assert torch.equal(model, torch.Generator().manual_seed(11 + 2718 + rank).get_state())
        assert torch.equal(expert, torch.Generator().manual_seed(11 + 1024 + rank).get_state())


def test_seeding_without_a_known_rank_is_an_error():
    with pytest.raises(
        ConfigError, match=r"tp_rank: the rank in the tensor-parallel group is not known\n    fix: pass"
    ):
        megatron.model_parallel_cuda_manual_seed(5)


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda: megatron.get_cuda_rng_tracker(use_te_rng_tracker=True), "get_cuda_rng_tracker.use_te_rng_tracker"),
        (
            lambda: megatron.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, tp_rank=0),
            "model_parallel_cuda_manual_seed.inference_rng_tracker",
        ),
        (
            lambda: megatron.CudaRNGStatesTracker(use_cudagraphable_rng=True),
            "CudaRNGStatesTracker.use_cudagraphable_rng",
        ),
    ],
)
def test_other_sorts_of_trackers_are_refused(call, where):
    with pytest.raises(
        ConfigError, match=f"megatron.{where}: this type of tracker belongs to Megatron\n    fix: leave"
    ):
        call()
