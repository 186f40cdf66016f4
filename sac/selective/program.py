"""What calls of one kind of region have in common: the shape of their tapes, and the replay that follows from it."""

from __future__ import annotations

from typing import Any

from sac.selective.replay_plan import ReplayPlan
from sac.selective.stats import KeptFigures
from sac.selective.tape import Tape

# Note [Programs]
#
# Calls of one kind of region on one sort of inputs leave the same tape, as a rule: the same ops on the same values, the
# same saved. What differs is in the arguments that are no tensors, in random states, and in the values kept. So the
# plan of a replay, which hangs on none of these, is worked out once, and calls share it together with the lists that
# say which op reads what. A call whose tape is another one, for any reason, gets a plan of its own.

Places = dict[int, tuple[int, int, int]]


class Program:
    """The shape of a tape, and its plan; see Note [Programs]. ``places``: of missing handles on the tape."""

    __slots__ = (
        "_counts",
        "_firsts",
        "_kept",
        "_leaves",
        "_missing",
        "_places",
        "_plans",
        "_reads",
        "_roots",
        "_writes",
        "figures",
        "plan",
        "sizes",
    )

    def __init__(self, tape: Tape, places: Places, missing: list[int], plan: ReplayPlan) -> None:
        self.plan = plan
        self.sizes: list[int] = []  # bytes of what the policy saved in the call that was counted last
        self.figures: KeptFigures | None = None  # of that call
        self._plans, self._reads, self._firsts, self._roots = tape.plans, tape.reads, tape.firsts, tape.roots
        self._counts, self._writes = tape.counts, tape.writes
        self._kept, self._leaves = [*tape.kept], _positions(tape)
        self._places, self._missing = places, missing

    def fits(self, tape: Tape, places: Places, missing: list[int]) -> bool:
        """Return whether the plan is that of ``tape`` too."""
        return (
            self._plans == tape.plans
            and self._reads == tape.reads
            and self._firsts == tape.firsts
            and self._roots == tape.roots
            and self._missing == missing
            and self._places == places
            and self._counts == tape.counts
            and self._writes == tape.writes
            and self._kept == [*tape.kept]
            and self._leaves == _positions(tape)
        )

    def lend(self, tape: Tape) -> None:
        """Let ``tape``, which fits, use the lists that all such tapes have in common."""
        tape.plans, tape.reads, tape.firsts, tape.roots = self._plans, self._reads, self._firsts, self._roots


def _positions(tape: Tape) -> list[Any]:
    return [(value, leaf.position) for value, leaf in tape.leaves.items()]
