"""What needs no dispatch mode enters none: seen from inside the region, in forward and in recompute.

torch's selective checkpoint enters one always.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sac
from tests.support.blocks import (
    APPLY,
    FULL,
    FunctionBlock,
    Stack,
    alternate,
    install,
    policy,
    selective,
    square,
    under_each_engine,
)
from tests.support.mode_probe import SEEN, note_mode
from tests.support.recording import Recorder, step, without_collector
from tests.support.training import built

MATMULS = selective(policy(alternate("matmul")))


def watched(block: FunctionBlock, x: Tensor) -> Tensor:
    """Notes whether a dispatch mode is active at the begin and at the end of each run."""
    note_mode()
    h = F.dropout((x @ block.a).sin(), 0.3, block.training)
    out = (h @ block.b).cos()
    note_mode()
    return out * x


def watched_stack(value: Any, entry: str = "apply") -> Stack:
    SEEN.clear()
    return install(built(lambda: Stack(FunctionBlock(watched))), value, entry)


VALUES = under_each_engine(
    {
        "full": FULL,
        "alternating matmuls": MATMULS,
        "default save": selective(policy(default="save")),
        "nothing": selective(policy()),
    }
)
ON_EACH_ENGINE = pytest.mark.parametrize("entry", APPLY)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_no_grad_runs_the_original_forward(value: Any, off: Any) -> None:
    model = watched_stack(value)
    with off():
        for _ in range(2):
            assert not model(*square()).requires_grad
    assert not any(SEEN)
    assert model.blocks[0].runs == 2


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_no_grad_runs_a_function_as_it_is(off: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not even become an object of a region: two calls hold and take note of nothing."""

    def made(*args: Any, **more: Any) -> None:
        raise AssertionError("a region was made")

    monkeypatch.setattr("sac.engine.inputs.Inputs.__init__", made)
    with off():
        assert not sac.checkpoint(torch.sin, torch.ones(2, requires_grad=True)).requires_grad
    with pytest.raises(AssertionError, match="a region was made"):
        sac.checkpoint(torch.sin, torch.ones(2, requires_grad=True))


@ON_EACH_ENGINE
def test_frozen_region_keeps_nothing(entry: str) -> None:
    model = watched_stack(MATMULS, entry)
    model.requires_grad_(False)
    with without_collector():
        recorder = Recorder()
        for _ in range(2):
            with recorder:
                out = model(*square())
            assert not out.requires_grad
            assert recorder.live_bytes(besides=out) == 0


def test_full_enters_no_mode_after_the_first_call() -> None:
    model = watched_stack(FULL)
    step(model, square())
    SEEN.clear()
    for _ in range(2):
        step(model, square())
    assert not any(SEEN)
    assert len(SEEN) >= 6  # begin and end of forward, begin of recompute, twice


def test_nothing_saved_enters_no_mode_after_the_first_call() -> None:
    model = watched_stack(selective(policy()), "apply, rerun")
    step(model, square())
    SEEN.clear()
    step(model, square())
    assert not any(SEEN)
    assert model.blocks[0].runs == 4


def test_replay_that_was_asked_for_has_its_mode_in_every_call() -> None:
    """Without a mode there is no tape, and Python would run twice."""
    model = watched_stack(selective(policy()), "apply, replay")
    for _ in range(3):
        step(model, square())
    assert SEEN == [True] * 6
    assert model.blocks[0].runs == 3


@ON_EACH_ENGINE
def test_everything_saved_enters_no_mode_after_the_first_call(entry: str) -> None:
    model = watched_stack(selective(policy(default="save")), entry)
    step(model, square())
    SEEN.clear()
    step(model, square())
    assert not any(SEEN)
    assert model.blocks[0].runs <= 4  # nothing need be run again, but it may be


def test_none_enters_nothing() -> None:
    model = watched_stack("none")
    step(model, square())
    assert not any(SEEN)
    assert model.blocks[0].runs == 1
    assert "forward" not in vars(model.blocks[0])


@ON_EACH_ENGINE
def test_watch_can_see_a_mode(entry: str) -> None:
    """The probe of these tests fires: a policy that decides per op does enter one, in recomputation too under rerun."""
    model = watched_stack(MATMULS, entry)
    step(model, square())
    SEEN.clear()
    out = model(*square())
    assert SEEN == [True, True]
    SEEN.clear()
    out.sum().backward()
    assert len(SEEN) in ((0,) if entry == "apply, replay" else (1, 2))
    assert all(SEEN)


class RoutingBlock(FunctionBlock):
    """Not of the region group of other blocks."""


def routed(block: FunctionBlock, x: Tensor) -> Tensor:
    note_mode()
    weights, chosen = (x @ block.a).softmax(-1).topk(2)
    return (x @ block.b).gather(1, chosen) * weights


def test_full_enters_a_mode_only_in_regions_seen_to_route() -> None:
    """The must-save tier costs a mode where there is something to save, and nowhere else."""
    SEEN.clear()
    model = sac.apply(built(lambda: Stack(FunctionBlock(watched), RoutingBlock(routed))), FULL)
    step(model, square())
    SEEN.clear()
    out = model(*square())
    assert SEEN == [False, False, True]
    out.sum().backward()
