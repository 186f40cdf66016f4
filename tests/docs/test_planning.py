"""docs/budget.md: its Python runs."""

from __future__ import annotations

from typing import Any

import torch

import sac
from tests.docs.pages import snippets
from tests.unit.planner.plan_models import Stack

PAGE = "docs/budget.md"


def test_the_python_for_one_rank_of_two_gives_a_policy_that_loads() -> None:
    names: dict[str, Any] = {"sac": sac, "model": Stack(), "inputs": (torch.randn(4, 32, 16),)}
    (snippet,) = snippets(PAGE, "python")
    exec(compile(snippet, PAGE, "exec"), names)
    assert sac.load_policy(names["policy"]).rules
