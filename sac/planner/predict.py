"""From one observed step to the peak of every other choice, and to the fastest choice within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from sac.errors import PlanError, Problem
from sac.planner.cost import seconds
from sac.planner.devices import Device
from sac.planner.observing import BACKWARD, BETWEEN, FORWARD, StepPhase, StepRecord
from sac.planner.options import Option, options_of
from sac.planner.profile import RegionProfile
from sac.policy.read import bytes_text

# Note [From an observed step to every other]
#
# The step was observed under full recomputation. What another choice changes is known from the tape of the region
# (Note [Profiles]), as an upper bound:
# - It leaves behind the storages that replay starts from, or for no checkpointing those that autograd saves.
# - While its forward runs, these are alive in addition to what is alive in any case: the observed forwards are measured
#   at each op, and of each storage it is known until when it was alive (`_forward_bytes`).
# - In its backward, everything that autograd saves is there at once after the replay, whatever was kept. On top come
#   storages that are only the start of a replay, those that backward has already read when the replay begins, and what
#   is alive between the steps of the replay (`_replay_bytes`).
# Freeing earlier than assumed makes the peak lower, never higher. So a plan can be used without having been tried.
#
# What a choice leaves behind counts in every phase as often as calls of its region wait for their backward then: a
# pipeline stage holds several micro-batches, in whatever order its schedule runs them, and a block may be called more
# than once.
#
# A step that was run with a choice shows by how much the bounds of the options in it were too high (`learn`).

# Note [The search over layers]
#
# From full recomputation in each region, options are raised along their lower convex hull, the raise with most seconds
# per byte first, later layers first, as long as the predicted peak fits. Then single regions get faster options, until
# none fits any more.

Choice = tuple[int, ...]  # the number of the option of each region


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a step a phase is: what decides which options count in it.

    ``alive``: how many calls of each region are between their forward and their backward. ``own``: the region whose
    forward or backward it is, if any.
    """

    alive: tuple[int, ...]
    own: int | None
    part: str


def _places(record: StepRecord, numbers: Mapping[str, int]) -> Iterator[_Place]:
    """Yield the place of each phase of a step; ``numbers``: that of each region."""
    regions = [numbers[path] for path in record.paths]
    with_backward = {phase.position for phase in record.phases if phase.part == BACKWARD}
    alive = [0] * len(numbers)
    for phase in record.phases:
        own = None if phase.part == BETWEEN else regions[phase.position]
        for position in phase.ended:
            alive[regions[position]] -= 1
        yield _Place(tuple(alive), own, phase.part)
        if own is not None and phase.part == FORWARD and phase.position in with_backward:
            alive[own] += 1


