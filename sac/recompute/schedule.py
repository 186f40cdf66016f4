"""Which ops of a tape have to run again, and the same answer for later calls with the same tape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sac.recompute.op_trace import SavedFigures
from sac.recompute.table import CallSite
from sac.recompute.tape import Tape

# -- Which entries of a tape have to run again to give backward what it waits for, and how long each value is needed

# Note [What is replayed]
#
# The tape is walked once, backwards. An entry runs again if it makes a value that is wanted and not kept, or writes to
# a root that is wanted at that point; what it reads is wanted then, values and roots. So what only feeds kept values
# does not run. A collective before the last entry that runs does, whoever reads it, unless its results are kept: the
# other ranks may need it, as they do when Python runs again. The step that first meets a value on this walk is the last
# to read it, and lets it go. A waiting tensor is filled by the last step that makes it or writes to its root.
#
# Without early stop every entry runs again whose results are not kept, up to the end of the tape, as when Python runs
# again: ranks that ran other ops around a collective all come to it.


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that backward waits for: the number of its handle, its value, and before which entry it was saved."""

    handle: int
    value: int
    time: int


@dataclass(slots=True)
class Step:
    """One entry that runs again. ``outputs``: which of its results are used, and their numbers."""

    number: int
    outputs: tuple[tuple[int, int], ...]
    fills: tuple[tuple[int, int], ...]  # handles to fill after it, with their values
    frees: tuple[int, ...]  # values that nothing reads after it


@dataclass(slots=True)
class ReplaySchedule:
    """Steps in order. ``fills``: handles that are filled before the first. ``written``: roots that steps write to."""

    steps: list[Step]
    fills: list[tuple[int, int]]
    kept: list[int]
    leaves: list[int]
    written: frozenset[int]
    handles: frozenset[int]
    orders: list[Any] = field(default_factory=list)  # the steps as `replay.py` runs them
    steps_by_number: dict[int, Step] = field(default_factory=dict)


def schedule_replay(
    tape: Tape, wanted: Sequence[Wanted], *, early_stop: bool = True, whole: ReplaySchedule | None = None
) -> ReplaySchedule:
    """Return what to run again so that all ``wanted`` can be filled; see Note [What is replayed].

    ``whole``: the plan for all that was missing at the end of the forward, where this one is for a part of it.
    """
    walk = _Walk(tape, to_the_end=bool(wanted) and not early_stop)
    if walk.to_the_end and whole is not None:
        walk.unsaved = {step.number for step in whole.steps}
    left = sorted(wanted, key=lambda one: one.time)
    last = left[-1].time if left else 0
    if walk.to_the_end:
        last = len(tape.sites)
    for number in range(last - 1, -1, -1):
        while left and left[-1].time > number:
            walk.want(left.pop())
        walk.visit(number)
    for one in left:
        walk.want(one)
    return walk.schedule(wanted)


