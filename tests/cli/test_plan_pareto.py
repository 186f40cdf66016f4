"""scripts/plan_pareto.py at toy size: no plan is slower than the baselines, and one that is slower is reported."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.script_runs import run_script_alone

SCRIPTS = Path(__file__).parents[2] / "scripts"
WAYS = [
    "none", "full", "every 2nd layer full", "selective", "attention + every 2nd matmul", "attention + all matmuls",
    "every 3rd layer full", "every 4th layer full",
]  # fmt: skip


@pytest.fixture(scope="module")
def report() -> dict:
    done = run_script_alone(SCRIPTS / "plan_pareto.py", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_plan_is_slower_than_what_stands_beside_it(report):
    assert report["violations"] == []
    for pair in report["models"]:
        assert pair["plan_seconds"] <= pair["seconds"] * (1 + 1e-9)
        assert pair["plan_peak"] <= pair["peak"]


def test_every_usual_way_is_there(report):
    assert [pair["way"] for pair in report["models"]] == WAYS


def test_the_partitioner_of_torch_is_there_or_it_is_told_why_not(report):
    for block in report["blocks"]:
        assert len(block["partitions"]) == 3 or block["skipped"].startswith("the partitioner does not run here: ")


def test_more_bytes_are_never_slower(report):
    for block in report["blocks"]:
        seconds = [one["seconds"] for one in block["front"]]
        assert seconds == sorted(seconds, reverse=True)


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])


def test_a_plan_that_is_slower_is_told_of(scripts):
    from pareto_models import Pair
    from plan_pareto import SLACK, Report

    fine = Pair("Llama", "full", peak=100, seconds=2.0, plan_peak=100, plan_seconds=2.0)
    slower, above = replace(fine, plan_seconds=2.1), replace(fine, way="none", plan_peak=101)
    assert not fine.is_violation(SLACK)
    assert Report([fine, slower, above], []).violations == ["Llama: full", "Llama: none"]


@pytest.mark.slow
def test_the_block_of_a_70b_model_is_planned_as_fast_as_promised(scripts):
    from pareto_block import MIB, Sizes, anchors, baselines, profiled

    sizes = Sizes()
    profile, times = profiled(sizes, as_complex=False)
    held = {one.label: round(one.bytes / MIB) for one in baselines(profile, times)}
    of_input = 2 * sizes.sequence * sizes.hidden // MIB
    assert held["attention + every 2nd matmul"] + of_input == 978
    assert held["attention + all matmuls"] + of_input == 1570
    met = anchors(profile, times, of_input * MIB)
    missed = [(one.mib, one.counts_input) for one in met if not one.holds]
    assert missed == [(864, True)]  # 0.86 where 0.84 was hoped for: two MiB more would do
