"""`--explain` of `sac plan` and `sac compare`: the table, the advice, the JSON and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sac.errors import PlanError, Problem
from sac.planner.peak import ACTIVATIONS, GRADIENTS, HEAD, PARAMETERS, AliveRow, Curve, PeakBreakdown
from sac.tools.cli import main
from sac.tools.peak_table import print_explained

MIB = 2**20
MODEL = ["--model", "tests.unit.planner.plan_models:stack"]
CURVE = Curve((), ())


def breakdown(label: str, *rows: AliveRow) -> PeakBreakdown:
    rows = tuple(sorted(rows, key=lambda row: -row.bytes))
    return PeakBreakdown(label, "in the backward of lm_head (mm)", sum(row.bytes for row in rows), MIB, rows, CURVE)


HIGH = breakdown(
    "plan",
    AliveRow(HEAD, "lm_head", "aten.mm.default", "", 1, 60 * MIB),
    AliveRow(HEAD, "(model)", "aten._log_softmax.default", "", 1, 20 * MIB),
    AliveRow(PARAMETERS, "(model)", "", "", 3, MIB),
    *(AliveRow(ACTIVATIONS, f"layers.0-3.m{n}", "aten.add.Tensor", "rule a", 4, 2 * MIB, True) for n in range(8)),
    AliveRow(GRADIENTS, "layers.0-3", "", "", 8, 100),
)
LOW = breakdown("least", AliveRow(HEAD, "lm_head", "aten.mm.default", "", 1, 60 * MIB))

WHOLE = """
plan: peak 97.0 MiB (101711972 bytes, 1048576 of them before the step), in the backward of lm_head (mm)
  alive at the peak      bytes   share   tensors   made by        kept by
 ────────────────────────────────────────────────────────────────────────
  logits and loss     80.0 MiB   82.5%         2
    lm_head           60.0 MiB   61.9%         1   mm
    (model)           20.0 MiB   20.6%         1   _log_softmax
  activations         16.0 MiB   16.5%        32
    layers.0-3.m0      2.0 MiB    2.1%         4   add.Tensor     rule a
    layers.0-3.m1      2.0 MiB    2.1%         4   add.Tensor     rule a
    layers.0-3.m2      2.0 MiB    2.1%         4   add.Tensor     rule a
    layers.0-3.m3      2.0 MiB    2.1%         4   add.Tensor     rule a
    layers.0-3.m4      2.0 MiB    2.1%         4   add.Tensor     rule a
    layers.0-3.m5      2.0 MiB    2.1%         4   add.Tensor     rule a
    2 smaller          4.0 MiB    4.1%         8
  parameters           1.0 MiB    1.0%         3
  gradients              100 B    0.0%         8
a policy decides on 16.0 MiB (16.5%) of this peak

  alive at the peak       plan      least
 ────────────────────────────────────────
  parameters           1.0 MiB        0 B
  gradients              100 B        0 B
  activations         16.0 MiB        0 B
  logits and loss     80.0 MiB   60.0 MiB
  together            97.0 MiB   60.0 MiB

Below it:
- logits and loss, 60.0 MiB: a chunked or fused loss, which never holds all logits at once; or a smaller batch, with \
more accumulation steps
"""


def test_the_whole_text_of_an_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    print_explained([HIGH], [HIGH, LOW], "Below it:")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == WHOLE.splitlines()


def test_a_peak_that_no_policy_lowers_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_explained([LOW], [LOW], "Below it:")
    assert "a policy decides on 0 B (0.0%) of this peak: another policy hardly lowers it" in capsys.readouterr().out


def test_a_plan_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "peak.png"
    assert main(["plan", *MODEL, "--budget", "50%", "--explain", str(picture)]) == 0
    streams = capsys.readouterr()
    assert "plan: peak " in streams.out
    assert "alive at the peak" in streams.out
    assert "Whatever these blocks save, the peak is at least " in streams.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"picture: {picture}" in streams.err


def test_a_plan_is_explained_in_json_and_only_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, "--budget", "50%", "--explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = found["explained"][0]
    assert plan["peak_bytes"] == found["plan"]["peak_bytes"] == sum(row["bytes"] for row in plan["rows"])
    assert plan["peak_bytes"] == sum(plan["categories"].values())
    assert main(["plan", *MODEL, "--budget", "50%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["explained"] == []


def test_a_plan_for_a_gpu_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, "--budget", "50%", "--device", "h100", "--explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["explained"][0]["peak_bytes"] == found["plan"]["peak_bytes"]


def test_a_comparison_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "peaks.png"
    modes = ["--modes", "none,full", "--steps", "2"]
    assert main(["compare", *MODEL, *modes, "--explain", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "\nnone: peak " in out
    assert "\nfull: peak " in out
    assert "What lowers the peak of full where no policy does:" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["compare", *MODEL, *modes, "--explain", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["modes"]:
        at_peak = row["explained"]
        assert at_peak["peak_bytes"] - at_peak["before_bytes"] == row["peak_bytes"]
        assert at_peak["peak_bytes"] == sum(one["bytes"] for one in at_peak["rows"])


def test_a_peak_that_cannot_be_explained_keeps_its_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PlanError(Problem("aten.op", "it cannot run twice"))

    monkeypatch.setattr("sac.tools.comparison.explained_step", refuse)
    assert main(["compare", *MODEL, "--modes", "none", "--steps", "2", "--explain", "--json"]) == 0
    streams = capsys.readouterr()
    (row,) = json.loads(streams.out)["modes"]
    assert row["peak_bytes"] > 0
    assert row["explained"] is None
    assert row["not_explained"] == "aten.op: it cannot run twice"
    assert "none: its peak is not explained: aten.op: it cannot run twice" in streams.err


@pytest.mark.parametrize("command", [["plan", *MODEL, "--budget", "50%"], ["compare", *MODEL]])
def test_a_picture_that_cannot_be_saved_is_refused_before_anything_runs(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--explain", "peak.pgn"]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("peak.pgn: the picture cannot be saved: Format 'pgn' is not supported")
