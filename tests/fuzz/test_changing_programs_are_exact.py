"""Random programs that change between steps leave the same as without us, bit for bit, after each step."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.fuzz.changing import reporting
from tests.fuzz.changing.programs import STEPS, Item, Program, draw_program, write_program
from tests.fuzz.changing.runs import (
    ENGINES,
    EQUAL,
    LIMIT,
    MODES,
    REFUSED,
    UNSEEN,
    WAYS,
    WRONG,
    Outcome,
    outcome,
    prepare,
    program_of,
    runs_python_twice,
    ways_of,
)
from tests.fuzz.changing.shrinking import shrunk


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_engines_are_exact(first: int) -> None:
    """Whatever a program's Python does."""
    for seed in range(first, first + 10):
        prepared = program_of(seed)
        for way in ways_of(seed, ENGINES, 1):
            result = outcome(prepared, way)
            refuses = (REFUSED, UNSEEN) if runs_python_twice(prepared, way) else ()
            assert result.kind in (EQUAL, LIMIT, *refuses), told(seed, way, result)


@pytest.mark.parametrize("first", range(100, 140, 10))
def test_ways_that_run_python_twice_are_exact_or_refuse(first: int) -> None:
    """Where the state that they would have to compare can be seen."""
    for seed in range(first, first + 10):
        prepared = program_of(seed)
        for way in ways_of(seed, MODES, 1):
            result = outcome(prepared, way)
            assert result.kind in (EQUAL, LIMIT, REFUSED, UNSEEN), told(seed, way, result)


FOUND_WRONG = {
    502900: "replay",  # to the end, in two parts: it drew again what the policy had saved
    507139: "replay",
    703096: "replay",  # a NumPy write in the forward, before a gradient inside the region
    303788: "modules",  # a module in a list, a counter in a closure
}


@pytest.mark.parametrize(("seed", "way"), FOUND_WRONG.items())
def test_programs_that_were_wrong_once(seed: int, way: str) -> None:
    result = outcome(program_of(seed), way)
    assert result.kind == EQUAL, told(seed, way, result)


def told(seed: int, way: str, result: Outcome) -> str:
    return f"step {result.step}: {result.kind}: {result.detail} (scripts/fuzz changes --shrink {seed} --ways {way})"


def test_a_seed_is_one_program() -> None:
    assert write_program(draw_program(5)) == write_program(draw_program(5))
    assert draw_program(5) != draw_program(6)


def test_each_way_has_its_share() -> None:
    chosen = [way for seed in range(700) for way in ways_of(seed, WAYS, 2)]
    assert all(len(chosen) / len(WAYS) * 0.8 < chosen.count(way) < len(chosen) / len(WAYS) * 1.2 for way in WAYS)


def program(*items: Item) -> Program:
    return Program(0, (items,), (0,), (0,), (), ("plain",) * STEPS)


def test_a_wrong_result_is_found_and_shrunk() -> None:
    """Torch's own checkpoint counts twice, and does not say so."""
    found = prepare(program(Item("pure", 1), Item("linear", 1), Item("counted", 4), Item("linear", 2)))
    assert outcome(found, "torch").kind == WRONG
    assert [item.name for item in shrunk(found, "torch").program.blocks[0]] == ["counted", "linear"]


def test_a_wrong_result_where_state_cannot_be_seen_is_counted_by_itself() -> None:
    found = prepare(program(Item("linear", 1), Item("normalized weight by data", 1), Item("linear", 2)))
    assert found.hidden == {"a write by .data"}
    assert outcome(found, "torch").kind in (UNSEEN, REFUSED)


def test_the_file_that_reproduces_a_failure_says_which_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = prepare(program(Item("number in depths", 4), Item("linear", 1)))
    file = tmp_path / "reproduced.py"
    file.write_text(reporting.reproduction(found, "torch"))
    runpy.run_path(str(file), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == STEPS
    assert lines[0] == "step 0: differs in gradient of blocks.0.fc_2.weight, blocks.0.below_1"
