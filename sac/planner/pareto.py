"""The Pareto-optimal save options of one region: those that no other beats in both bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sac.extras import import_extra
from sac.planner.profile import Engine, Entry, RegionProfile

# -- Requirements: what has to run again or be held in one region for backward

ALWAYS = -1  # a reader that runs again whatever is saved: backward itself, or an entry that is never spared
NOTHING = -1  # instead of a producer that cannot run, or of a storage that cannot be held

# Note [Requirements]
#
# `RegionProfile.recomputed` says what runs again and is held for one save option. The search needs to know for all of
# them: a requirement says that if `reader` runs again, `maker` (the producer) runs again or the storage `root` is held.
# All conditions of Note [What is replayed] have this form:
# - A value that is read: if its producer may be saved, the producer runs or the storage is held. If the producer may
#   not be saved, it runs. If the producer must be saved, the storage is held.
# - A write to the storage of a value that is read later runs whatever is held.
# - A collective before the last need runs unless it is saved. A wait for its result runs if the collective does.
#
# For any choice of storages to hold, the entries that run again are the least set that meets all requirements. An entry
# that does not run again although something reads its result has to be saved. So save options need no variables of
# their own. A saved entry that runs anyway would hold memory for nothing. (One case is left out: if a collective runs
# because of what it writes, saving it as well would spare the wait for it.)


@dataclass(frozen=True, slots=True)
class Requirement:
    """See Note [Requirements]. An entry or ``ALWAYS``, an entry or ``NOTHING``, a root or ``NOTHING``."""

    reader: int
    maker: int
    root: int


def requirements_of(profile: RegionProfile, engine: Engine) -> frozenset[Requirement]:
    """Return the requirements of a region, without those for storages that are always held or have no bytes."""
    ever = profile.recomputed((), engine).entries
    requirements = _of_replay(profile, ever) if engine == "replay" else _of_rerun(profile, ever)
    idle = [value for value in profile.maker if not profile.bytes[value]]
    free = {profile.roots[value] for value in (*idle, *profile.routed)}
    return frozenset(
        requirement for requirement in requirements if requirement.root == NOTHING or requirement.root not in free
    )


def _of_value(profile: RegionProfile, reader: int, value: int) -> Iterator[Requirement]:
    """Yield the requirement on the producer of ``value`` if ``reader`` reads it."""
    if value not in profile.maker:
        return
    maker, root = profile.entries[profile.maker[value]], profile.roots[value]
    if maker.must_save:
        yield Requirement(reader, NOTHING, root)
    else:
        yield Requirement(reader, maker.number, root if maker.savable else NOTHING)


def _of_replay(profile: RegionProfile, ever: Collection[int]) -> Iterator[Requirement]:
    writers: dict[int, list[int]] = {}
    for entry in profile.entries:
        for root in entry.writes:
            writers.setdefault(root, []).append(entry.number)

    def read(reader: int, value: int, time: int) -> Iterator[Requirement]:
        yield from _of_value(profile, reader, value)
        for writer in writers.get(profile.roots[value], ()):
            if writer < time:
                yield Requirement(reader, writer, NOTHING)

    for need in profile.needs:
        yield from read(ALWAYS, need.value, need.time)
    for number in ever:
        for value in profile.entries[number].reads:
            yield from read(number, value, number)
    for entry in profile.entries[: profile.end]:
        if entry.is_collective and not (entry.makes and (entry.must_save or entry.savable)):
            yield from _of_collective(profile, entry)


def _of_collective(profile: RegionProfile, entry: Entry) -> Iterator[Requirement]:
    """Yield the requirements of a collective that cannot be saved: it runs always, or if one that it waits for runs."""
    sources = [profile.entries[profile.maker[value]] if value in profile.maker else None for value in entry.reads]
    if not entry.is_view or any(one is None or not (one.savable or one.must_save) for one in sources):
        yield Requirement(ALWAYS, entry.number, NOTHING)
        return
    for source in sources:
        if source is not None and not source.must_save:
            yield Requirement(source.number, entry.number, NOTHING)


def _of_rerun(profile: RegionProfile, ever: Collection[int]) -> Iterator[Requirement]:
    for need in profile.needs:
        yield from _of_value(profile, ALWAYS, need.value)
    for number in ever:
        if not profile.entries[number].savable:
            yield Requirement(ALWAYS, number, NOTHING)
        for value in profile.entries[number].reads:
            yield from _of_value(profile, number, value)


# -- Reduction of requirements that keeps every choice that could be best


@dataclass(frozen=True, slots=True)
class Propagated:
    """The decisions so far (entries that run or are spared, roots that are held) and the open requirements."""

    open: frozenset[Requirement]
    runs: frozenset[int]
    spared: frozenset[int]
    held: frozenset[int]


def propagate(
    requirements: Collection[Requirement], runs: Iterable[int] = (), spared: Iterable[int] = ()
) -> Propagated | None:
    """Return the consequences if the entries ``runs`` run again and ``spared`` do not; None if this is impossible.

    See Note [Requirements]: an entry that no requirement names does not run.
    """
    on, off, held = set(runs), set(spared), set[int]()
    while True:
        makers = {requirement.maker for requirement in requirements}
        left = set()
        for requirement in requirements:
            reader = ALWAYS if requirement.reader in on else requirement.reader
            maker = NOTHING if requirement.maker in off else requirement.maker
            if maker in on or requirement.root in held or reader in off or (reader != ALWAYS and reader not in makers):
                continue
            if maker != NOTHING and (reader != ALWAYS or requirement.root != NOTHING):
                left.add(Requirement(reader, maker, requirement.root))
            elif maker != NOTHING:
                on.add(maker)
            elif requirement.root == NOTHING:
                if reader == ALWAYS:
                    return None
                off.add(reader)
            elif reader == ALWAYS:
                held.add(requirement.root)
            else:
                left.add(Requirement(reader, NOTHING, requirement.root))
        if left == requirements:
            return Propagated(frozenset(left), frozenset(on), frozenset(off), frozenset(held))
        requirements = left


def folded(
    requirements: Collection[Requirement], seconds: dict[int, float], savable: Collection[int]
) -> frozenset[Requirement]:
    """Merge each entry that cannot be saved and runs for only one reader into that reader, with its ``seconds``.

    Changes ``seconds``, which holds the time of each undecided entry.
    """
    for number in sorted(seconds, reverse=True):
        readers = {requirement.reader for requirement in requirements if requirement.maker == number} - {number}
        if number not in savable and len(readers) == 1:
            into = readers.pop()
            seconds[into] += seconds.pop(number)
            requirements = [_renamed(requirement, number, into) for requirement in requirements]
    return frozenset(
        requirement
        for requirement in requirements
        if requirement.maker != requirement.reader and not _follows(requirement, requirements)
    )


def _renamed(requirement: Requirement, old: int, new: int) -> Requirement:
    return replace(
        requirement,
        reader=new if requirement.reader == old else requirement.reader,
        maker=new if requirement.maker == old else requirement.maker,
    )


def _follows(requirement: Requirement, requirements: Collection[Requirement]) -> bool:
    """Return whether another requirement implies ``requirement``."""
    return requirement.reader != ALWAYS and replace(requirement, reader=ALWAYS) in requirements


def joined(requirements: Collection[Requirement], size: dict[int, int]) -> frozenset[Requirement]:
    """Merge storages with the same requirements into the first of them, and add their bytes to its ``size``."""
    askers: dict[int, set[tuple[int, int]]] = {}
    for requirement in requirements:
        if requirement.root != NOTHING:
            askers.setdefault(requirement.root, set()).add((requirement.reader, requirement.maker))
    first: dict[frozenset[tuple[int, int]], int] = {}
    gone = set()
    for root in sorted(askers):
        kept = first.setdefault(frozenset(askers[root]), root)
        if kept != root:
            size[kept] += size[root]
            gone.add(root)
    return frozenset(requirement for requirement in requirements if requirement.root not in gone)


def parts(requirements: Collection[Requirement]) -> list[frozenset[Requirement]]:
    """Split requirements into independent parts that share neither an entry nor a storage."""
    groups: list[tuple[set[tuple[str, int]], set[Requirement]]] = []
    for requirement in sorted(
        requirements, key=lambda requirement: (requirement.maker, requirement.root, requirement.reader)
    ):
        names = {("entry", number) for number in (requirement.reader, requirement.maker) if number >= 0}
        names |= {("root", requirement.root)} if requirement.root != NOTHING else set()
        inside = {requirement}
        apart = []
        for group in groups:
            if names.isdisjoint(group[0]):
                apart.append(group)
            else:
                names, inside = names | group[0], inside | group[1]
        groups = [*apart, (names, inside)]
    return [frozenset(inside) for _, inside in groups]


# -- The search for Pareto-optimal save options

MOST_BEST = 400  # at most this many choices of a part are kept
TICKS = 2**50  # the seconds of all entries together, as integers for exact comparison

# Note [The search for save options]
#
# The open requirements of a region split into independent parts: a value that backward itself reads is made or held
# whatever else is decided, so a chain of ops ends there. Independent parts are searched separately, and their choices
# are added up; only those that no other choice beats in both bytes and seconds are kept. A part is searched by deciding
# one of its entries both ways, which splits it again; results are cached. Nothing is rounded, so the result is exact,
# unless a part has more than `MOST_BEST` best choices (regions with many small results, such as those of a router).
# Then the range of seconds is divided into that many equal steps, and only the choice with the fewest bytes is kept in
# each step.


@dataclass(frozen=True, slots=True)
class SaveOption:
    """Entries to save in addition to those that must be saved; the bytes then held, and the recomputed seconds."""

    saved: frozenset[int]
    bytes: int
    seconds: float


def priced(profile: RegionProfile, times: Sequence[float], saved: Collection[int], engine: Engine) -> SaveOption:
    """Return the save option of the entries ``saved`` with its cost. ``times``: seconds per entry."""
    cost = profile.recomputed(saved, engine)
    return SaveOption(frozenset(saved), cost.bytes, math.fsum(times[number] for number in cost.entries))


def pareto(profile: RegionProfile, times: Sequence[float], engine: Engine = "replay") -> tuple[SaveOption, ...]:
    """Return the Pareto-optimal save options: none is beaten in bytes or seconds by one that is no worse in the other.

    Bytes ascend and seconds descend, with one save option for each pair. Among options of equal cost, the one that
    saves fewer entries is preferred, then the one that saves earlier entries. ``times``: seconds per entry, not
    negative. Needs numpy. See Note [The search for save options].
    """
    candidates = {entry.number for entry in profile.candidates}
    size = {profile.roots[value]: profile.bytes[value] for value in profile.maker}
    start = propagate(requirements_of(profile, engine))
    assert start is not None, "all that runs without saving is a choice"
    undecided = {requirement.maker for requirement in start.open} - {NOTHING}
    seconds = {number: times[number] for number in undecided}
    requirements = joined(folded(start.open, seconds, candidates), size)
    ever = profile.recomputed((), engine).entries
    savable = frozenset(candidates.intersection(ever) - start.runs)
    found: list[SaveOption] = []
    for running in _Search(size, seconds).front(requirements).running:
        one = _tidied(profile, times, savable - running, engine)
        if not found or one.seconds < found[-1].seconds:  # ticks may differ where seconds are equal
            found.append(one)
    return tuple(found)


def _tidied(profile: RegionProfile, times: Sequence[float], saved: frozenset[int], engine: Engine) -> SaveOption:
    """Return the save option of ``saved`` without the entries that hold nothing, unless that costs more."""
    held = {profile.maker[value] for value in profile.recomputed(saved, engine).held}
    best = priced(profile, times, saved, engine)
    idle = sorted(saved - held)  # producers first: a reader that runs would cause their results to be held
    for drop in (idle, *([number] for number in idle)):
        less = priced(profile, times, best.saved.difference(drop), engine)
        if less.bytes <= best.bytes and less.seconds <= best.seconds:
            best = less
    return best


@dataclass(frozen=True, slots=True)
class _Front:
    """Pareto-optimal choices, bytes ascending: arrays [choice], and the entries that run again in each."""

    bytes: Any
    ticks: Any
    counts: Any  # number of entries that are spared by decision
    running: tuple[frozenset[int], ...]


class _Search:
    """Finds the choices for a set of requirements; see Note [The search for save options]."""

    def __init__(self, size: dict[int, int], seconds: dict[int, float]) -> None:
        self._np: Any = import_extra("numpy", "tools")
        self._size = size
        self._known: dict[frozenset[Requirement], _Front] = {}
        whole = math.fsum(seconds.values()) or 1.0
        self._ticks = {number: round(time / whole * TICKS) for number, time in seconds.items()}

    def front(self, requirements: frozenset[Requirement]) -> _Front:
        """Return the best choices for ``requirements``, which may split into parts."""
        fronts = [self._decided(part) for part in parts(requirements)]
        total = self._point(Propagated(frozenset(), frozenset(), frozenset(), frozenset()))
        for one in fronts:
            total = self._sum(total, one)
        return total

    def _decided(self, requirements: frozenset[Requirement]) -> _Front:
        """Decide the last entry both ways: few other entries are required both by it and by earlier ones."""
        if requirements in self._known:
            return self._known[requirements]
        number = max(max(requirement.reader, requirement.maker) for requirement in requirements)
        ways = [propagate(requirements, spared=(number,)), propagate(requirements, runs=(number,))]
        fronts = [self._sum(self._point(way), self.front(way.open)) for way in ways if way is not None]
        self._known[requirements] = self._union(fronts)
        return self._known[requirements]

    def _point(self, way: Propagated) -> _Front:
        array = self._np.array
        return _Front(
            bytes=array([sum(self._size[root] for root in way.held)]),
            ticks=array([sum(self._ticks[number] for number in way.runs)]),
            counts=array([len(way.spared)]),
            running=(way.runs,),
        )

    def _sum(self, one: _Front, other: _Front) -> _Front:
        """Return the best of all pairs of choices; among equals, the pair that holds more in ``one``."""
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
        """Return the Pareto-optimal choices among the columns of a front; ``rank`` decides between equals."""
        size, ticks, counts = columns
        order = self._np.lexsort((rank, counts, ticks, size))
        least = self._np.minimum.accumulate(ticks[order])
        order = order[self._np.append(True, least[1:] < least[:-1])]
        if len(order) > MOST_BEST:
            order = order[self._thinned(ticks[order])]
        return _Front(size[order], ticks[order], counts[order], tuple(running(int(at)) for at in order))

    def _thinned(self, ticks: Any) -> Any:
        """Return which of the choices with descending ``ticks`` are kept, including the first and the last."""
        steps = (ticks[0] - ticks) // -(-(ticks[0] - ticks[-1]) // (MOST_BEST - 1))
        return self._np.append(True, steps[1:] != steps[:-1]) | (ticks == ticks[-1])


def _columns(front: _Front) -> tuple[Any, Any, Any]:
    return front.bytes, front.ticks, front.counts
