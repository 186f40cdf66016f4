"""`RngTracker`: named streams on one device, and what goes wrong in TransformerEngine, Megatron and DeepSpeed."""

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
from tests.support.trackers import DeepSpeedLike, MegatronLike


@pytest.fixture
def tracker() -> RngTracker:
    return two_streams()


# add


@pytest.mark.parametrize("seed", [0, 1, 1234, -1, -(2**63), 2**63, 2**64 - 1])
def test_a_stream_begins_as_after_manual_seed(seed):
    tracker = RngTracker("cpu")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tracker.add("a", seed)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(seed)
    assert torch.equal(tracker.get_states()["a"], torch.get_rng_state())
    assert tracker.names == ("a",)


def test_a_taken_name_and_a_taken_seed_are_refused(tracker):
    assert refusal(tracker.add, "a", 3) == (
        "RngTracker.add: 'a' was added before\n    fix: give each stream a name of its own"
    )
    assert refusal(tracker.add, "c", 2) == (
        "RngTracker.add: seed 2 belongs to another stream\n"
        "    fix: give 'c' a seed of its own, or it draws the same numbers"
    )


def test_a_seed_is_taken_however_it_is_written():
    tracker = RngTracker("cpu")
    tracker.add("a", -1)
    assert "seed 18446744073709551615 belongs to another stream" in refusal(tracker.add, "b", 2**64 - 1)


@pytest.mark.parametrize("seed", ["7", 7.0, True, None, 2**64, -(2**63) - 1])
def test_what_is_no_seed_is_refused(tracker, seed):
    assert refusal(tracker.add, "c", seed) == (
        f"RngTracker.add: {seed!r} is not a seed\n    legal: a whole number from -2**63 to 2**64 - 1"
    )


def test_a_whole_number_of_another_type_is_a_seed():
    tracker = RngTracker("cpu")
    tracker.add("a", torch.tensor(7))
    assert torch.equal(tracker.get_states()["a"], torch.Generator().manual_seed(7).get_state())


def test_a_name_is_a_string(tracker):
    assert refusal(tracker.add, 3, 3) == "RngTracker.add: 3 is not a name\n    legal: a string"


def test_a_refused_add_burns_nothing(tracker):
    """In TransformerEngine, Megatron and DeepSpeed the seed is taken from then on."""
    refusal(tracker.add, "a", 3)
    refusal(tracker.add, "c", 2)
    tracker.add("c", 3)
    assert tracker.names == ("a", "b", "c")

    theirs = DeepSpeedLike()
    theirs.add("a", 1)
    with pytest.raises(RuntimeError):
        theirs.add("a", 3)
    with pytest.raises(RuntimeError, match="seed 3 is there"):
        theirs.add("c", 3)


# fork


def test_a_fork_draws_from_its_stream_and_the_next_one_goes_on(tracker):
    torch.manual_seed(9)
    drawn = [torch.rand(3)]
    with tracker.fork("a"):
        first = torch.rand(3)
    drawn.append(torch.rand(3))
    with tracker.fork("a"):
        second = torch.rand(3)
    drawn.append(torch.rand(3))
    assert_numbers(drawn, numbers_of(9, 3))
    assert_numbers([first, second], numbers_of(1, 2))


def test_a_nested_fork_of_the_same_name_goes_on_with_the_stream(tracker):
    """In DeepSpeed and TransformerEngine it begins the stream again, and repeats numbers."""
    with tracker.fork("a"):
        drawn = [torch.rand(3)]
        with tracker.fork("a"):
            drawn.append(torch.rand(3))
        drawn.append(torch.rand(3))
    with tracker.fork("a"):
        drawn.append(torch.rand(3))
    assert_numbers(drawn, numbers_of(1, 4))

    theirs = DeepSpeedLike()
    theirs.add("a", 1)
    with theirs.fork("a"):
        first = torch.rand(3)
        with theirs.fork("a"):
            assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("maker", [lambda: RngTracker("cpu"), MegatronLike], ids=["ours", "Megatron"])
def test_forks_in_forks_are_as_forks_in_a_row(maker):
    nested, single = maker(), maker()
    for tracker in (nested, single):
        tracker.add("a", 1)
        tracker.add("b", 2)
    torch.manual_seed(0)
    with nested.fork("a"):
        first = [torch.rand(3)]
        with nested.fork("b"):
            first.append(torch.rand(3))
            with nested.fork("a"):
                first.append(torch.rand(3))
            first.append(torch.rand(3))
        first.append(torch.rand(3))
    end = torch.get_rng_state()
    torch.manual_seed(0)
    second = []
    for name in "abaab":
        with single.fork(name):
            second.append(torch.rand(3))
    a, b = [second[0], second[2], second[3]], [second[1], second[4]]
    assert_numbers(first, [a[0], b[0], a[1], b[1], a[2]])
    assert torch.equal(end, torch.get_rng_state())
    for name, state in nested.get_states().items():
        assert torch.equal(state, single.get_states()[name])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_leaves_the_stream_advanced_and_the_outer_state_in_place(tracker, error):
    def fail() -> None:
        with tracker.fork("a"), tracker.fork("b"):
            torch.rand(3)
            raise error

    torch.manual_seed(9)
    with pytest.raises(error):
        fail()
    drawn = [torch.rand(3)]
    with tracker.fork("b"):
        later = torch.rand(3)
    assert_numbers(drawn, numbers_of(9, 1))
    assert_numbers([later], numbers_of(2, 2)[1:])


def test_an_unknown_name_is_refused_where_fork_is_called():
    tracker = RngTracker("cpu")
    assert refusal(tracker.fork) == (
        "RngTracker.fork: 'model-parallel-rng' was not added\n"
        "    legal: none: no stream was added\n"
        "    fix: add(name, seed) it first"
    )
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
    assert refusal(first.__exit__, None, None, None) == (
        "RngTracker.fork: the fork of 'a' ends inside the fork of 'b', which began later\n"
        "    fix: end forks in the opposite order, and use one tracker in one thread at a time"
    )
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


# a law

NAMES = ("a", "b", "c")
STEPS = st.lists(st.one_of(st.sampled_from(NAMES), st.just("draw"), st.just("end"), st.just("fail")), max_size=40)


class Failure(Exception):
    """Ends a fork."""


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
            error = Failure() if step == "fail" else None
            fork = forks.pop()[1]
            assert not fork.__exit__(type(error) if error else None, error, None)
        check()
    while forks:
        forks.pop()[1].__exit__(None, None, None)
    check()
    states = tracker.get_states()
    assert all(torch.equal(states[name], expected[name].get_state()) for name in NAMES)
