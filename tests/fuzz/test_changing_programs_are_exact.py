"""Random programs that change between steps leave the same as without us, bit for bit, after each step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.fuzz.changing.instructions import CHANGES, CHANGING, CONDITIONS
from tests.fuzz.changing.programs import INSIDE, KINDS, STATES, STEPS, Item, Program, write_program
from tests.fuzz.changing.runs import (
    ENGINES,
    EQUAL,
    LIMIT,
    MODES,
    OUTSIDE,
    REFUSED,
    UNSEEN,
    WRONG,
    Invalid,
    Outcome,
    Prepared,
    outcome,
    prepare,
    program_of,
    runs_python_twice,
    shrunk,
    ways_of,
)

OTHERS = tuple(way for way in (*ENGINES, *MODES) if way != "replay")
REFUSES = {  # what a region cannot put back
    ("lazy linear", "context_fn"),
    *(("tensor written by loop", way) for way in MODES),
}
LIMITS = {"transforms", "optimizer in backward", "weights written between passes"}


def of(*names: str, knob: int = 0) -> Program:
    """Two blocks of a class with these instructions between two that do not change."""
    items = [Item(each, knob, *((Item("pure", 1),), (Item("weight", 2),)) * (each in CONDITIONS)) for each in names]
    return Program(0, ((Item("linear", 1), *items, Item("perceptron", 3)),), (0, 0), (0, 1), (), ("plain",) * STEPS)


def program(name: str, knob: int) -> Program:
    if name in CHANGES:
        return replace(of("in place", "dropout layer", "counted", "pure", knob=knob), changes=(Item(name, knob),))
    if name in KINDS:
        state = of("embedding", "memory", "large tensors", "counted", "dropout layer", "if counter", knob=knob)
        return replace(state, kinds=(name,) * STEPS)
    if name in STATES:
        fields = ["field rebound", "field counted", "pure"]
        if name != "dict":  # a rerun refuses a write to a tensor in an entry
            fields.insert(1, "field written")
        return replace(of(*fields, knob=knob), state=name, kinds=("backward twice",) * STEPS)
    if name == INSIDE:
        inner = [Item(each, knob) for each in ("counted", "kept values", "memory", "number of Python or NumPy")]
        return replace(of(), blocks=((Item("linear", 1), Item(INSIDE, knob, tuple(inner)), Item("pure", 2)),))
    if name == "gradient after a write":
        return of("normalized weight", "gradient inside", "pure", knob=knob)
    return of(name, knob=knob)


NAMES = (*CHANGING, *CONDITIONS, *CHANGES, *KINDS, *STATES, INSIDE, "gradient after a write")


def prepared(name: str, at: int) -> Iterator[Prepared]:
    """Two programs that run without us, different ones where the name allows it."""
    sources: dict[str, Prepared] = {}
    for knob in range(at, at + 30):
        one = program(name, knob)
        source = write_program(one)[0]
        if source not in sources:
            with contextlib.suppress(Invalid):
                sources[source] = prepare(one)
        if len(sources) == 2:
            break
    return itertools.islice(itertools.cycle(sources.values()), 2)


@pytest.mark.parametrize("name", NAMES)
def test_each_change_is_exact(name: str) -> None:
    """In ways that run Python twice, a region may refuse what is outside of its contract."""
    at = NAMES.index(name)
    for one, way in zip(prepared(name, at), ("replay", OTHERS[at % len(OTHERS)]), strict=True):
        found = replace(one, program=replace(one.program, seed=at))  # which policy the way has
        result = outcome(found, way)
        allowed = {EQUAL}
        if OUTSIDE & found.features and runs_python_twice(found, way):
            allowed |= {REFUSED, UNSEEN}
        if (name, way) in REFUSES:
            allowed |= {REFUSED}
        if name in LIMITS:
            allowed |= {LIMIT}
        assert result.kind in allowed, f"{way}, step {result.step}: {result.kind}: {result.detail}\n{found.source}"


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_engines_are_exact(first: int) -> None:
    """Whatever a program's Python does."""
    for seed in range(first, first + 10):
        prepared = program_of(seed)
        for way in ways_of(seed, ENGINES, 1):
            result = outcome(prepared, way)
            refuses = (REFUSED, UNSEEN) if runs_python_twice(prepared, way) else ()
            assert result.kind in (EQUAL, LIMIT, *refuses), told(seed, way, result)


@pytest.mark.parametrize("first", range(100, 120, 10))
def test_ways_that_run_python_twice_are_exact_or_refuse(first: int) -> None:
    """Where the state that they would have to compare can be seen."""
    for seed in range(first, first + 10):
        prepared = program_of(seed)
        for way in ways_of(seed, MODES, 1):
            result = outcome(prepared, way)
            assert result.kind in (EQUAL, LIMIT, REFUSED, UNSEEN), told(seed, way, result)


def test_a_budget_changes_nothing_but_memory() -> None:
    for seed in range(200, 210):
        result = outcome(program_of(seed), "budget")
        assert result.kind in (EQUAL, LIMIT, REFUSED, UNSEEN), told(seed, "budget", result)


def told(seed: int, way: str, result: Outcome) -> str:
    return f"step {result.step}: {result.kind}: {result.detail} (scripts/fuzz changes --shrink {seed} --ways {way})"


def test_a_wrong_result_is_found_and_shrunk() -> None:
    """Torch's own checkpoint counts twice, and does not say so."""
    found = prepare(of("counted", knob=4))
    assert outcome(found, "torch").kind == WRONG
    assert [item.name for item in shrunk(found, "torch").program.blocks[0]] == ["counted", "perceptron"]


def test_a_wrong_result_where_state_cannot_be_seen_is_counted_by_itself() -> None:
    found = prepare(of("normalized weight by data", knob=1))
    assert outcome(found, "torch").kind == UNSEEN
