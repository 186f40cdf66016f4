"""`RngTracker`: its states, copies of it, and its device."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from sac.full import RngTracker
from tests.support.named_streams import assert_numbers, numbers_of, refusal, two_streams


@pytest.fixture
def tracker() -> RngTracker:
    return two_streams()


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


def test_states_inside_a_fork(tracker):
    """The stream in use is as it is now; one that is taken away stays away."""
    torch.manual_seed(9)
    with tracker.fork("a"):
        drawn = [torch.rand(3)]
        states = tracker.get_states()
        drawn.append(torch.rand(3))
        tracker.set_states(states)
        again = torch.rand(3)
    assert torch.equal(drawn[1], again)
    with tracker.fork("a"):
        assert_numbers([torch.rand(3)], numbers_of(1, 3)[2:])
    with tracker.fork("a"), tracker.fork("b"):
        tracker.set_states({})
    assert tracker.names == ()
    assert_numbers([torch.rand(3)], numbers_of(9, 1))


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (3, "expected a torch.ByteTensor, but got int"),
        (torch.zeros(5056), "RNG state must be a torch.ByteTensor"),
        (torch.zeros(16, dtype=torch.uint8), "Expected a CPUGeneratorImplState of size 5056 but found the input RNG"),
        (torch.zeros(5056, dtype=torch.uint8), "Invalid mt19937 state"),
    ],
    ids=["number", "floats", "of CUDA", "zeros"],
)
def test_what_is_no_state_is_refused_before_anything_changes(tracker, state, complaint):
    before = tracker.get_states()
    with tracker.fork("a"):
        inside = torch.get_rng_state()
        good = torch.Generator().manual_seed(8).get_state()
        text = refusal(tracker.set_states, {"a": good, "b": state})
        assert text.startswith(f"RngTracker.set_states: the state of 'b' is none of cpu: {complaint}")
        assert torch.equal(torch.get_rng_state(), inside)
    assert all(torch.equal(before[name], now) for name, now in tracker.get_states().items())
    assert "set_states: [1] holds no states\n    legal: a mapping of name to state" in refusal(tracker.set_states, [1])


def test_reset_forgets_names_and_seeds_but_not_inside_a_fork(tracker):
    with tracker.fork("a"):
        assert refusal(tracker.reset) == "RngTracker.reset: 'a' is in use\n    fix: call it outside of every fork"
    assert tracker.names == ("a", "b")
    tracker.reset()
    assert tracker.names == ()
    tracker.add("a", 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_holds_the_streams_and_is_in_no_fork(tracker, copied):
    with tracker.fork("a"):
        torch.rand(3)
        other = copied(tracker)
        with other.fork("a"):
            theirs = torch.rand(3)
        ours = torch.rand(3)
    assert torch.equal(theirs, ours)
    assert (other.names, other.device) == (tracker.names, tracker.device)
    assert "seed 2 belongs" in refusal(other.add, "c", 2)
    with tracker.fork("b"):
        torch.rand(3)
    with other.fork("b"):
        assert_numbers([torch.rand(3)], numbers_of(2, 1))


def test_its_device_is_the_accelerator_or_the_one_that_is_named():
    expected = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    assert RngTracker().device == expected
    assert repr(RngTracker("cpu")) == "RngTracker(device='cpu', names=())"
    for device in ("meta", "gpu", 1.5):
        assert refusal(RngTracker, device).startswith(f"RngTracker.device: {device!r} has no random generator here: ")
