"""`RngTracker`: named streams on one device, without what goes wrong in TransformerEngine, Megatron and DeepSpeed."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sac.errors import ConfigError
from sac.full import RngTracker, seed_model_parallel


def two_streams() -> RngTracker:
    made = RngTracker("cpu")
    made.add("a", 1)
    made.add("b", 2)
    return made


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args, **kwargs)
    return str(error.value)


@pytest.fixture
def tracker() -> RngTracker:
    return two_streams()


@pytest.mark.parametrize("seed", [0, 1234, -1, -(2**63), 2**63, 2**64 - 1, torch.tensor(7)])
def test_a_stream_begins_as_after_manual_seed(seed):
    tracker = RngTracker("cpu")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tracker.add("a", seed)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(int(seed))
    assert torch.equal(tracker.get_states()["a"], torch.get_rng_state())
    assert tracker.names == ("a",)


@pytest.mark.parametrize(
    ("name", "seed", "text"),
    [
        ("a", 3, "'a' was added before\n    fix: give each stream a name of its own"),
        ("c", 2, "seed 2 belongs to another stream\n    fix: give 'c' a seed of its own, or it draws the same numbers"),
        ("c", 2**64 - 4, "seed 18446744073709551612 belongs to another stream"),
        *(("c", seed, f"{seed!r} is not a seed\n    legal: a whole number from") for seed in ("7", 7.0, 2**64)),
    ],
)
def test_what_cannot_be_added_burns_nothing(tracker, name, seed, text):
    """In TransformerEngine, Megatron and DeepSpeed the seed is taken from then on."""
    tracker.add("minus four", -4)
    assert refusal(tracker.add, name, seed).startswith(f"RngTracker.add: {text}")
    tracker.add("c", 3)
    assert tracker.names == ("a", "b", "minus four", "c")


def test_an_unknown_name_is_refused():
    tracker = RngTracker("cpu")
    assert "'model-parallel-rng' was not added\n    legal: none: no stream was added" in refusal(
        tracker.fork().__enter__
    )
    tracker.add("model-parallel-rng", 1)
    tracker.add("expert-parallel-rng", 2)
    assert refusal(tracker.fork("modelparallel-rng").__enter__) == (
        "RngTracker.fork: 'modelparallel-rng' was not added\n"
        "    did you mean: model-parallel-rng\n"
        "    legal: model-parallel-rng, expert-parallel-rng\n"
        "    fix: add(name, seed) it first"
    )


NAMES = ("a", "b", "c")
STEPS = st.lists(st.one_of(st.sampled_from(NAMES), st.just("draw"), st.just("end"), st.just("fail")), max_size=40)


@given(STEPS)
def test_each_stream_is_drawn_in_order_however_forks_nest(steps):
    seeds = {"a": 1, "b": 2, "c": 3, "": 9}
    tracker = RngTracker("cpu")
    for name in NAMES:
        tracker.add(name, seeds[name])
    expected = {name: torch.Generator().manual_seed(seed) for name, seed in seeds.items()}
    torch.manual_seed(seeds[""])
    forks: list[tuple[str, contextlib.AbstractContextManager[None]]] = []

    def check() -> None:
        current = forks[-1][0] if forks else ""
        assert torch.equal(torch.rand(2), torch.rand(2, generator=expected[current]))

    for step in steps:
        if step in NAMES:
            fork = tracker.fork(step)
            fork.__enter__()
            forks.append((step, fork))
        elif step in ("end", "fail") and forks:
            error = ValueError() if step == "fail" else None
            fork = forks.pop()[1]
            assert not fork.__exit__(type(error) if error else None, error, None)
        check()
    while forks:
        forks.pop()[1].__exit__(None, None, None)
    check()
    states = tracker.get_states()
    assert all(torch.equal(states[name], expected[name].get_state()) for name in NAMES)


# -- States, copies, and the device


def test_states_are_copies_that_can_be_put_back(tracker):
    states = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
    tracker.set_states(states)
    states["a"].zero_()
    assert torch.equal(tracker.get_states()["a"], torch.Generator().manual_seed(1).get_state())
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)
    tracker.set_states({"b": states["b"]})
    assert tracker.names == ("b",)
    assert "seed 1 belongs" in refusal(tracker.add, "a", 1)


def test_reset_forgets_names_and_seeds_but_not_inside_a_fork(tracker):
    with tracker.fork("a"):
        assert refusal(tracker.reset) == "RngTracker.reset: 'a' is in use\n    fix: call it outside of every fork"
    assert tracker.names == ("a", "b")
    tracker.reset()
    assert tracker.names == ()
    tracker.add("a", 1)


def test_its_device_is_the_accelerator_or_the_one_that_is_named():
    expected = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    assert RngTracker().device == expected
    for device in ("meta", "gpu", 1.5):
        assert refusal(RngTracker, device).startswith(f"RngTracker.device: {device!r} has no random generator here: ")


# -- `seed_model_parallel`: the seeds of Megatron-Core, refused before anything changes


def state_of(seed: int) -> list[int]:
    return torch.Generator().manual_seed(seed).get_state().tolist()


@pytest.mark.parametrize(
    ("arguments", "model", "expert"),
    [
        ((1234,), 1234 + 2718, 1234 + 1024),
        ((1234, 3, 2, 1), 1234 + 2718 + 3, 1234 + 1024 + 200 + 1),
        ((-5,), 2713, 1019),
    ],
)
def test_seeds(arguments, model, expert):
    tracker = seed_model_parallel(*arguments, device="cpu")
    assert {name: state.tolist() for name, state in tracker.get_states().items()} == {
        "data-parallel-rng": state_of(arguments[0]),
        "model-parallel-rng": state_of(model),
        "expert-parallel-rng": state_of(expert),
    }
    assert torch.get_rng_state().tolist() == state_of(arguments[0])


def test_a_given_tracker_is_seeded_anew():
    tracker = RngTracker("cpu")
    tracker.add("model-parallel-rng", 1)
    tracker.add("other", 2)
    assert seed_model_parallel(2, tracker=tracker, device="cpu") is tracker
    assert tracker.names == ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"seed": "7"}, ": '7' is not a seed\n    legal: a whole number from -9223"),
        ({"seed": 7, "ep_rank": -1}, ".ep_rank: -1 is not a rank\n    legal: a whole number from 0 to"),
        ({"seed": 7, "etp_rank": None}, ".etp_rank: None is not a rank"),
        ({"seed": 2**64 - 1}, "18446744073709554333 is not a seed"),
        ({"seed": 7, "tp_rank": 6, "ep_rank": 17}, "seed 2731 belongs to another stream"),
    ],
)
def test_what_cannot_be_seeded_changes_nothing(arguments, text):
    tracker = RngTracker("cpu")
    tracker.add("a", 1)
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=text):
        seed_model_parallel(**arguments, tracker=tracker)
    assert tracker.names == ("a",)
    assert torch.equal(torch.get_rng_state(), before)


def test_inside_a_fork_it_is_refused():
    tracker = seed_model_parallel(1, device="cpu")
    with tracker.fork():
        before = torch.get_rng_state()
        with pytest.raises(ConfigError, match="'model-parallel-rng' is in use"):
            seed_model_parallel(2, tracker=tracker)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_on_a_gpu_the_generator_of_the_cpu_is_left_alone():
    before = torch.get_rng_state()
    seed_model_parallel(1234, device="cuda")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.cuda.initial_seed() == 1234
