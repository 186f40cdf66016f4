"""`seed_model_parallel`: the seeds of Megatron-Core, refused before anything changes."""

from __future__ import annotations

import pytest
import torch

from sac.errors import ConfigError
from sac.full import RngTracker, seed_model_parallel


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
        ({"seed": "7"}, ": '7' is not a seed\n    legal: a whole number from -2\\*\\*63 to 2\\*\\*64 - 1"),
        ({"seed": 7, "ep_rank": -1}, ".ep_rank: -1 is not a rank\n    legal: a whole number from 0 on"),
        ({"seed": 7, "etp_rank": None}, ".etp_rank: None is not a rank"),
        ({"seed": 2**64 - 1}, ": model-parallel-rng: 18446744073709554333 is not a seed"),
        (
            {"seed": 7, "tp_rank": 6, "ep_rank": 17},
            ": model-parallel-rng and expert-parallel-rng of this rank would both have seed 2731",
        ),
    ],
)
def test_what_cannot_be_seeded_changes_nothing(arguments, text):
    tracker = RngTracker("cpu")
    tracker.add("a", 1)
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=f"^seed_model_parallel{text}"):
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
    tracker = seed_model_parallel(1234, device="cuda")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.cuda.initial_seed() == 1234
    with pytest.raises(ConfigError, match="device cpu is not that of the tracker, cuda"):
        seed_model_parallel(1, tracker=tracker, device="cpu")
