"""Plans that offload, of models with routing and with dropout: within the budget, gradients as without sac."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.planner import link_search
from sac.planner.fakes import call
from sac.planner.plan_file import make_plan
from sac.planner.prepare import prepare
from sac.planner.transfer_clock import Link
from tests.support.simulated_streams import simulated_streams
from tests.unit.planner.truth import model_named


def gradients(model: nn.Module, inputs: Any) -> list[Tensor | None]:
    """Those of two steps, of which the second one starts from the same random state."""
    for _ in range(2):
        torch.manual_seed(1)
        call(model, inputs).loss.backward()
    return [one.grad for one in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-MoE", "GPT-2, dropout"])
def test_trains_as_without_sac(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_search, "CHANGES", 300)
    model, inputs = model_named(name, 3)
    planner = prepare(model, inputs)
    found = make_plan(planner, "10%", link=Link(50e9, 50e9, None, smallest=1))
    assert found.point.peak <= found.budget
    assert found.point.host > 0
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)
    expected = gradients(plain, inputs)
    with simulated_streams(monkeypatch) as device:
        sac.apply(ours, found.policy)
        made = gradients(ours, inputs)
    assert device.races == []
    for one, other in zip(expected, made, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
