"""`sac plan`: what is printed, as text and as JSON, the file that it writes, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sac
from sac.tools.cli import main

MODELS = "tests.unit.planner.plan_models"


def run(capsys: pytest.CaptureFixture[str], *more: str, code: int = 0) -> str:
    assert main(["plan", "--model", f"{MODELS}:stack", *more]) == code
    streams = capsys.readouterr()
    return streams.err if code else streams.out


def test_plan_is_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    out = run(capsys, "--seq", "32", "--budget", "50%", "--out", str(path), "--explain")
    assert [line.split()[0] for line in out.splitlines() if line.endswith(("checked", "predicted"))] == [
        "plan", "none", "full", "selective",
    ]  # fmt: skip
    assert "alive at the peak of" in out
    assert "try it on this model: sac compare --modes" in out
    assert "# made by: sac plan" in path.read_text()
    assert sac.load_policy(str(path)).rules


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(
        run(capsys, "--seq", "32", "--budget", "50%", "--device", "h100", "--json", "--optimizer", "adam")
    )
    assert found["device"] == "h100"
    assert found["rows"][0]["fits"]
    assert found["rows"][0]["peak_bytes"] <= found["budget_bytes"]
    assert found["extra_bytes"] > 0
    assert "schema: sac/v1" in found["policy"]


def test_best_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert "yes, best" in run(capsys, "--seq", "32", "--budget", "300KiB", "--batch", "1..2")
    found = json.loads(run(capsys, "--seq", "32", "--budget", "300KiB", "--batch", "1..16", "--json"))
    assert sum(row["best"] for row in found["sizes"]) == 1
    sizes = [row["batch"] for row in found["sizes"]]
    assert sorted(set(sizes)) == sizes
    assert all(row["fits"] == (row["peak_bytes"] <= 300 * 2**10) for row in found["sizes"])


def test_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--budget", "50%", "--fsdp", "2", "--device", "a100", "--json"))
    assert found["rows"][0]["fits"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "the memory of a CPU is not known"),
        (("--budget", "1KiB"), "is below the least peak"),
        (("--budget", "50%", "--batch", "1..4"), "a share of a range"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str) -> None:
    assert message in run(capsys, *more, code=1)
