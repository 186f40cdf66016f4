"""Fixtures of the tests of DeepSpeed's face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import sac.compat.deepspeed as checkpointing
from tests.unit.compat.programs import DEEPSPEED


@pytest.fixture
def nothing_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `configure` was called with is that of the process, in which other tests ran."""
    monkeypatch.setattr(checkpointing, "_process", checkpointing._Process())


@pytest.fixture(params=DEEPSPEED, name="call")
def _call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return DEEPSPEED[request.param]
