"""The matrix of stacks: what is a difference, what is a reason not to run, and that its page has every row."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stacks.composition import Outcome
from tests.stacks.matrix import CLOSE, DIFFER, EQUAL, Line, compared, line_of, missing_in
from tests.stacks.registry import EVERY_MODE, MODES, STACKS, Stack, stack_named
from tests.support.ranks import RankError, run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "composition_matrix.py"


def made(value: float, flops: int = 100, kept: int = 10, sent: int = 4) -> Outcome:
    collectives = {"gloo:all_reduce": sent} if sent else {}
    return Outcome([float(value)], {"weight": torch.tensor([1.0, value])}, flops, kept, collectives)


def test_ratios_are_over_all_processes():
    cell = compared("full", [made(1, 120, 2), made(1, 140, 3)], [made(1), made(1)], rounded=False)
    assert (cell.gradients, cell.flops, cell.kept, cell.sent) == (EQUAL, 1.3, 0.25, 1.0)


def test_one_bit_on_one_process_is_a_difference():
    near = 1 + 2e-7
    cell = compared("full", [made(1), made(near)], [made(1), made(1)], rounded=False)
    assert cell.gradients == DIFFER
    assert cell.different == ("losses", "weight")
    assert compared("full", [made(1), made(near)], [made(1), made(1)], rounded=True).gradients == CLOSE
    assert compared("full", [made(1), made(1.1)], [made(1), made(1)], rounded=True).gradients == DIFFER


def test_a_gradient_that_is_not_there_is_a_difference_up_to_rounding_too():
    lost = replace(made(1), gradients={"other": torch.ones(2)})
    assert compared("full", [lost], [made(1)], rounded=True).different == ("other", "weight")


def test_nothing_sent_has_no_ratio():
    assert compared("full", [made(1, sent=0)], [made(1, sent=0)], rounded=False).sent is None


def test_a_mode_that_does_nothing_fails():
    cell = compared("full", [made(1)], [made(1)], rounded=False)
    assert cell.idle
    assert Line("plain", 1, (cell,)).failed
    for working in (made(1, flops=101), made(1, kept=9)):
        assert not Line("plain", 1, (compared("full", [working], [made(1)], rounded=False),)).failed


def absent(mode: Any) -> Outcome:
    import a_package_that_nobody_has  # noqa: F401

    raise AssertionError


def skipped(mode: Any) -> Outcome:
    pytest.skip("no such kernel on CPU")


def broken(mode: Any) -> Outcome:
    raise ValueError("the first line\nwhat it comes to")


REASON = "the package a_package_that_nobody_has is not installed"


@pytest.mark.parametrize(
    ("name", "missing", "error"),
    [("absent", REASON, ""), ("skipped", "no such kernel on CPU", ""), ("broken", "", "what it comes to")],
)
def test_a_stack_that_cannot_run_keeps_its_row_and_says_why(name, missing, error):
    line = line_of(Stack(name, f"test_matrix:{name}"))
    assert [(cell.mode, cell.missing, cell.error) for cell in line.cells] == [
        ("full", missing, error),
        ("selective", missing, error),
    ]
    assert line.failed == bool(error)


@pytest.mark.parametrize(("function", "reason"), [(absent, REASON), (skipped, "no such kernel on CPU")])
def test_reasons_come_out_of_other_processes(function: Callable[..., Any], reason: str):
    with pytest.raises(RankError) as error:
        run_ranks(2, function, "full")
    assert missing_in(error.value) == reason


def test_what_else_a_process_raises_is_no_reason():
    assert missing_in(RankError("rank 0: Traceback\nValueError: No module named 'sac'")) == ""


def test_names_are_said_once_and_modes_exist():
    names = [stack.name for stack in STACKS]
    assert len({name.lower() for name in names}) == len(names)
    for stack in STACKS:
        assert set(stack.modes) <= set(EVERY_MODE) <= set(MODES)


@pytest.mark.parametrize("name", ["plain", "FSDP2"])
def test_a_row_of_the_matrix(name):
    line = line_of(stack_named(name))
    assert not line.failed
    full, selective = (next(cell for cell in line.cells if cell.mode == mode) for mode in ("full", "selective"))
    assert full.gradients == selective.gradients == EQUAL
    assert 1 < selective.flops < full.flops < 4 / 3
    assert full.kept < selective.kept < 1
    assert (full.sent is None) == (name == "plain")


@pytest.fixture
def script(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import composition_matrix

    return composition_matrix


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    return script.main()


def test_json_has_what_the_table_has(script, monkeypatch, capsys):
    assert run(script, monkeypatch, "--stack", "PLAIN", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__
    (line,) = found["stacks"]
    assert (line["stack"], line["world"]) == ("plain", 1)
    assert [(cell["mode"], cell["gradients"]) for cell in line["cells"]] == [("full", EQUAL), ("selective", EQUAL)]


def test_a_difference_ends_the_script_with_1_and_is_named(script, monkeypatch, capsys):
    cell = compared("full", [made(2)], [made(1)], rounded=False)
    monkeypatch.setattr(script, "lines_of", lambda stacks, progress: [Line("plain", 1, (cell,))])
    assert run(script, monkeypatch) == 1
    printed = capsys.readouterr().out
    assert re.search(r"plain +1 +DIFFER  1\.00  1\.00  1\.00 +– +–", printed)
    assert "plain, full: 2 differ: losses, weight\n" in printed


def test_a_package_that_is_missing_is_told_and_no_failure(script, monkeypatch, capsys):
    line = line_of(Stack("a stack", "test_matrix:absent"))
    monkeypatch.setattr(script, "lines_of", lambda stacks, progress: [line])
    assert run(script, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert re.search(r"a stack +1 +cannot run here +cannot run here +–", printed)
    assert f"a stack, full: {REASON}\n" in printed


def test_a_stack_that_there_is_not(script, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run(script, monkeypatch, "--stack", "FSDP22")
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(
        "composition_matrix.py: error: there is no stack 'FSDP22'; did you mean 'FSDP2'? --list prints all\n"
    )


def test_the_page_has_every_row_and_no_other():
    text = (ROOT / "docs/stacks.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- matrix -->\n(.*?)<!-- /matrix -->", text, re.DOTALL)
    assert block, "docs/stacks.md has no matrix"
    told = re.findall(r"^  (\S.*?)  +\d  ", block[1], re.MULTILINE)
    assert told == [stack.name for stack in STACKS]