class _Walk:
    """The state of one walk backwards over a tape."""

    def __init__(self, tape: Tape, *, to_the_end: bool = False) -> None:
        self._tape = tape
        self.to_the_end = to_the_end
        self.unsaved: set[int] | None = None  # entries that run to the end, once what no op reads has been let go
        self._roots, self._kept, self._leaves, self._writes = tape.roots, tape.kept, tape.leaves, tape.writes
        self._needed: set[int] = set()  # values that are read by what was met so far
        self._needed_roots: set[int] = set()
        self._waiting: dict[int, list[int]] = {}  # value -> handles not filled yet
        self._written: set[int] = set()
        self._draws: set[int] = set()  # entries that have to draw before one that runs does
        self._steps: list[Step] = []

    def want(self, one: Wanted) -> None:
        self._waiting.setdefault(one.value, []).append(one.handle)
        self._needed_roots.add(self._roots[one.value])

    def visit(self, number: int) -> None:
        tape = self._tape
        first, count = tape.first_outputs[number], tape.output_counts.get(number, 1)
        needed, waiting = self._needed, self._waiting
        outputs = [
            (place, value)
            for place, value in enumerate(range(first, first + count))
            if (value in needed or value in waiting) and value not in self._kept
        ]
        writes: Any = self._writes.get(number, ())
        runs = bool(outputs) or (writes and not self._needed_roots.isdisjoint(writes))
        if not runs and number not in self._draws and not self._is_due(number) and not self._is_unsaved(number):
            return
        self._draws.update(tape.draws_after.get(number, ()))
        frees: list[int] = []
        fills: list[tuple[int, int]] = []
        for _, value in outputs:
            for handle in waiting.pop(value, ()):
                fills.append((handle, value))
            if value not in needed:
                frees.append(value)  # filled, and read by nothing
        if writes:
            self._written.update(writes)
            for value in [value for value in waiting if self._roots[value] in writes]:
                fills += [(handle, value) for handle in waiting.pop(value)]
                self._read(value, frees)
        for value in tape.reads[number]:
            self._read(value, frees)
        self._steps.append(Step(number, tuple(outputs), tuple(fills), tuple(frees)))

    def _is_unsaved(self, number: int) -> bool:
        """Whether the op of an entry runs again because nothing stops replay before it, and nothing is kept of it."""
        if self.unsaved is not None:
            return number in self.unsaved
        tape = self._tape
        schedule = tape.sites[number]
        if not self.to_the_end or not isinstance(schedule, CallSite) or schedule.is_view:
            return False
        first = tape.first_outputs[number]
        results = range(first, first + tape.output_counts.get(number, 1))
        return not results or any(value not in self._kept for value in results)

    def _is_due(self, number: int) -> bool:
        """Whether a collective has to run although nothing here reads it."""
        tape = self._tape
        schedule = tape.sites[number]
        if not getattr(schedule, "is_collective", False):
            return False
        if not (self._steps or self._waiting):
            return False
        first = tape.first_outputs[number]
        results = range(first, first + tape.output_counts.get(number, 1))
        if schedule.is_view and all(value in self._kept for value in tape.reads[number]):
            return False  # the wait for a result that is kept
        return not results or any(value not in self._kept for value in results)

    def _read(self, value: int, frees: list[int]) -> None:
        if value not in self._needed:
            self._needed.add(value)
            frees.append(value)
        self._needed_roots.add(self._roots[value])

    def schedule(self, wanted: Sequence[Wanted]) -> ReplaySchedule:
        fills = [(handle, value) for value, handles in self._waiting.items() for handle in handles]
        read = self._needed | {value for _, value in fills}
        return ReplaySchedule(
            steps=self._steps[::-1],
            fills=fills,
            kept=sorted(value for value in read if value in self._kept),
            leaves=sorted(value for value in read if value in self._leaves and value not in self._kept),
            written=frozenset(self._written),
            handles=frozenset(one.handle for one in wanted),
        )


# -- What calls of one kind of region have in common: the shape of their tapes, and the replay that follows from it

# Note [Programs]
#
# Calls of one kind of region on one sort of inputs leave the same tape, as a rule: the same ops on the same values, the
# same saved. What differs is in the arguments that are no tensors, in random states, and in the values kept. So the
# plan of a replay, which hangs on none of these, is worked out once, and calls share it together with the lists that
# say which op reads what. A call whose tape is another one, for any reason, gets a plan of its own.

Places = dict[int, tuple[int, int, int]]


class TapeLayout:
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
        "schedule",
        "sizes",
    )

    def __init__(self, tape: Tape, places: Places, missing: list[int], schedule: ReplaySchedule) -> None:
        self.schedule = schedule
        self.sizes: list[int] = []  # bytes of what the policy saved in the call that was counted last
        self.figures: SavedFigures | None = None  # of that call
        self._plans, self._reads, self._firsts, self._roots = tape.sites, tape.reads, tape.first_outputs, tape.roots
        self._counts, self._writes = tape.output_counts, tape.writes
        self._kept, self._leaves = [*tape.kept], _positions(tape)
        self._places, self._missing = places, missing

    def matches(self, tape: Tape, places: Places, missing: list[int]) -> bool:
        """Return whether the plan is that of ``tape`` too."""
        return (
            self._plans == tape.sites
            and self._reads == tape.reads
            and self._firsts == tape.first_outputs
            and self._roots == tape.roots
            and self._missing == missing
            and self._places == places
            and self._counts == tape.output_counts
            and self._writes == tape.writes
            and self._kept == [*tape.kept]
            and self._leaves == _positions(tape)
        )

    def share_lists_with(self, tape: Tape) -> None:
        """Let ``tape``, which fits, use the lists that all such tapes have in common."""
        tape.sites, tape.reads, tape.first_outputs, tape.roots = self._plans, self._reads, self._firsts, self._roots


def _positions(tape: Tape) -> list[Any]:
    return [(value, leaf.position) for value, leaf in tape.leaves.items()]
