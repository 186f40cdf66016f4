"""scripts/bench_full.py runs, compares every way, and finds the gradients of each equal; its times are not held."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.script_runs import run_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_full.py"
WAYS = ["none", "torch", "torch reentrant", "sac.checkpoint", "sac.checkpoint reentrant", "sac.apply full"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script(SCRIPT, *arguments)


@pytest.fixture(scope="module", params=["1", "2"])
def report(request: pytest.FixtureRequest) -> dict:
    done = run("--quick", "--json", "--ranks", request.param)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_both_cases_hold_a_row_for_every_way(report):
    assert [case["case"] for case in report["cases"]] == ["small", "layer"]
    expected = WAYS if report["ranks"] == 1 else [*WAYS, "sac scattered"]
    for case in report["cases"]:
        assert [row["way"] for row in case["rows"]] == expected
        for row in case["rows"]:
            assert 0 < row["forward_us"] < row["step_us"]
            assert row["forward_to_torch"] > 0
            assert row["step_to_torch"] > 0


def test_gradients_are_equal_in_every_way(report):
    for case in report["cases"]:
        assert all(row["gradients_equal"] for row in case["rows"])


def test_only_reentrant_ways_recompute_all_of_a_forward(report):
    for case in report["cases"]:
        for row in case["rows"]:
            expected = 0 if row["way"] == "none" else 100 if "reentrant" in row["way"] else 200 / 3
            assert row["recomputed_percent"] == pytest.approx(expected)


def test_ways_are_compared_with_those_of_torch_in_the_same_mode(report):
    for case in report["cases"]:
        rows = {row["way"]: row for row in case["rows"]}
        for way in ("torch", "torch reentrant"):
            assert rows[way]["forward_to_torch"] == rows[way]["step_to_torch"] == 1
        assert rows["none"]["region_us"] == 0


def test_report_says_what_it_was_measured_on(report):
    assert report["torch"] == torch.__version__
    assert report["cores"] == os.cpu_count()
    assert report["cpu"]
    assert report["command"] == f".venv/bin/python scripts/bench_full.py --quick --json --ranks {report['ranks']}"


def test_table_is_printed_with_its_command_and_versions():
    done = run("--quick", "--case", "small", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("$ .venv/bin/python scripts/bench_full.py --quick --case small --rounds 1\n")
    assert "66.7 %" in done.stdout
    assert f"torch {torch.__version__}" in done.stdout


@pytest.mark.parametrize("option", ["--rounds", "--ranks"])
def test_none_are_refused(option):
    done = run(option, "0")
    assert done.returncode == 2
    assert done.stderr.endswith(f"bench_full.py: error: {option} is 0; at least 1 is needed\n")
