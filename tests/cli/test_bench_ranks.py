"""scripts/bench_ranks.py runs two ranks and finds the gradients of each way equal on both; its times are not held."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.script_runs import run_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_ranks.py"
CASES = ["tp", "dtensor", "fsdp2"]
# Of both layers and both passes. Full recomputation stops early: the last matmul of a layer is not run again.
MATMULS = {"none": 42, "torch full": 54, "stock SAC": 48, "sac full": 54, "sac rerun": 48}


@pytest.fixture(scope="module")
def report() -> dict:
    done = run_script(SCRIPT, "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_case_holds_a_row_for_every_way(report):
    assert [case["case"] for case in report["cases"]] == CASES
    for case in report["cases"]:
        assert [row["mode"] for row in case["rows"]] == [*MATMULS, "sac replay"]
        for row in case["rows"]:
            assert row["step_ms"] > 0
            assert list(row["ratios_to_torch_full"]) == ["here"]
            assert row["ratios_to_torch_full"]["here"] > 0


def test_gradients_are_equal_in_every_way(report):
    assert all(row["gradients_equal"] for case in report["cases"] for row in case["rows"])


@pytest.mark.parametrize("case", CASES)
def test_ways_of_one_mode_recompute_the_same_matmuls(report, case):
    (rows,) = (found["rows"] for found in report["cases"] if found["case"] == case)
    matmuls = {row["mode"]: row["matmuls"] for row in rows}
    assert matmuls["none"] < matmuls.pop("sac replay") <= matmuls["sac rerun"]
    assert matmuls == MATMULS


@pytest.mark.parametrize("case", CASES)
def test_every_way_runs_the_same_collectives_on_both_ranks(report, case):
    (rows,) = (found["rows"] for found in report["cases"] if found["case"] == case)
    collectives = {row["mode"]: row["collectives"] for row in rows}
    plain = collectives.pop("none")
    (found,) = {*collectives.values()}  # two numbers: where the ranks differ, there are more
    forward, backward = map(int, found.split(" + "))
    assert min(forward, backward) > 0
    assert plain.startswith(f"{forward} + ")


def test_the_page_holds_a_run_of_this_script(report):
    text = (SCRIPT.parents[1] / "docs/overhead.md").read_text(encoding="utf-8")
    block = text.split("<!-- ranks -->\n```\n")[1].split("```\n<!-- /ranks -->")[0]
    assert block.startswith("$ .venv/bin/python scripts/bench_ranks.py")
    for case in report["cases"]:
        _, table = block.split(f"\n{case['case']}: {case['label']}, ")
        rows = table.split("\n\n")[0].splitlines()[3:]
        assert [row.split("  ")[1] for row in rows] == [row["mode"] for row in case["rows"]]
        assert all(row.endswith(" yes") for row in rows)


@pytest.mark.slow
def test_table_is_printed_with_its_command_and_versions():
    arguments = ("--case", "fsdp2", "--rounds", "1", "--without-library", "--before", str(SCRIPT.parents[1]))
    done = run_script(SCRIPT, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"$ .venv/bin/python scripts/bench_ranks.py {' '.join(arguments)}\n2 layers, d=32")
    assert "÷ full, here   no library   before   matmuls   collectives   equal" in done.stdout
    assert " or " not in done.stdout.partition("\nstep:")[0]  # as many collectives with the library and without
    assert f"\ntorch {torch.__version__}" in done.stdout


def test_what_cannot_be_measured_is_refused(tmp_path):
    assert run_script(SCRIPT, "--rounds", "0").stderr.endswith("error: --rounds is 0; at least 1 is needed\n")
    done = run_script(SCRIPT, "--before", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: --before is {tmp_path}, which has no sac/__init__.py\n")


@pytest.mark.slow
def test_a_rank_that_ends_is_reported(tmp_path):
    (tmp_path / "sac").mkdir()
    (tmp_path / "sac/__init__.py").write_text("raise SystemExit('this sac ends')\n", encoding="utf-8")
    with pytest.raises(Exception, match="asked to build:\nthis sac ends"):
        run_script(SCRIPT, "--case", "tp", "--rounds", "1", "--before", str(tmp_path))