class Prediction:
    """Predicts steps on the grounds of one that was observed; see Note [From an observed step to every other].

    ``profiles``: those of the regions, one per kind. ``record``: a step that begins with the bytes of steps to come.
    ``extra``: bytes that will be there and are not in the record. ``may_skip``: whether no checkpointing is an option.
    ``by_hand``: returns entries of a profile that are an option in any case.
    """

    def __init__(
        self,
        profiles: Sequence[RegionProfile],
        record: StepRecord,
        device: Device,
        *,
        extra: int = 0,
        may_skip: bool = True,
        by_hand: Callable[[RegionProfile], frozenset[int]] | None = None,
    ) -> None:
        self.profiles, self.record, self.extra, self.device = tuple(profiles), record, extra, device
        self.paths = tuple(dict.fromkeys(record.paths))
        of_path = {path: kind for kind, profile in enumerate(profiles) for path in profile.paths}
        self.kinds = tuple(of_path[path] for path in self.paths)
        self.times = [[seconds(entry, device) for entry in profile.entries] for profile in profiles]
        self.by_hand = [frozenset[int]() if by_hand is None else by_hand(profile) for profile in profiles]
        self.options = [
            options_of(profile, times, device, [more] if more else [], may_skip=may_skip)
            for profile, times, more in zip(profiles, self.times, self.by_hand, strict=True)
        ]
        self.seconds = [tuple(option.seconds for option in self.options[kind]) for kind in self.kinds]
        self._predict(record)
        phases: dict[_Place, list[StepPhase]] = {}
        for place, phase in zip(_places(record, self._numbers), record.phases, strict=True):
            phases.setdefault(place, []).append(phase)
        self._places = [*phases]
        self._bases = [max(phase.peak for phase in alike) + extra for alike in phases.values()]
        self._forwards: dict[Any, tuple[int, ...]] = {}  # known results of ``_in_forward``
        self._own = [
            self._own_of(place, alike, base - extra)
            for (place, alike), base in zip(phases.items(), self._bases, strict=True)
        ]
        self.in_flight = max(count for place in self._places for count in place.alive)

    @property
    def _numbers(self) -> dict[str, int]:
        return {path: number for number, path in enumerate(self.paths)}

    def _predict(self, record: StepRecord) -> None:
        """Find for each kind and option what it holds and what its backward takes, above full recomputation."""
        self._held = _held_by(record, self.kinds, self._numbers)
        self._more, self._replay = {}, {}
        for kind, held in self._held.items():
            profile, (full, *others) = self.profiles[kind], self.options[kind]
            inputs = max(0, held - full.bytes)
            self._more[kind] = [0, *(max(0, option.bytes - full.bytes) for option in others)]
            self._replay[kind] = [0, *(_replay_bytes(profile, option, inputs) for option in others)]

    def _own_of(self, place: _Place, phases: Sequence[StepPhase], peak: int) -> list[int] | None:
        """Return what each option of the region of a place adds to its peak there, besides what regions hold."""
        if place.own is None:
            return None
        if place.part == BACKWARD:
            return self._replay[self.kinds[place.own]]
        more = [*zip(*{self._in_forward(self.kinds[place.own], phase, peak) for phase in phases}, strict=True)]
        return [*map(max, more)]

    def _in_forward(self, kind: int, phase: StepPhase, peak: int) -> tuple[int, ...]:
        """Return by how much a forward of a region exceeds ``peak`` under each of its options."""
        profile = self.profiles[kind]
        # Not observed op by op, or calls differ: all that an option adds may be there at the peak.
        seen = phase.rises if phase.rises and profile.until else ((-1, phase.peak - phase.before),)
        rises = tuple((entry, phase.before + rise - peak) for entry, rise in seen)
        if (kind, rises) not in self._forwards:
            each = [_forward_bytes(profile, option) for option in self.options[kind][1:]]
            found = (max(rise + more[entry] for entry, rise in rises) for more in each)
            self._forwards[kind, rises] = phase.peak - peak, *found
        return self._forwards[kind, rises]

    def learn(self, record: StepRecord, choice: Choice) -> None:
        """Take over what a step that was run with ``choice`` shows of the options in it."""
        if record.paths != self.record.paths:
            return
        used = {(self.kinds[at], option) for at, option in enumerate(choice) if option}
        measured: dict[tuple[int, int], int] = {}
        numbers, full = self._numbers, _left_by(self.record)
        for position, left in _left_by(record).items():
            at = numbers[record.paths[position]]
            key = self.kinds[at], choice[at]
            measured[key] = max(measured.get(key, 0), left - full[position])
        for kind, option in used:
            self._more[kind][option] = max(0, measured[kind, option])
        rises: dict[tuple[str, int, int], int] = {}  # by part, kind and option
        below = max(0, self.record.phases[0].before - record.phases[0].before)  # this step began with fewer bytes
        for place, phase in zip(_places(record, numbers), record.phases, strict=True):
            if place.own is not None and choice[place.own] and place in self._places:
                index = self._places.index(place)
                others = sum(n * self._more[k][c] for n, k, c in zip(place.alive, self.kinds, choice, strict=True) if n)
                mine = place.part, self.kinds[place.own], choice[place.own]
                rise = phase.peak + below - (self._bases[index] - self.extra) - others
                rises[mine] = max(rises.get(mine, -(2**62)), rise)
        for place, own in zip(self._places, self._own, strict=True):
            for (part, kind, option), rise in rises.items():
                if place.own is not None and own is not None and (part, kind) == (place.part, self.kinds[place.own]):
                    own[option] = rise
        live = self.live(choice)
        for place, phase in zip(_places(record, numbers), record.phases, strict=True):
            if place in self._places:
                index = self._places.index(place)
                self._bases[index] += max(0, phase.peak + below + self.extra - live[index])

    # -- The peak of a choice

    def live(self, choice: Sequence[int]) -> list[int]:
        """Return the predicted peak at each place of the step."""
        more = [self._more[kind][option] for kind, option in zip(self.kinds, choice, strict=True)]
        return [
            base
            + sum(count * size for count, size in zip(place.alive, more, strict=True) if count)
            + (own[choice[place.own]] if own is not None and place.own is not None else 0)
            for base, place, own in zip(self._bases, self._places, self._own, strict=True)
        ]

    def peak_of(self, choice: Sequence[int]) -> int:
        """Return the predicted peak of a choice, in bytes."""
        return max(self.live(choice))

    @property
    def full(self) -> Choice:
        """The choice of full recomputation, which has the least peak."""
        return (0,) * len(self.paths)

    @property
    def fastest(self) -> Choice:
        """The choice of the last option of each region: no checkpointing, if that is one."""
        return tuple(len(self.options[kind]) - 1 for kind in self.kinds)

    @property
    def shipped(self) -> Choice:
        """The choice of the entries ``by_hand`` in each region."""
        saved = [[option.saved for option in options] for options in self.options]
        return tuple(saved[kind].index(self.by_hand[kind]) for kind in self.kinds)

    def least(self) -> int:
        """Return the least peak, in bytes: that of full recomputation."""
        return self.peak_of(self.full)

    def time_of(self, choice: Choice) -> float:
        """Return the seconds that a choice recomputes, and checkpointing itself takes."""
        return math.fsum(times[option] for times, option in zip(self.seconds, choice, strict=True))

    # -- The search

    def search(self, allowed: int, *known: Choice) -> Choice:
        """Return a fast choice within ``allowed`` bytes, of which no region can get a faster option.

        It is no slower than the choices ``known`` that fit. See Note [The search over layers]. Full recomputation fits,
        or is returned.
        """
        starts = [self._raised(self.full, allowed)]
        starts += [one for one in (self.fastest, self.shipped, *known) if self.peak_of(one) <= allowed]
        return min((self._filled(one, allowed) for one in starts), key=self.time_of)

    def _changer(self, choice: Sequence[int], allowed: int) -> tuple[list[int], Callable[[int, int], bool]]:
        """Return a choice to change, and a function that sets a region's option if the peak then fits."""
        chosen, live = [*choice], self.live(choice)
        touched: list[list[tuple[int, int]]] = [[] for _ in self.paths]
        owned: list[list[tuple[int, list[int]]]] = [[] for _ in self.paths]
        for index, (place, own) in enumerate(zip(self._places, self._own, strict=True)):
            for at, count in enumerate(place.alive):
                if count:
                    touched[at].append((index, count))
            if place.own is not None and own is not None:
                owned[place.own].append((index, own))

        def change(at: int, option: int) -> bool:
            more, old = self._more[self.kinds[at]], chosen[at]
            added: dict[int, int] = {index: count * (more[option] - more[old]) for index, count in touched[at]}
            for index, own in owned[at]:
                added[index] = added.get(index, 0) + own[option] - own[old]
            if any(size > 0 and live[index] + size > allowed for index, size in added.items()):
                return False
            for index, size in added.items():
                live[index] += size
            chosen[at] = option
            return True

        return chosen, change

    def _raised(self, choice: Choice, allowed: int) -> Choice:
        chosen, change = self._changer(choice, allowed)
        hulls = [_hull(self._more[kind], self.options[kind]) for kind in range(len(self.profiles))]
        raises = [
            (rate, at, number) for at, kind in enumerate(self.kinds) for number, (_, rate) in enumerate(hulls[kind])
        ]
        blocked: set[int] = set()
        for _, at, number in sorted(raises, key=lambda one: (-one[0], -one[1], one[2])):
            if at not in blocked and not change(at, hulls[self.kinds[at]][number][0]):
                blocked.add(at)
        return tuple(chosen)

    def _filled(self, choice: Choice, allowed: int) -> Choice:
        chosen, change = self._changer(choice, allowed)
        fast = [sorted(range(len(times)), key=times.__getitem__) for times in self.seconds]
        while True:
            before = [*chosen]
            for at in reversed(range(len(chosen))):
                now = self.seconds[at][chosen[at]]
                any(change(at, option) for option in fast[at] if self.seconds[at][option] < now)
            if chosen == before:
                return tuple(chosen)

    def next_faster(self, choice: Choice) -> tuple[int, str] | None:
        """Return the least peak of a choice in which one more region gets a faster option, and the region's path."""
        peaks = []
        for at in {
            (kind, option): at for at, (kind, option) in enumerate(zip(self.kinds, choice, strict=True))
        }.values():
            times = self.seconds[at]
            for option in (option for option, time in enumerate(times) if time < times[choice[at]]):
                peaks.append((self.peak_of((*choice[:at], option, *choice[at + 1 :])), self.paths[at]))
        return min(peaks, default=None)

    # -- What the least peak is made of

    def refuse(self, where: str, written: str, allowed: int) -> PlanError:
        """Return the error for a budget below the least peak: the peak, and its largest parts."""
        least = self.least()
        found = f"{written} ({allowed} bytes) is below the least peak of a step of this model on these inputs: "
        expected = f"{least} bytes ({bytes_text(least)}) or more"
        return TooSmallError(Problem(where, found + self.parts_of_least(), expected, fix=_FIX), least)

    def parts_of_least(self) -> str:
        """Return what the least peak is made of, largest part first."""
        phase = max(self.record.phases, key=lambda one: one.peak)
        is_after = phase.position == len(self.record.paths)
        where = "in the head and the loss, after the last block" if is_after else "between two blocks"
        if phase.part != BETWEEN:
            where = f"in the {phase.part} of {self.record.paths[phase.position]}"
        parts = {
            "there when the step begins (parameters, gradients, optimizer state, inputs)": self.record.static,
            "state that the optimizer is going to make": self.extra,
            "made before and still held (inputs of blocks, logits, gradients)": phase.before - self.record.static,
            f"made {where}, where the peak is": phase.peak - phase.before,
        }
        shown = sorted(((size, text) for text, size in parts.items() if size > 0), reverse=True)
        return "; ".join(f"{bytes_text(size)} {text}" for size, text in shown)


