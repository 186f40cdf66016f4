"""Random programs that change between steps leave the same as without us, bit for bit, after each step."""

from __future__ import annotations

import pytest

from tests.fuzz.changing.programs import draw_program, write_program
from tests.fuzz.changing.runs import ENGINES, ERROR, MODES, WRONG, Outcome, Prepared, outcome, program_of
from tests.fuzz.changing.shrinking import shrunk
from tests.fuzz.changing.programs import Item, Program


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_engines_are_exact(first: int) -> None:
    """Auto and replay run each program, whatever its Python does."""
    for seed in range(first, first + 10):
        prepared = program_of(seed)
        for way in ENGINES:
            result = outcome(prepared, way)
            assert result.kind == "equal", told(seed, way, result)


@pytest.mark.parametrize("first", range(60, 100, 10))
def test_modes_that_run_python_twice_are_exact_or_refuse(first: int) -> None:
    """Where the state that they would have to compare can be seen."""
    for seed in range(first, first + 10):
        prepared = program_of(seed)
        for way in MODES:
            result = outcome(prepared, way)
            assert result.kind not in (WRONG, ERROR), told(seed, way, result)


def told(seed: int, way: str, result: Outcome) -> str:
    return f"step {result.step}: {result.kind}: {result.detail} (scripts/fuzz_changes --shrink {seed} --ways {way})"


def test_a_seed_is_one_program() -> None:
    assert write_program(draw_program(5)) == write_program(draw_program(5))
    assert draw_program(5) != draw_program(6)


WRITES_GLOBAL = Item("global counter", 0)
