"""docs/planning.md: its Python runs."""

from __future__ import annotations

from typing import Any

import sac
from tests.docs.pages import snippets
from tests.unit.planner.test_sharding import Model, inputs

PAGE = "docs/planning.md"


def test_the_python_for_one_rank_of_two_gives_a_policy_that_loads() -> None:
    names: dict[str, Any] = {"sac": sac, "model": Model(), "inputs": inputs()}
    (snippet,) = snippets(PAGE, "python")
    exec(compile(snippet, PAGE, "exec"), names)
    assert sac.load_policy(names["policy"]).plan is not None
