"""Replay schedules: which ops of a tape run again, shared by calls with the same tape layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sac.recompute.op_trace import SavedFigures
from sac.recompute.table import CallSite
from sac.recompute.tape import BareTape, Tape

# -- Replay schedules

# Note [What is replayed]
#
# The schedule is computed in one backward walk over the tape. An entry runs again if it produces a value that is wanted
# and not kept, or writes to a root that is wanted at that point. Then the values that it reads, and their roots, are
# wanted too. So an entry that only feeds kept values does not run. A collective before the last entry that runs also
# runs, whoever reads its results, unless they are kept: the other ranks may need it, as they do in a rerun of Python.
# The step at which this walk first meets a value is the last one that reads it, and frees it. A waiting handle is
# filled by the last step that produces its value or writes to its root.
#
# Without early stop, every entry whose results are not kept runs again, up to the end of the tape, as in a rerun of
# Python. So ranks that ran different ops around a collective all reach it. Neither holds inside of a module that is
# saved as a whole, which a rerun does not run.
#
# Example. The policy saves `relu`; the region runs `down(dropout(relu(up(x))))` on the CPU. Only two tensors
# that autograd saves are not kept: the dropout mask and the result of the dropout. The walk, last entry first:
#
#   entry 8  mm          after the last save, not visited
#   entry 7  t           feeds only entry 8: does not run
#   entry 6  mul         produces the result of the dropout: runs, and fills that handle
#   entry 5  div_        writes to the mask: runs, and fills the handle of the mask
#   entry 4  bernoulli_  writes to the mask: runs, from the generator state of the forward
#   entry 3  empty_like  produces the mask: runs
#   entry 2  relu        its result is kept: does not run; entries 1 (mm) and 0 (t) feed only this one


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that backward waits for: its handle, its value, and ``time``, the entry before which it was saved."""

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
    """Steps in order. ``fills``: handles filled before the first step. ``written``: roots that the steps write to."""

    steps: list[Step]
    fills: list[tuple[int, int]]
    kept: list[int]
    leaves: list[int]
    written: frozenset[int]
    handles: frozenset[int]
    orders: Any = None  # the steps in the form in which they are run, made by the first replay
    steps_by_number: dict[int, Step] = field(default_factory=dict)


def schedule_replay(
    tape: Tape | BareTape, wanted: Sequence[Wanted], *, early_stop: bool = True, whole: ReplaySchedule | None = None
) -> ReplaySchedule:
    """Return the schedule that fills all ``wanted``; see Note [What is replayed].

    The engine runs it, and the planner prices it, on the tape without tensors that a profile is.

    ``whole``: the schedule for all handles that were missing at the end of the forward, if ``wanted`` are some of them.
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
    """The state of one backward walk over a tape."""

    def __init__(self, tape: Tape | BareTape, *, to_the_end: bool = False) -> None:
        self._tape = tape
        self.to_the_end = to_the_end
        # Without early stop: entries that run, taken from the whole schedule once unread kept values have been freed.
        self.unsaved: set[int] | None = None
        self._roots, self._kept, self._leaves, self._writes = tape.roots, tape.kept, tape.leaves, tape.writes
        self._needed: set[int] = set()  # values that the steps found so far read
        self._needed_roots: set[int] = set()
        self._waiting: dict[int, list[int]] = {}  # value -> handles not filled yet
        self._written: set[int] = set()
        self._draws: set[int] = set()  # entries whose draw must precede that of an entry that runs
        self._steps: list[Step] = []

    def want(self, one: Wanted) -> None:
        self._waiting.setdefault(one.value, []).append(one.handle)
        self._needed_roots.add(self._roots[one.value])

    def visit(self, number: int) -> None:
        tape = self._tape
        needed, waiting = self._needed, self._waiting
        outputs = [
            (index, value)
            for index, value in enumerate(tape.results(number))
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
                frees.append(value)  # fills a handle, and no step reads it
        if writes:
            self._written.update(writes)
            for value in [value for value in waiting if self._roots[value] in writes]:
                fills += [(handle, value) for handle in waiting.pop(value)]
                self._read(value, frees)
        for value in tape.reads[number]:
            self._read(value, frees)
        self._steps.append(Step(number, tuple(outputs), tuple(fills), tuple(frees)))

    def _is_unsaved(self, number: int) -> bool:
        """Return whether an entry runs again because early stop is off and its results are not kept."""
        if self.unsaved is not None:
            return number in self.unsaved
        tape = self._tape
        site = tape.sites[number]
        if not self.to_the_end or not isinstance(site, CallSite) or site.is_view or site.is_inside:
            return False
        return self._has_unkept(tape.results(number))

    def _has_unkept(self, results: Sequence[int]) -> bool:
        return not results or any(value not in self._kept for value in results)

    def _is_due(self, number: int) -> bool:
        """Return whether an entry is a collective that must run although no step reads its results."""
        tape = self._tape
        site = tape.sites[number]
        if not getattr(site, "is_collective", False) or site.is_inside:
            return False
        if not (self._steps or self._waiting):
            return False
        if site.is_view and all(value in self._kept for value in tape.reads[number]):
            return False  # the wait op of a result that is kept
        return self._has_unkept(tape.results(number))

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


# -- Tape layouts

# Note [Tape layouts]
#
# Calls of one region group with the same input signature usually leave the same tape: the same ops on the same values,
# with the same values saved. They differ in non-tensor arguments, random states and the data of kept values. The replay
# schedule does not depend on these. So it is computed once, and calls share it, together with the lists that record
# which op reads which values. A call whose tape differs for any reason gets its own schedule.

Places = dict[int, tuple[int, int, int]]


class TapeLayout:
    """The layout of a tape and its replay schedule; see Note [Tape layouts]. ``saved_at``: see ``Wanted``."""

    __slots__ = (
        "_counts",
        "_kept",
        "_layout",
        "_leaves",
        "_missing",
        "_saved_at",
        "_writes",
        "figures",
        "schedule",
        "sizes",
    )

    def __init__(self, tape: Tape, saved_at: Places, missing: list[int], schedule: ReplaySchedule) -> None:
        self.schedule = schedule
        self.sizes: Any = None  # bytes of each value kept in the call that was counted last; see ``_sizes_of``
        self.figures: SavedFigures | None = None  # figures of that call
        self._layout = tape.layout()
        self._counts, self._writes = tape.output_counts, tape.writes
        self._kept, self._leaves = [*tape.kept], tape.leaf_positions()
        self._saved_at, self._missing = saved_at, missing

    def matches(self, tape: Tape, saved_at: Places, missing: list[int]) -> bool:
        """Return whether ``tape`` has this layout, so that the schedule is valid for it too.

        If so, it shares the lists that are equal for all such tapes.
        """
        return (
            self._missing == missing
            and self._saved_at == saved_at
            and self._counts == tape.output_counts
            and self._writes == tape.writes
            and self._kept == [*tape.kept]
            and self._leaves == tape.leaf_positions()
            and tape.has_layout(self._layout)
        )