class TooSmallError(PlanError):
    """The budget is below the least peak, ``least`` bytes."""

    def __init__(self, problems: Any, least: int = 0) -> None:
        super().__init__(problems)
        self.least = least

    def __reduce__(self) -> Any:
        return type(self), (self.problems, self.least)


_FIX = "give more, or shrink the batch, the sequence, or what checkpointing cannot: shard parameters, chunk the loss"


def rounded(profile: RegionProfile, block_bytes: int) -> RegionProfile:
    """Return a profile with sizes as an allocator counts that rounds up to ``block_bytes``."""
    return replace(profile, bytes=tuple(-(-size // block_bytes) * block_bytes for size in profile.bytes))


def _forwards_of(record: StepRecord) -> dict[int, int]:
    """Return the bytes that the forward at each position leaves behind."""
    return {phase.position: phase.after - phase.before for phase in record.phases if phase.part == FORWARD}


def _left_by(record: StepRecord) -> dict[int, int]:
    """Return the bytes that the forward at each position has left behind when the next one begins, or at its end."""
    found: dict[int, int] = {}
    last: StepPhase | None = None
    for phase in record.phases:
        if phase.part == FORWARD:
            if last is not None:
                found[last.position] = phase.before - last.before
            found[phase.position] = phase.after - phase.before
            last = phase
        elif phase.part == BACKWARD:
            last = None
    return found


def _held_by(record: StepRecord, kinds: Sequence[int], numbers: Mapping[str, int]) -> dict[int, int]:
    held = dict.fromkeys(kinds, 0)
    for position, size in _forwards_of(record).items():
        kind = kinds[numbers[record.paths[position]]]
        held[kind] = max(held[kind], size)
    return held


def _hull(more: Sequence[int], options: Sequence[Option]) -> list[tuple[int, float]]:
    """Return the options on the lower convex hull of bytes and seconds, after the first, with seconds per byte."""
    hull = [0]
    for number in sorted(range(1, len(options)), key=lambda one: (more[one], options[one].seconds)):
        if options[number].seconds >= options[hull[-1]].seconds:
            continue
        while len(hull) > 1 and _rate(more, options, hull[-2], hull[-1]) <= _rate(more, options, hull[-1], number):
            hull.pop()
        hull.append(number)
    return [(second, _rate(more, options, first, second)) for first, second in pairwise(hull)]


def _rate(more: Sequence[int], options: Sequence[Option], low: int, high: int) -> float:
    return (options[low].seconds - options[high].seconds) / max(1, more[high] - more[low])


def _forward_bytes(profile: RegionProfile, option: Option) -> list[int]:
    """Return the most bytes by which a forward under ``option`` may exceed one under full recomputation at each entry.

    The last number is for the time after all entries. All that a policy saves is held until then, needed or not, and
    what is written to later once more.
    """
    held, copied = profile.needed, set[int]()
    if option.saved is not None:
        made = (value for number in option.saved for value in profile.entries[number].makes)
        held = {profile.roots[value] for value in (*made, *profile.recomputed(option.saved).held)}
        copied = {root for entry in profile.entries for root in entry.writes}
    used = dict(enumerate(profile.until))  # the last entry during which a storage is there in any case
    for entry in profile.entries:
        for root in profile.used_by(entry):
            used[root] = max(used.get(root, -1), entry.number)
    more = [0] * (len(profile.entries) + 1)
    for root in held - profile.routed:
        begins = profile.maker.get(root, 0) if root in copied else used[root] + 1
        more[begins] += profile.bytes[root]
    return [*accumulate(more)]


def _replay_bytes(profile: RegionProfile, option: Option, inputs: int) -> int:
    """Return the most bytes by which a backward under ``option`` may exceed one under full recomputation.

    ``inputs``: what the region holds besides results of its ops.
    """
    if option.saved is None:
        return 0
    again = profile.recomputed(option.saved)
    held, needed = {profile.roots[value] for value in again.held}, profile.needed
    needs = sorted((need for need in profile.needs if need.value in profile.maker), key=lambda one: one.time)
    # Until the replay begins, everything that it starts from is there, also what backward has read already.
    begins, starts = profile.late_replay(option.saved)
    first_read = {profile.roots[need.value]: need.time for need in reversed(needs)}
    waits = {root for root in starts if first_read.get(root, -1) > begins}
    between = _replay_peak(profile, again.entries, held) - profile.bytes_of(held | needed)
    more = profile.bytes_of(held - needed) + profile.bytes_of(waits) + max(0, between)
    return more + (inputs if needs and begins < needs[-1].time else 0)


def _replay_peak(profile: RegionProfile, entries: Sequence[int], held: set[int]) -> int:
    """Return the peak bytes while ``entries`` run again, without the region's inputs.

    Results are counted until the last entry that reads them; those that autograd saves, until the end.
    """
    last: dict[int, int] = {}
    for step, number in enumerate(entries):
        last |= dict.fromkeys(profile.used_by(profile.entries[number]), step)
    stays = profile.needed | held
    alive = {*held}
    live = high = profile.bytes_of(alive)
    for step, number in enumerate(entries):
        made = {profile.roots[value] for value in profile.entries[number].makes} & profile.maker.keys() - alive
        alive |= made
        live += profile.bytes_of(made)
        high = max(high, live)
        done = {root for root in alive - stays if last[root] <= step}
        alive -= done
        live -= profile.bytes_of(done)
    return high
