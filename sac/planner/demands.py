"""What has to run again or be held in one region so that backward gets what it needs, as a list of conditions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from sac.planner.profile import Entry, Recompute, RegionProfile

Engine = Literal["replay", "rerun"]
ALWAYS = -1  # stands for a reader that runs again whatever is saved: backward itself, or an entry that is never spared
NOTHING = -1  # stands for a maker that cannot run instead, or for a storage that cannot be held

# Note [Demands]
#
# A demand says: if `reader` runs again, then `maker` does or the storage `root` is held. All that Note [What is
# replayed] asks for has this form. A value that is read: its maker runs or its storage is held, if its maker may be
# saved; its maker runs, if it may not; its storage is held, if it must be saved. A write to the storage of a value that
# is read later runs whatever is held, and so does what has to draw random numbers first. A collective before the last
# need runs unless it is saved; a wait for its result runs if the collective does.
#
# For any choice of storages to hold, the least set of entries that meets all demands is what runs again, and what does
# not run again although something reads it has to be saved. So keep-sets need no variables of their own. A saved entry
# that runs anyway would hold memory for nothing. (One case is left out: where a collective runs for what it writes or
# draws, saving it as well would spare the wait for it.)
#
# Under rerun all runs again that is not saved, up to the last need. Only what those entries read is held. (It ends
# earlier if all that backward needs of the end is saved. That is not foreseen: it holds less, in less time.)


@dataclass(frozen=True, slots=True)
class Demand:
    """See Note [Demands]. An entry or ``ALWAYS``, an entry or ``NOTHING``, a root or ``NOTHING``."""

    reader: int
    maker: int
    root: int


def recomputed(profile: RegionProfile, saved: Collection[int], engine: Engine) -> Recompute:
    """Return what ``engine`` runs again and holds if the entries ``saved``, and those that must be, are saved."""
    if engine == "replay":
        return profile.replayed(saved)
    chosen = {*saved, *(entry.number for entry in profile.entries if entry.must_save)}
    running = [entry for entry in profile.entries[: _last(profile)] if entry.number not in chosen]
    read = {need.value for need in profile.needs}.union(*(entry.reads for entry in running))
    held = sorted({*profile.routed, *(value for value in read if profile.maker.get(value) in chosen)})
    storages = {profile.roots[value]: profile.bytes[value] for value in held}
    return Recompute(tuple(entry.number for entry in running), tuple(held), sum(storages.values()))


def demands_of(profile: RegionProfile, engine: Engine) -> frozenset[Demand]:
    """Return the demands of a region. Storages that are held in any case, or of no bytes, are left out of it."""
    ever = recomputed(profile, (), engine).entries
    rows = _of_replay(profile, ever) if engine == "replay" else _of_rerun(profile, ever)
    idle = [value for value in profile.maker if not profile.bytes[value]]
    free = {profile.roots[value] for value in (*idle, *profile.routed)}
    return frozenset(row for row in rows if row.root == NOTHING or row.root not in free)


def _last(profile: RegionProfile) -> int:
    return max((need.time for need in profile.needs), default=0)


def _of_value(profile: RegionProfile, reader: int, value: int) -> Iterator[Demand]:
    """Yield what the reading of ``value`` asks of its maker."""
    if value not in profile.maker:
        return
    maker, root = profile.entries[profile.maker[value]], profile.roots[value]
    if maker.must_save:
        yield Demand(reader, NOTHING, root)
    else:
        yield Demand(reader, maker.number, root if maker.savable else NOTHING)


def _of_replay(profile: RegionProfile, ever: Collection[int]) -> Iterator[Demand]:
    writers: dict[int, list[int]] = {}
    for entry in profile.entries:
        for root in entry.writes:
            writers.setdefault(root, []).append(entry.number)

    def read(reader: int, value: int, time: int) -> Iterator[Demand]:
        yield from _of_value(profile, reader, value)
        for writer in writers.get(profile.roots[value], ()):
            if writer < time:
                yield Demand(reader, writer, NOTHING)

    for need in profile.needs:
        yield from read(ALWAYS, need.value, need.time)
    for number in ever:
        entry = profile.entries[number]
        for value in entry.reads:
            yield from read(number, value, number)
        for earlier in entry.after:
            yield Demand(number, earlier, NOTHING)
    for entry in profile.entries[: _last(profile)]:
        if entry.is_collective and not (entry.makes and (entry.must_save or entry.savable)):
            yield from _of_collective(profile, entry)


def _of_collective(profile: RegionProfile, entry: Entry) -> Iterator[Demand]:
    """Yield when a collective that cannot be saved runs: always, or if one of those that it waits for does."""
    sources = [profile.entries[profile.maker[value]] if value in profile.maker else None for value in entry.reads]
    if not entry.is_view or any(one is None or not (one.savable or one.must_save) for one in sources):
        yield Demand(ALWAYS, entry.number, NOTHING)
        return
    for source in sources:
        if source is not None and not source.must_save:
            yield Demand(source.number, entry.number, NOTHING)


def _of_rerun(profile: RegionProfile, ever: Collection[int]) -> Iterator[Demand]:
    for need in profile.needs:
        yield from _of_value(profile, ALWAYS, need.value)
    for number in ever:
        if not profile.entries[number].savable:
            yield Demand(ALWAYS, number, NOTHING)
        for value in profile.entries[number].reads:
            yield from _of_value(profile, number, value)
