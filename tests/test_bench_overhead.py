"""scripts/bench_overhead.py runs, compares every way, and finds the gradients of each equal; its times are not held."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.script_runs import run_script

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "bench_overhead.py"
WAYS = [
    "none", "torch full", "stock SAC", "torch_remat", "empty mode", "sac full", "sac selective", "sac.context_fn",
]  # fmt: skip
SELECTIVE = ("stock SAC", "sac selective", "sac.context_fn")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script(SCRIPT, *arguments)


@pytest.fixture(scope="module")
def report() -> dict:
    done = run("--quick", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_both_cases_hold_a_row_for_every_way_that_can_run(report):
    assert [case["case"] for case in report["cases"]] == ["small", "layer"]
    expected = [way for way in WAYS if way not in report["skipped"]]
    for case in report["cases"]:
        assert [row["mode"] for row in case["rows"]] == expected
        assert case["ops"] >= 56  # views are ops too, and torch versions differ in them
        for row in case["rows"]:
            assert row["step_ms"] > 0
            assert row["ratio_to_none"] > 0
            assert row["ratio_to_stock"] > 0


def test_gradients_are_equal_in_every_way(report):
    for case in report["cases"]:
        assert {row["mode"]: row["gradients_equal"] for row in case["rows"]} == {
            way: True for way in WAYS if way not in report["skipped"]
        }


def test_stock_and_ours_recompute_the_same_matmuls(report):
    for case in report["cases"]:
        run_by = {row["mode"]: row["matmuls"] for row in case["rows"]}
        assert run_by["none"] == 21
        assert run_by["sac full"] == run_by["torch full"] == 27  # early stop: not the 7th of the forward
        assert [run_by[way] for way in SELECTIVE] == [24] * 3


def test_report_says_what_it_was_measured_on(report):
    assert report["torch"] == torch.__version__
    assert report["cores"] == os.cpu_count()
    assert report["cpu"]
    assert report["command"] == ".venv/bin/python scripts/bench_overhead.py --quick --json"


def test_table_is_printed_with_its_command_and_versions():
    done = run("--quick", "--case", "small", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("$ .venv/bin/python scripts/bench_overhead.py --quick --case small --rounds 1\n")
    assert "sac full ÷ torch full: " in done.stdout
    assert f"torch {torch.__version__}" in done.stdout


def test_no_rounds_are_refused():
    done = run("--rounds", "0")
    assert done.returncode == 2
    assert done.stderr.endswith("bench_overhead.py: error: --rounds is 0; at least 1 is needed\n")
