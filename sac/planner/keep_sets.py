"""Which of a region's results to save: all choices of which none is both smaller and faster than another."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sac.extras import import_extra
from sac.planner.demands import NOTHING, Demand, Engine, demands_of, recomputed
from sac.planner.profile import RegionProfile
from sac.planner.settle import Settled, folded, joined, parts, settle

MOST_BEST = 400  # choices of a part that go on
TICKS = 2**50  # the seconds of all entries, in the integers that are compared

# Note [The search for keep-sets]
#
# The open demands of a region fall apart: what backward reads itself is made or held whatever else is, so a chain of
# ops ends there. Parts that share nothing are searched apart, and their choices added up, of which only those are kept
# that no other beats in both bytes and seconds. A part is searched by deciding one of its entries both ways, which lets
# it fall apart again; what was searched once is remembered. Nothing is rounded, so the set is exact; unless there are
# more than `MOST_BEST` best choices of a part (regions with many small results, such as a router's). Then of those
# whose seconds lie within one of so many equal steps only the one with the fewest bytes goes on.


@dataclass(frozen=True, slots=True)
class KeepSet:
    """Entries to save, beside those that must be; the bytes that are held then, and the seconds that run again."""

    saved: frozenset[int]
    bytes: int
    seconds: float


def priced(profile: RegionProfile, times: Sequence[float], saved: Collection[int], engine: Engine) -> KeepSet:
    """Return what it costs to save the entries ``saved``. ``times``: seconds per entry."""
    cost = recomputed(profile, saved, engine)
    return KeepSet(frozenset(saved), cost.bytes, math.fsum(times[number] for number in cost.entries))


def pareto(profile: RegionProfile, times: Sequence[float], engine: Engine = "replay") -> tuple[KeepSet, ...]:
    """Return the keep-sets of which no other holds fewer bytes in no more time, or takes less time in no more bytes.

    Bytes ascend and seconds descend, with one keep-set for each pair. Of keep-sets that cost the same, one that saves
    fewer entries is preferred, then one that saves earlier ones. ``times``: seconds per entry, none of them negative.
    Needs numpy. See Note [The search for keep-sets].
    """
    candidates = {entry.number for entry in profile.candidates}
    size = {profile.roots[value]: profile.bytes[value] for value in profile.maker}
    start = settle(demands_of(profile, engine))
    assert start is not None, "all that runs without saving is a choice"
    undecided = {row.maker for row in start.open} - {NOTHING}
    seconds = {number: times[number] for number in undecided}
    rows = joined(folded(start.open, seconds, candidates), size)
    ever = recomputed(profile, (), engine).entries
    savable = frozenset(candidates.intersection(ever) - start.runs)
    found: list[KeepSet] = []
    for running in _Search(size, seconds).front(rows).running:
        one = _tidied(profile, times, savable - running, engine)
        if not found or one.seconds < found[-1].seconds:  # ticks may tell apart what seconds do not
            found.append(one)
    return tuple(found)


def _tidied(profile: RegionProfile, times: Sequence[float], saved: frozenset[int], engine: Engine) -> KeepSet:
    """Price ``saved`` without the entries that hold nothing, if that costs no more."""
    held = {profile.maker[value] for value in recomputed(profile, saved, engine).held}
    best = priced(profile, times, saved, engine)
    idle = sorted(saved - held)  # makers first: a reader that runs would have what they make held
    for drop in (idle, *([number] for number in idle)):
        less = priced(profile, times, best.saved.difference(drop), engine)
        if less.bytes <= best.bytes and less.seconds <= best.seconds:
            best = less
    return best


@dataclass(frozen=True, slots=True)
class _Front:
    """Choices that no other beats, bytes ascending: arrays [choice], and the entries that run again in each."""

    bytes: Any
    ticks: Any
    counts: Any  # of the entries that are spared by decision
    running: tuple[frozenset[int], ...]


class _Search:
    """Finds the choices for a list of demands; see Note [The search for keep-sets]."""

    def __init__(self, size: dict[int, int], seconds: dict[int, float]) -> None:
        self._np: Any = import_extra("numpy", "tools")
        self._size = size
        self._known: dict[frozenset[Demand], _Front] = {}
        whole = math.fsum(seconds.values()) or 1.0
        self._ticks = {number: round(time / whole * TICKS) for number, time in seconds.items()}

    def front(self, rows: frozenset[Demand]) -> _Front:
        """Return the best choices for ``rows``, which may fall apart."""
        fronts = [self._decided(part) for part in parts(rows)]
        total = self._point(Settled(frozenset(), frozenset(), frozenset(), frozenset()))
        for one in fronts:
            total = self._sum(total, one)
        return total

    def _decided(self, rows: frozenset[Demand]) -> _Front:
        """Decide the last entry both ways: few others are asked for by it and by earlier ones."""
        if rows in self._known:
            return self._known[rows]
        number = max(max(row.reader, row.maker) for row in rows)
        ways = [settle(rows, spared=(number,)), settle(rows, runs=(number,))]
        fronts = [self._sum(self._point(way), self.front(way.open)) for way in ways if way is not None]
        self._known[rows] = self._union(fronts)
        return self._known[rows]

    def _point(self, way: Settled) -> _Front:
        array = self._np.array
        return _Front(
            bytes=array([sum(self._size[root] for root in way.held)]),
            ticks=array([sum(self._ticks[number] for number in way.runs)]),
            counts=array([len(way.spared)]),
            running=(way.runs,),
        )

    def _sum(self, one: _Front, other: _Front) -> _Front:
        """Return the best of all pairs; among equals the pair that holds more in ``one``."""
        add = self._np.add.outer
        columns = [add(a, b).ravel() for a, b in zip(_columns(one), _columns(other), strict=True)]
        width = len(other.running)
        rank = -self._np.arange(len(columns[0]))
        return self._best(columns, rank, lambda at: one.running[at // width] | other.running[at % width])

    def _union(self, fronts: list[_Front]) -> _Front:
        columns = [self._np.concatenate(column) for column in zip(*map(_columns, fronts), strict=True)]
        running = [choice for front in fronts for choice in front.running]
        return self._best(columns, self._np.arange(len(running)), running.__getitem__)

    def _best(self, columns: list[Any], rank: Any, running: Any) -> _Front:
        """Return the choices, given as the columns of a front, that no other beats; ``rank`` decides between equals."""
        size, ticks, counts = columns
        order = self._np.lexsort((rank, counts, ticks, size))
        least = self._np.minimum.accumulate(ticks[order])
        order = order[self._np.append(True, least[1:] < least[:-1])]
        if len(order) > MOST_BEST:
            order = order[self._thinned(ticks[order])]
        return _Front(size[order], ticks[order], counts[order], tuple(running(int(at)) for at in order))

    def _thinned(self, ticks: Any) -> Any:
        """Return which of choices with descending ``ticks`` go on, the first and the last among them."""
        steps = (ticks[0] - ticks) // -(-(ticks[0] - ticks[-1]) // (MOST_BEST - 1))
        return self._np.append(True, steps[1:] != steps[:-1]) | (ticks == ticks[-1])


def _columns(front: _Front) -> tuple[Any, Any, Any]:
    return front.bytes, front.ticks, front.counts
