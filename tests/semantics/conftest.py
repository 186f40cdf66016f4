"""What every test of semantics needs of the process."""

from __future__ import annotations

import pytest

from tests.semantics.blocks import llama_stack, tokens
from tests.semantics.recording import backward_ops
from tests.semantics.training import built


@pytest.fixture(scope="session", autouse=True)
def first_step_is_behind() -> None:
    """torch 2.13 keeps some tensors of the first step that a dispatch mode sees in a process, with or without us."""
    backward_ops(built(llama_stack), tokens())
