"""`RngTracker`: named streams on one device, without what goes wrong in TransformerEngine, Megatron and DeepSpeed."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sac.full import RngTracker
from tests.support.named_streams import assert_numbers, numbers_of, refusal, two_streams


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
        (3, 3, "3 is not a name\n    legal: a string"),
        *(("c", seed, f"{seed!r} is not a seed\n    legal: a whole number from") for seed in ("7", 7.0, True, 2**64)),
    ],
)
def test_what_cannot_be_added_burns_nothing(tracker, name, seed, text):
    """In TransformerEngine, Megatron and DeepSpeed the seed is taken from then on."""
    tracker.add("minus four", -4)
    assert refusal(tracker.add, name, seed).startswith(f"RngTracker.add: {text}")
    tracker.add("c", 3)
    assert tracker.names == ("a", "b", "minus four", "c")


def test_an_unknown_name_is_refused_where_fork_is_called():
    tracker = RngTracker("cpu")
    assert "'model-parallel-rng' was not added\n    legal: none: no stream was added" in refusal(tracker.fork)
    tracker.add("model-parallel-rng", 1)
    tracker.add("expert-parallel-rng", 2)
    assert refusal(tracker.fork, "modelparallel-rng") == (
        "RngTracker.fork: 'modelparallel-rng' was not added\n"
        "    did you mean: model-parallel-rng\n"
        "    legal: model-parallel-rng, expert-parallel-rng\n"
        "    fix: add(name, seed) it first"
    )
    assert "['a'] was not added" in refusal(tracker.fork, ["a"])


def test_a_fork_decorates(tracker):
    @tracker.fork("a")
    def draw() -> Tensor:
        return torch.rand(3)

    assert_numbers([draw(), draw()], numbers_of(1, 2))
    tracker.reset()
    assert "'a' was not added" in refusal(draw)


def test_forks_that_end_in_the_order_in_which_they_began_are_an_error(tracker):
    first, second = tracker.fork("a"), tracker.fork("b")
    first.__enter__()
    second.__enter__()
    text = refusal(first.__exit__, None, None, None)
    assert "the fork of 'a' ends inside the fork of 'b', which began later\n    fix: end forks in the opposite" in text
    second.__exit__(None, None, None)


def test_threads_may_fork_one_after_the_other(tracker):
    drawn = []

    def draw() -> None:
        with tracker.fork("a"):
            drawn.append(torch.rand(3))

    for _ in range(3):
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
    assert_numbers(drawn, numbers_of(1, 3))


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
