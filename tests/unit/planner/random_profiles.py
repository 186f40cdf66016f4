"""Random profiles of regions: views, several results, writes in place, collectives and their waits."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from sac.planner.profile import Entry, Need, RegionProfile


class _Builder:
    def __init__(self, random: Random, most: int) -> None:
        self.random, self.most = random, most
        self.entries: list[Entry] = []
        self.roots: list[int] = []
        self.bytes: list[int] = []
        self.sent: list[int] = []  # values that a collective makes, and a wait may wait for

    def value(self, root: int | None = None) -> int:
        number = len(self.roots)
        self.roots.append(number if root is None else root)
        self.bytes.append(self.random.choice((0, 1, 1, 2, 3, 4, 8)) * 512 if root is None else self.bytes[root])
        return number

    def some(self, most: int) -> tuple[int, ...]:
        recent = range(max(0, len(self.roots) - 6), len(self.roots))
        return tuple(self.random.sample(list(recent), self.random.randint(1, min(most, len(recent)))))

    def add(self, reads: tuple[int, ...], makes: tuple[int, ...], **facts: object) -> None:
        if facts.get("savable") and sum(one.savable for one in self.entries) >= self.most:
            facts["savable"] = False
        self.entries.append(Entry(len(self.entries), "", "op", 0, reads, makes, **facts))  # type: ignore[arg-type]

    def step(self) -> None:
        random = self.random
        kind = random.choice(("op", "op", "op", "pair", "view", "write", "send", "wait"))
        if kind == "op":
            self.add(self.some(3), (self.value(),), savable=random.random() < 0.85, must_save=random.random() < 0.1)
        elif kind == "pair":
            first = self.value()
            makes = (first, self.value(self.roots[first] if random.random() < 0.2 else None))
            reads = tuple(value for value in self.some(4) if value not in makes)
            self.add(reads, makes, savable=True, must_save=random.random() < 0.1)
        elif kind == "view":
            read = self.some(1)
            self.add(read, (self.value(self.roots[read[0]]),), is_view=True)
        elif kind == "write":
            reads = self.some(2)
            root = self.roots[reads[0]]
            self.add(reads, (self.value(root),) if random.random() < 0.5 else (), writes=(root,))
        elif kind == "send":
            reads, may = self.some(1), random.random() < 0.8
            self.sent.append(self.value())
            self.add(reads, (self.sent[-1],), is_collective=True, savable=may, must_save=random.random() < 0.1)
        elif self.sent:
            read = random.choice(self.sent)
            self.add((read,), (self.value(self.roots[read]),), is_collective=True, is_view=True)


def random_profile(random: Random, entries: int, candidates: int) -> tuple[RegionProfile, list[float]]:
    """Return a profile and seconds per entry, whose sums are exact."""
    builder = _Builder(random, candidates)
    for _ in range(2):
        builder.value()
    for _ in range(entries):
        builder.step()
    made = [value for entry in builder.entries for value in entry.makes]
    needs = []
    for value in made or [0]:
        if random.random() < 0.4:
            maker = next((entry.number for entry in builder.entries if value in entry.makes), -1)
            needs.append(Need(value, random.randint(maker + 1, len(builder.entries))))
    profile = RegionProfile(
        "region",
        ("region",),
        (0,),
        tuple(builder.entries),
        tuple(builder.roots),
        tuple(builder.bytes),
        tuple(needs),
    )
    return profile, [random.choice((0, 0, 1, 2, 3, 5, 9, 20, 50)) / 64 for _ in builder.entries]


def profiles(entries: int, candidates: int) -> st.SearchStrategy[tuple[RegionProfile, list[float]]]:
    return st.integers(0, 2**32 - 1).map(lambda seed: random_profile(Random(seed), entries, candidates))
