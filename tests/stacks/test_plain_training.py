"""Twenty training steps of a small Llama: the same losses in every mode, and no memory gathers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import sac
from sac.policy.load import shipped_policies
from tests.support.model_zoo import tiny
from tests.support.recording import Recorder, without_collector

STEPS = 20
DROPOUT = {"attention_dropout": 0.1, "attn_implementation": "eager"}  # the only dropout that a Llama has


def trained(value: Any, recorder: Recorder | None = None) -> tuple[list[float], list[int]]:
    """Train with AdamW; return the loss of each step, and the bytes that live between steps."""
    model, inputs = tiny("llama", **DROPOUT)
    sac.apply(model, value)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, living = [], []
    for _ in range(STEPS):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
        if recorder is not None:
            living.append(recorder.live_bytes())
    return losses, living


@functools.cache
def reference() -> tuple[float, ...]:
    return tuple(trained("none")[0])


def test_reference_learns() -> None:
    losses = reference()
    assert losses[-1] < 0.7 * losses[0]
    assert len(set(losses)) == STEPS


VALUES: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "full, parts of blocks": {"mode": "full", "granularity": "submodule"},
    "full, one layer": {"mode": "full", "layers": {"last": 1}},
    **{name: name for name in shipped_policies()},
}


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")  # rules of other families' policies find no place
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_losses_are_those_without_checkpointing(value: Any) -> None:
    assert trained(value)[0] == list(reference())


@pytest.mark.parametrize("value", ["none", "full", "selective"])
def test_living_bytes_do_not_grow(value: str) -> None:
    recorder = Recorder()
    with without_collector(), recorder:
        losses, living = trained(value, recorder)
    assert losses == list(reference())
    assert len(set(living[3:])) == 1, living  # by then all that is learnt in first steps is known
