"""What every test of full recomputation needs of the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def random_state_is_left_alone() -> Iterator[None]:
    """Begin each test from one random state, and give the process its own back."""
    before = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(before)
