"""A budget under torch.compile, of the model or of each block: the blocks run in eager, within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.memory_timeline import measure_memory
from tests.unit.planner.small_training import X, Y, built, bytes_of, controller_of, share, within


def compiled(value: Any, *, whole: bool) -> tuple[list[Tensor], list[int], nn.Module]:
    """Train a compiled model for four steps; return the losses, the peaks of the last two, and the model."""
    model: Any = built()
    if value is not None:
        sac.apply(model, value)
    called = torch.compile(model, backend="eager") if whole else model
    for block in [] if whole else model.body.blocks:
        block.compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, peaks = [], []

    def run() -> None:
        loss = nn.functional.cross_entropy(called(X).flatten(0, 1), Y.flatten())
        loss.backward()
        losses.append(loss.detach())

    for step in range(4):
        if step < 2:
            run()
        else:
            there = bytes_of(model, optimizer, X)
            peaks.append(there + measure_memory(run).peak_bytes)
        optimizer.step()
        optimizer.zero_grad()
    return losses, peaks, model


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["model", "blocks"])
def test_budget_is_met_in_compiled_models(whole: bool) -> None:
    losses, peaks, model = compiled(within(share(0.5)), whole=whole)
    assert controller_of(model).fitted is not None
    assert share(0.4) <= max(peaks) <= share(0.5)
    plain, _, _ = compiled(None, whole=whole)
    assert all(torch.equal(one, other) for one, other in zip(losses, plain, strict=True))
