"""Making a list of demands shorter without losing any choice that could be best."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from sac.planner.demands import ALWAYS, NOTHING, Demand


@dataclass(frozen=True, slots=True)
class Settled:
    """What is decided and the demands that are still open: entries that run or are spared, roots that are held."""

    open: frozenset[Demand]
    runs: frozenset[int]
    spared: frozenset[int]
    held: frozenset[int]


def settle(rows: Collection[Demand], runs: Iterable[int] = (), spared: Iterable[int] = ()) -> Settled | None:
    """Return what follows if the entries ``runs`` run again and ``spared`` do not; None if that cannot be.

    See Note [Demands]: an entry that nothing asks for does not run.
    """
    on, off, held = set(runs), set(spared), set[int]()
    while True:
        makers = {row.maker for row in rows}
        left = set()
        for row in rows:
            reader = ALWAYS if row.reader in on else row.reader
            maker = NOTHING if row.maker in off else row.maker
            if maker in on or row.root in held or reader in off or (reader != ALWAYS and reader not in makers):
                continue
            if maker != NOTHING and (reader != ALWAYS or row.root != NOTHING):
                left.add(Demand(reader, maker, row.root))
            elif maker != NOTHING:
                on.add(maker)
            elif row.root == NOTHING:
                if reader == ALWAYS:
                    return None
                off.add(reader)
            elif reader == ALWAYS:
                held.add(row.root)
            else:
                left.add(Demand(reader, NOTHING, row.root))
        if left == rows:
            return Settled(frozenset(left), frozenset(on), frozenset(off), frozenset(held))
        rows = left


def folded(rows: Collection[Demand], seconds: dict[int, float], savable: Collection[int]) -> frozenset[Demand]:
    """Fold each entry that cannot be saved, and runs for one reader only, into that reader, with its ``seconds``.

    Changes ``seconds``, which is per entry that is not decided.
    """
    for number in sorted(seconds, reverse=True):
        readers = {row.reader for row in rows if row.maker == number} - {number}
        if number not in savable and len(readers) == 1:
            into = readers.pop()
            seconds[into] += seconds.pop(number)
            rows = [_renamed(row, number, into) for row in rows]
    return frozenset(row for row in rows if row.maker != row.reader and not _follows(row, rows))


def _renamed(row: Demand, old: int, new: int) -> Demand:
    return replace(row, reader=new if row.reader == old else row.reader, maker=new if row.maker == old else row.maker)


def _follows(row: Demand, rows: Collection[Demand]) -> bool:
    """Whether another row asks for the same in any case."""
    return row.reader != ALWAYS and replace(row, reader=ALWAYS) in rows


def joined(rows: Collection[Demand], size: dict[int, int]) -> frozenset[Demand]:
    """Let the first of several storages that are asked for alike stand for all, and add their bytes to its ``size``."""
    askers: dict[int, set[tuple[int, int]]] = {}
    for row in rows:
        if row.root != NOTHING:
            askers.setdefault(row.root, set()).add((row.reader, row.maker))
    first: dict[frozenset[tuple[int, int]], int] = {}
    gone = set()
    for root in sorted(askers):
        kept = first.setdefault(frozenset(askers[root]), root)
        if kept != root:
            size[kept] += size[root]
            gone.add(root)
    return frozenset(row for row in rows if row.root not in gone)


def parts(rows: Collection[Demand]) -> list[frozenset[Demand]]:
    """Split rows into parts that share neither an entry nor a storage: each can be decided for itself."""
    groups: list[tuple[set[tuple[str, int]], set[Demand]]] = []
    for row in sorted(rows, key=lambda row: (row.maker, row.root, row.reader)):
        names = {("entry", number) for number in (row.reader, row.maker) if number >= 0}
        names |= {("root", row.root)} if row.root != NOTHING else set()
        inside = {row}
        apart = []
        for group in groups:
            if names.isdisjoint(group[0]):
                apart.append(group)
            else:
                names, inside = names | group[0], inside | group[1]
        groups = [*apart, (names, inside)]
    return [frozenset(inside) for _, inside in groups]
