"""What every test needs of the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def random_state_is_left_alone() -> Iterator[None]:
    """Begin each test from one random state, and give the process its own back."""
    before = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(before)


@pytest.fixture(scope="session", autouse=True)
def first_step_is_behind() -> None:
    """torch 2.13 keeps some tensors of the first step that a dispatch mode sees in a process, with or without us."""
    from tests.support.blocks import llama_stack, tokens
    from tests.support.recording import backward_ops
    from tests.support.training import built

    backward_ops(built(llama_stack), tokens())


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Where sums may be formed in another order: rounding is far below any mistake then."""
    from tests.support.training import new_tensors_in

    with new_tensors_in(torch.float64):
        yield


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The forwards that ran under a mode."""
    from sac.selective import modes

    seen: list[Any] = []
    enter = modes.ForwardMode.__enter__

    def counted(self: Any) -> Any:
        seen.append(self)
        return enter(self)

    monkeypatch.setattr(modes.ForwardMode, "__enter__", counted)
    return seen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none, however the tests were chosen."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
