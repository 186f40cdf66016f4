"""scripts/bench_overhead.py runs, compares every way, and finds the gradients of each equal; its times are not held."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.script_runs import run_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_overhead.py"
WAYS = [
    "none", "torch full", "torch_remat", "empty mode", "stock SAC", "sac full", "sac rerun", "sac replay",
    "sac.context_fn", "sac whole module",
]  # fmt: skip
CASES = ["small", "moe", "layer"]
BY_RERUN = ("stock SAC", "sac rerun", "sac.context_fn")
FORWARD_OPS = {"small": 67, "moe": 127, "layer": 67}
# Of both passes. Full recomputation stops early: the last matmul of the forward is not run again.
MATMULS = {
    "small": {"none": 21, "full": 27, "selective": 24, "attention saved": 24},
    "moe": {"none": 51, "full": 68, "selective": 59, "attention saved": 64},
}
MATMULS["layer"] = MATMULS["small"]
NUMBERS = re.compile(r"[\d.–─ ]+")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script(SCRIPT, *arguments)


@pytest.fixture(scope="module")
def report() -> dict:
    done = run("--quick", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def matmuls(report) -> dict:
    """Matrix products that a step runs, by case and way."""
    return {case["case"]: {row["mode"]: row["matmuls"] for row in case["rows"]} for case in report["cases"]}


def test_every_case_holds_a_row_for_every_way_that_can_run(report):
    assert [case["case"] for case in report["cases"]] == CASES
    expected = [way for way in WAYS if way not in report["skipped"]]
    for case in report["cases"]:
        assert [row["mode"] for row in case["rows"]] == expected
        for row in case["rows"]:
            assert row["step_ms"] > 0
            assert row["ratio_to_none"] > 0
            assert row["ratio_to_torch_full"] > 0
            assert row["ratio_to_stock"] > 0


def test_only_a_package_or_a_policy_can_keep_a_way_from_running(report):
    assert set(report["skipped"]) <= {"torch_remat", "sac whole module"}
    assert all(reason.startswith("cannot run: ") for reason in report["skipped"].values())


def test_gradients_are_equal_in_every_way(report):
    for case in report["cases"]:
        assert {row["mode"]: row["gradients_equal"] for row in case["rows"]} == {
            way: True for way in WAYS if way not in report["skipped"]
        }


def test_ops_of_the_forward_are_counted(report):
    for case in report["cases"]:
        assert case["ops"] == pytest.approx(FORWARD_OPS[case["case"]], abs=3)  # torch versions differ in views


@pytest.mark.parametrize("case", CASES)
def test_full_ways_recompute_all_matmuls_but_the_last(matmuls, case):
    assert matmuls[case]["none"] == matmuls[case]["empty mode"] == MATMULS[case]["none"]
    assert matmuls[case]["sac full"] == matmuls[case]["torch full"] == MATMULS[case]["full"]


@pytest.mark.parametrize("case", CASES)
def test_stock_and_ours_recompute_the_same_matmuls(matmuls, case):
    assert {way: matmuls[case][way] for way in BY_RERUN} == dict.fromkeys(BY_RERUN, MATMULS[case]["selective"])


@pytest.mark.parametrize("case", CASES)
def test_replay_recomputes_some_matmuls_and_no_more_than_rerun(matmuls, case):
    assert MATMULS[case]["none"] < matmuls[case]["sac replay"] <= MATMULS[case]["selective"]


@pytest.mark.parametrize("way", ["torch_remat", "sac whole module"])
@pytest.mark.parametrize("case", CASES)
def test_saved_attention_module_is_not_run_again(report, matmuls, case, way):
    if way in report["skipped"]:
        pytest.skip(report["skipped"][way])
    again = MATMULS[case]["attention saved"] - matmuls[case][way]
    assert again in (
        (0,) if way == "torch_remat" else (0, 1)
    )  # ours stops before a product that backward does not need


def test_report_says_what_it_was_measured_on(report):
    assert report["torch"] == torch.__version__
    assert report["cores"] == os.cpu_count()
    assert report["cpu"]
    assert report["command"] == ".venv/bin/python scripts/bench_overhead.py --quick --json"


def test_table_is_printed_with_its_command_and_versions():
    done = run("--quick", "--case", "small", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("$ .venv/bin/python scripts/bench_overhead.py --quick --case small --rounds 1\n")
    assert f"torch {torch.__version__}" in done.stdout
    widest = max(map(len, done.stdout.split("\ntorch ")[0].splitlines()))
    assert widest <= 110


def test_the_page_holds_a_run_of_this_script():
    text = (ROOT / "docs/overhead.md").read_text(encoding="utf-8")
    block = text.split("<!-- bench -->\n```\n")[1].split("```\n<!-- /bench -->")[0]
    assert block.startswith("$ .venv/bin/python scripts/bench_overhead.py")
    assert told(block) == told(run("--quick", "--case", "small", "--rounds", "1").stdout)


def told(output: str) -> list[str]:
    """Lines about the small case and at the end, without numbers, spaces, the command, other cases and the machine."""
    lines = [NUMBERS.sub("", line) for line in output.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if re.match(r"(small|moe|layer|step):", line)]
    small = next(index for index in starts if lines[index].startswith("small:"))
    (footer,) = (index for index in starts if lines[index].startswith("step:"))
    end = min(index for index in starts if index > small)
    return [line for line in lines[small:end] + lines[footer:] if not line.startswith("torch")]


def test_no_rounds_are_refused():
    done = run("--rounds", "0")
    assert done.returncode == 2
    assert done.stderr.endswith("bench_overhead.py: error: --rounds is 0; at least 1 is needed\n")


@pytest.fixture(scope="module")
def profile() -> dict:
    done = run("--quick", "--where", "sac rerun", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_where_splits_a_step_by_pass_and_op(profile):
    rows = {row["mode"]: row for row in profile["passes"]}
    assert list(rows) == ["none", "torch full", "stock SAC", "sac rerun"]
    assert {row["forward_ops"] for row in rows.values()} == {rows["none"]["forward_ops"]}
    assert rows["none"]["ops_again"] == 0
    assert rows["none"]["forward_per_op_us"] is rows["none"]["backward_per_op_us"] is None
    assert 0 < rows["sac rerun"]["ops_again"] <= rows["stock SAC"]["ops_again"] < rows["torch full"]["ops_again"]
    for row in rows.values():
        assert row["forward_us"] > 0
        assert row["backward_us"] > 0
        if row["mode"] != "none":
            assert row["forward_per_op_us"] == row["forward_more_us"] / row["forward_ops"]
            assert row["backward_per_op_us"] == row["backward_more_us"] / row["ops_again"]


def test_where_names_files_and_functions(profile):
    files = {row["place"]: row for row in profile["files"]}
    assert files["sac/recompute/rerun.py"]["forward_us"] > 0
    assert any(row["place"].startswith("sac/recompute/rerun.py:") for row in profile["functions"])
    for rows in (profile["files"], profile["functions"]):
        assert rows[-1]["place"].endswith(" others")
    by_file, by_function = (sum(row["forward_us"] for row in profile[name]) for name in ("files", "functions"))
    assert by_file == pytest.approx(by_function)  # neither table leaves anything out


def test_where_shows_its_tables():
    done = run("--quick", "--where", "torch full")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("$ .venv/bin/python scripts/bench_overhead.py --quick --where 'torch full'\n")
    assert "torch full, less none: own time in one step" in done.stdout


def test_where_of_no_way_is_refused():
    done = run("--where", "fast")
    assert done.returncode == 2
    assert "argument --where: invalid choice: 'fast'" in done.stderr
