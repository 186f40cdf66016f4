"""Scripts of `scripts/` run in their smallest form; what they measure is not checked here."""

import json
from pathlib import Path

from tests.support.script_runs import run_script

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_bench_overhead() -> None:
    done = run_script(SCRIPTS / "bench_overhead.py", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    assert [case["case"] for case in json.loads(done.stdout)["cases"]] == ["small", "moe", "layer"]


def test_composition_matrix() -> None:
    done = run_script(SCRIPTS / "composition_matrix.py", "--list")
    assert done.returncode == 0, done.stderr
    assert "FSDP2" in done.stdout.splitlines()
