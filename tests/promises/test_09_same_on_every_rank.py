"""Collectives of every kind are replayed, each as often as without us says; a difference on one rank raises there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stacks.composition import Outcome, differences, least_kept
from tests.support.rank_programs import BODIES, told_of_a_difference, trained
from tests.support.ranks import run_ranks
from tests.support.ways import POLICIES

STEPS = 2  # those of `outcome`
REGIONS = 2


def outcomes(name: str, engine: str, chosen: dict[str, Any]) -> list[tuple[Outcome, int, list[str]]]:
    found: list[tuple[Outcome, int, list[str]]] = run_ranks(2, trained, name, engine, chosen)
    return found


QUICK = next(iter(BODIES))


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BODIES]
)
def test_collectives_in_a_region(name: str) -> None:
    plain = outcomes(name, "none", POLICIES["nothing"])
    for chosen in (POLICIES["nothing"], POLICIES["matmuls"]):
        ours = outcomes(name, "replay", chosen)
        rerun = outcomes(name, "rerun", chosen)
        for (seen, calls, said), (reference, _, _), (again, _, _) in zip(ours, plain, rerun, strict=True):
            assert differences(seen, reference) == []
            assert (said, calls) == ([], STEPS * REGIONS)
            assert seen.collectives == again.collectives
            assert seen.flops <= again.flops
        assert least_kept([seen for seen, *_ in ours], [again for again, *_ in rerun]) <= 1


FOUND = (
    "blocks.0: saved tensor {} (float32[8, 8]) is replayed with other values than forward had\n"
    "    fix: set `engine: rerun` for this model"
)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "inside", "saved"), [("replay", False, 1), ("auto", False, 1), ("replay", True, 2)])
def test_difference_on_one_rank_raises_where_ranks_meet(engine: str, inside: bool, saved: int) -> None:
    """In an op on the tape, or inside an op of a DTensor. The other rank goes on, and no rank waits for ever."""
    assert run_ranks(2, told_of_a_difference, engine, inside, timeout=60.0) == [FOUND.format(saved), "no error"]
