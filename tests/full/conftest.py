"""What every test of full recomputation needs of the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sac.selective import modes
from tests.semantics.training import new_tensors_in


@pytest.fixture(autouse=True)
def random_state_is_left_alone() -> Iterator[None]:
    """Begin each test from one random state, and give the process its own back."""
    before = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(before)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The forwards that ran under a mode."""
    seen: list[Any] = []
    enter = modes.ForwardMode.__enter__

    def counted(self: Any) -> Any:
        seen.append(self)
        return enter(self)

    monkeypatch.setattr(modes.ForwardMode, "__enter__", counted)
    return seen


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Where sums may be formed in another order: rounding is far below any mistake then."""
    with new_tensors_in(torch.float64):
        yield
