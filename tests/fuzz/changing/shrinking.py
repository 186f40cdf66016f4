"""Making a program that fails smaller."""

from __future__ import annotations

from tests.fuzz.changing.programs import Program, smaller
from tests.fuzz.changing.runs import Invalid, Outcome, Prepared, outcome, prepare


def shrunk(prepared: Prepared, way: str) -> Prepared:
    """The program with everything left out that it does not need to fail in this way; itself if it does not fail."""
    kind = signature(outcome(prepared, way))
    found = True
    while found:
        found = False
        for candidate in smaller(prepared.program):
            one = _failing(candidate, way, kind)
            if one is not None:
                prepared, found = one, True
                break
    return prepared


def signature(result: Outcome) -> tuple[str, str]:
    """What a smaller program has to fail by: the kind of failure, and what an error begins with."""
    return result.kind, "" if result.kind in ("wrong", "unseen") else result.detail.partition(":")[0]


def _failing(candidate: Program, way: str, kind: tuple[str, str]) -> Prepared | None:
    try:
        prepared = prepare(candidate)
    except Invalid:
        return None
    return prepared if signature(outcome(prepared, way)) == kind else None
