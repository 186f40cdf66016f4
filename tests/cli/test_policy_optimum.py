"""scripts/policy_optimum.py: a policy next to the best choice at the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.script_runs import run_script_alone

SCRIPT = Path(__file__).parents[2] / "scripts" / "policy_optimum.py"


@pytest.mark.slow
def test_no_policy_is_faster_than_the_best_choice_and_its_ops_are_listed() -> None:
    done = run_script_alone(SCRIPT, "--case", "vit-l-16", "--ops")
    assert done.returncode == 0, done.stderr
    [row] = [line.split() for line in done.stdout.splitlines() if line.startswith("  vit-l-16")]
    assert row[1:3] == ["layers.0", "vit"]
    assert float(row[-1]) >= 1
    assert "  policy: attention.o_proj aten.addmm.default#0 " in done.stdout
