"""docs/planning.md: its commands run, and the table has the bytes and FLOPs that they print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import sac
from sac.tools.cli import main
from tests.docs.pages import ROOT, rows, snippets
from tests.unit.planner.test_sharding import Model, inputs

PAGE = "docs/planning.md"
COMMANDS = [line[2:] for text in snippets(PAGE, "console") for line in text.splitlines() if line.startswith("$ ")]
WITHOUT_TIMES = re.compile(r"^ +([a-z0-9%+ ]+?) {2,}(\S+ \S+) +(\S+ \S+) +(\S+ \S+) +\S+ ms .*(yes|no) +(\w+)$", re.M)


@pytest.mark.slow
def test_commands_run_and_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    printed = []
    for command in COMMANDS:
        if printed:  # what the others print is not on the page
            monkeypatch.setattr("sac.planner.pareto.MOST_BEST", 12)
        program, *words = shlex.split(command)
        assert program == "sac"
        assert main(words) == 0, command
        printed.append(capsys.readouterr().out)
    shown = WITHOUT_TIMES.findall(snippets(PAGE, "console")[0])
    found = WITHOUT_TIMES.findall("\n".join(line.rstrip() for line in printed[0].splitlines()))
    assert len(shown) == 15
    assert found == shown
    assert (tmp_path / "curve.svg").exists()


def test_the_python_for_one_rank_of_two_gives_a_policy_that_loads() -> None:
    names: dict[str, Any] = {"sac": sac, "model": Model(), "inputs": inputs()}
    (snippet,) = snippets(PAGE, "python")
    exec(compile(snippet, PAGE, "exec"), names)
    assert sac.load_policy(names["policy"]).plan is not None


def test_all_commands_are_of_sac_plan() -> None:
    assert len(COMMANDS) == 4
    assert all(command.startswith("sac plan --") for command in COMMANDS)


def test_the_rows_that_are_explained_are_those_of_the_table() -> None:
    told = {word for cells in rows(PAGE, "row") for word in re.findall(r"`([^`]+)`", cells[0])}
    labels = {label for label, *_ in WITHOUT_TIMES.findall(snippets(PAGE, "console")[0])}
    assert {label for label in labels if not label.endswith("of the range")} == told - {"…% of the range"}
