"""From observed steps to the policy that fits a budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from sac.config_keys import StepBudget
from sac.engine.settings import REPLAY
from sac.errors import PlanError, Problem
from sac.planner.choices import NONE, Choice, policy_for
from sac.planner.cost import entry_times
from sac.planner.devices import Device, device_at_hand, device_named
from sac.planner.layers import BudgetTooSmallError, MemoryConstraint, assign
from sac.planner.pareto import pareto
from sac.planner.pricing import Pricing
from sac.planner.profile import RegionProfile
from sac.planner.step import BACKWARD, BETWEEN, FORWARD, StepPhase, StepRecord
from sac.policy.model import Policy
from sac.policy.read import bytes_text
from sac.tables import seconds_text

# Note [From an observed step to every other]
#
# The step was observed under full recomputation. What another choice changes is known from the tape of the region
# (Note [Profiles]), from above:
# - It leaves behind the storages that replay starts from, or for no checkpointing those that autograd saves.
# - While its forward runs, these are alive in addition to what is alive in any case: the observed forwards are measured
#   at each op, and of each storage it is known until when it was alive (`forward_bytes`).
# - In its backward, everything that autograd saves is there at once after the replay, whatever was kept. On top come
#   storages that are only the start of a replay, those that backward has already read when the replay begins, and what
#   is alive between the steps of the replay (`replay_bytes`).
# Freeing earlier than assumed makes the peak lower, never higher. So a plan can be used without having been tried.
#
# What a choice leaves behind counts in every phase as often as calls of its region wait for their backward then: a
# pipeline stage holds several micro-batches, in whatever order its schedule runs them, and a block may be called more
# than once. The search for the choices knows one forward that adds up from region to region. What further ones hold is
# bounded, for some bounds, and the fastest choice that is found so is then filled up.

_PARTS = 12  # bounds that are tried


def option_bytes(profile: RegionProfile, choice: Choice) -> int:
    """Return the bytes that a region leaves behind under ``choice``, without its inputs."""
    if choice.keep is not None:
        return choice.keep.bytes
    return _bytes_of(profile, {*_needed(profile), *(profile.roots[value] for value in profile.routed)})


def _needed(profile: RegionProfile) -> set[int]:
    """Return the storages that autograd saves and the region makes."""
    return {profile.roots[need.value] for need in profile.needs if need.value in profile.maker}


def _bytes_of(profile: RegionProfile, roots: Collection[int]) -> int:
    return sum(profile.bytes[root] for root in roots)


def forward_bytes(profile: RegionProfile, choice: Choice) -> list[int]:
    """Return the most bytes by which a forward under ``choice`` may exceed one under full recomputation at each entry.

    The last number is for the time after all entries. All that a policy saves is held until then, needed or not, and
    what is written to later once more.
    """
    held, copied = _needed(profile), set[int]()
    if choice.keep is not None:
        made = (value for number in choice.keep.saved for value in profile.entries[number].makes)
        held = {profile.roots[value] for value in (*made, *profile.recomputed(choice.keep.saved).held)}
        copied = {root for entry in profile.entries for root in entry.writes}
    used = dict(enumerate(profile.until))  # the last entry during which a storage is there in any case
    for entry in profile.entries:
        for root in (*(profile.roots[value] for value in (*entry.reads, *entry.makes)), *entry.writes):
            used[root] = max(used.get(root, -1), entry.number)
    more = [0] * (len(profile.entries) + 1)
    for root in held - {profile.roots[value] for value in profile.routed}:
        begins = profile.maker.get(root, 0) if root in copied else used[root] + 1
        more[begins] += profile.bytes[root]
    return [*accumulate(more)]


def replay_bytes(profile: RegionProfile, choice: Choice, inputs: int) -> int:
    """Return the most bytes by which a backward under ``choice`` may exceed one under full recomputation.

    ``inputs``: what the region holds besides results of its ops.
    """
    if choice.keep is None:
        return 0
    again = profile.recomputed(choice.keep.saved)
    held, needed = {profile.roots[value] for value in again.held}, _needed(profile)
    needs = sorted((need for need in profile.needs if need.value in profile.maker), key=lambda one: one.time)
    # Until the replay begins, everything that it starts from is there, also what backward has read already.
    begins, starts = profile.late_replay(choice.keep.saved)
    first_read = {profile.roots[need.value]: need.time for need in reversed(needs)}
    waits = {root for root in (profile.roots[value] for value in starts) if first_read.get(root, -1) > begins}
    between = _replay_peak(profile, again.entries, held) - _bytes_of(profile, held | needed)
    more = _bytes_of(profile, held - needed) + _bytes_of(profile, waits) + max(0, between)
    return more + (inputs if needs and begins < needs[-1].time else 0)


def _replay_peak(profile: RegionProfile, entries: Sequence[int], held: Collection[int]) -> int:
    """Return the peak bytes while ``entries`` run again, without the region's inputs.

    Results are counted until the last entry that reads them; those that autograd saves, until the end.
    """
    last: dict[int, int] = {}
    for step, number in enumerate(entries):
        entry = profile.entries[number]
        for root in (*(profile.roots[value] for value in (*entry.reads, *entry.makes)), *entry.writes):
            last[root] = step
    stays = _needed(profile) | {*held}
    alive = {*held}
    live = high = _bytes_of(profile, alive)
    for step, number in enumerate(entries):
        made = {profile.roots[value] for value in profile.entries[number].makes} & profile.maker.keys() - alive
        alive |= made
        live += _bytes_of(profile, made)
        high = max(high, live)
        done = {root for root in alive - stays if last[root] <= step}
        alive -= done
        live -= _bytes_of(profile, done)
    return high


def figures_at(device: torch.device) -> Device:
    """Return the figures of a device; of another GPU if it is unknown, since only their ratios matter here."""
    try:
        return device_at_hand(device)
    except PlanError:
        return device_named("h100")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan for a budget: the policy, and its figures in bytes and seconds.

    ``allowed``: the budget in bytes. ``saved``: for the region at each of ``paths``, the entries that are saved, or
    None for no checkpointing. ``held``: the bytes that they take. ``in_flight``: the most calls of a region whose
    backward was still to come.
    """

    policy: Policy
    allowed: int
    peak: int
    least: int
    most: int
    seconds: float
    forward_seconds: float
    paths: tuple[str, ...]
    saved: tuple[tuple[int, ...] | None, ...]
    held: tuple[int, ...]
    in_flight: int = 1

    def __str__(self) -> str:
        again = self.seconds / self.forward_seconds if self.forward_seconds else 0.0
        return (
            f"planned for a budget of {bytes_text(self.allowed)}: predicted peak {bytes_text(self.peak)} (least "
            f"{bytes_text(self.least)}, without checkpointing {bytes_text(self.most)}), "
            f"{again:.0%} of the blocks' forward run again ({seconds_text(self.seconds)})"
            + (f", {self.in_flight} forwards in flight" if self.in_flight > 1 else "")
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a step a phase is: what decides which choices count in it.

    ``alive``: how many calls of each region are between their forward and their backward. ``own``: the region whose
    forward or backward it is, if any.
    """

    alive: tuple[int, ...]
    own: int | None
    in_backward: bool

    @property
    def upto(self) -> int:
        """The region before which all have one call more alive, as in a step of one forward."""
        if self.own is not None:
            return self.own
        if not self.alive[0]:
            return 0
        return next((at for at, count in enumerate(self.alive) if count != self.alive[0]), len(self.alive))

    @property
    def further(self) -> int:
        """The most calls of a region that are alive in addition to one of each before ``upto``."""
        return max(max(0, count - (at < self.upto)) for at, count in enumerate(self.alive))


@dataclass(frozen=True, slots=True)
class _Moment:
    """The phases at a place: their peak in bytes under full recomputation, and what the choices of its region add."""

    place: _Place
    peak: int
    more: tuple[int, ...] | None


def _places(record: StepRecord, numbers: Mapping[str, int]) -> Iterator[_Place]:
    """Yield the place of each phase of a step; ``numbers``: that of each region."""
    regions = [numbers[path] for path in record.paths]
    with_backward = {phase.position for phase in record.phases if phase.part == BACKWARD}
    alive = [0] * len(numbers)
    for phase in record.phases:
        own = None if phase.part == BETWEEN else regions[phase.position]
        for position in phase.ended:
            alive[regions[position]] -= 1
        yield _Place(tuple(alive), own, phase.part == BACKWARD)
        if own is not None and phase.part == FORWARD and phase.position in with_backward:
            alive[own] += 1


class Fitting:
    """The search for a plan on the grounds of observed steps; see Note [From an observed step to every other].

    ``profiles``: those of the regions, one per kind. ``record``: a step that begins with the bytes of steps to come.
    ``extra``: bytes that will be there and are not in the record.
    ``is_free``: whether no checkpointing is a choice, which goes beyond what a policy allows.
    """

    def __init__(
        self,
        profiles: Sequence[RegionProfile],
        record: StepRecord,
        device: Device,
        *,
        extra: int = 0,
        is_free: bool = True,
    ) -> None:
        self.profiles = tuple(profiles)
        self.paths = tuple(dict.fromkeys(record.paths))
        of_path = {path: group for group, profile in enumerate(profiles) for path in profile.paths}
        self.groups = tuple(of_path[path] for path in self.paths)
        pricing = Pricing(REPLAY, device)
        self.times = [entry_times(profile, device) for profile in profiles]
        self.choices = [
            _choices(pricing, profile, times, is_free=is_free)
            for profile, times in zip(profiles, self.times, strict=True)
        ]
        self._seconds = [tuple(choice.seconds for choice in self.choices[group]) for group in self.groups]
        self.bytes = [
            [option_bytes(profile, choice) for choice in choices]
            for profile, choices in zip(profiles, self.choices, strict=True)
        ]
        self._more, self._replay = self._predicted(record)
        self._risen: dict[Any, tuple[int, ...]] = {}  # known results of ``_in_forward``
        phases: dict[_Place, list[StepPhase]] = {}
        places = _places(record, {path: at for at, path in enumerate(self.paths)})
        for place, phase in zip(places, record.phases, strict=True):
            phases.setdefault(place, []).append(phase)
        self._moments = [self._moment(place, alike, extra) for place, alike in phases.items()]
        self.in_flight = max(count for one in self._moments for count in one.place.alive)

    def _predicted(self, record: StepRecord) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return, for each region and choice, what it holds and what its backward takes, above full recomputation."""
        held = dict.fromkeys(self.groups, 0)
        for phase in record.phases:
            if phase.part == FORWARD:
                group = self.groups[self.paths.index(record.paths[phase.position])]
                held[group] = max(held[group], phase.after - phase.before)
        more, replayed = {}, {}
        for group, bytes_held in held.items():
            sizes, profile = self.bytes[group], self.profiles[group]
            inputs = max(0, bytes_held - sizes[0])
            more[group] = tuple(max(0, size - sizes[0]) for size in sizes)
            later = (replay_bytes(profile, choice, inputs) for choice in self.choices[group][1:])
            replayed[group] = (0, *later)
        return [more[group] for group in self.groups], [replayed[group] for group in self.groups]

    @property
    def has_freedom(self) -> bool:
        """Whether there is a choice besides full recomputation."""
        return any(len(self.choices[group]) > 1 for group in self.groups)

    def _moment(self, place: _Place, phases: Sequence[StepPhase], extra: int) -> _Moment:
        peak = max(phase.peak for phase in phases)
        if place.own is None or place.in_backward:
            return _Moment(place, peak + extra, None if place.own is None else self._replay[place.own])
        more = [*zip(*{self._in_forward(place.own, phase, peak) for phase in phases}, strict=True)]
        return _Moment(place, peak + extra, tuple(map(max, more)))

    def _in_forward(self, own: int, phase: StepPhase, peak: int) -> tuple[int, ...]:
        """Return by how much a forward of the region ``own`` exceeds ``peak`` under each of its choices."""
        group = self.groups[own]
        profile = self.profiles[group]
        # Not observed op by op, or calls differ: all that a choice adds may be there at the peak.
        seen = phase.rises if phase.rises and profile.until else ((-1, phase.peak - phase.before),)
        rises = tuple((entry, phase.before + rise - peak) for entry, rise in seen)
        if (group, rises) not in self._risen:
            each = [forward_bytes(profile, choice) for choice in self.choices[group][1:]]
            found = (max(rise + more[entry] for entry, rise in rises) for more in each)
            self._risen[group, rises] = phase.peak - peak, *found
        return self._risen[group, rises]

    def peak_of(self, choice: Sequence[int]) -> int:
        """Return the predicted peak of a choice, in bytes."""
        return max(self._live(choice))

    def _live(self, choice: Sequence[int]) -> list[int]:
        """Return the predicted peak of each moment."""
        more = [sizes[one] for sizes, one in zip(self._more, choice, strict=True)]
        found = []
        for moment in self._moments:
            place, own = moment.place, moment.more
            live = moment.peak + sum(count * size for count, size in zip(place.alive, more, strict=True))
            found.append(live + (own[choice[place.own]] if own is not None and place.own is not None else 0))
        return found

    def least(self) -> int:
        """Return the least peak, in bytes: that of full recomputation."""
        return self.peak_of((0,) * len(self.paths))

    def _assign(self, allowed: int) -> tuple[int, ...]:
        """Return the fastest choice within ``allowed`` bytes, which are no fewer than the least peak."""
        further = [moment.place.further for moment in self._moments]
        if not any(further):
            return self._assign_with(further, 0, allowed, None)
        # What all regions hold together for one more forward is bounded in turn by some amounts.
        most = sum(max(sizes) for sizes in self._more)
        room = min((allowed - one.peak) // count for one, count in zip(self._moments, further, strict=True) if count)
        best: tuple[float, tuple[int, ...]] = (math.inf, (0,) * len(self.paths))
        for part in range(_PARTS + 1):
            bound = min(most, room) * part // _PARTS
            with suppress(BudgetTooSmallError):
                found = self._assign_with(further, bound, allowed, bound)
                best = min(best, (self._time(found), found))
        return self._filled(best[1], allowed)

    def _assign_with(self, further: Sequence[int], others: int, allowed: int, most: int | None) -> tuple[int, ...]:
        """Return the fastest choice if each further forward holds ``others`` bytes, and this one ``most`` at most."""
        constraints = [
            MemoryConstraint(one.peak + count * others, one.place.upto, one.more)
            for one, count in zip(self._moments, further, strict=True)
        ]
        if most is not None:
            constraints.append(MemoryConstraint(allowed - most, len(self.paths)))
        return assign(constraints, self._more, self._seconds, allowed)

    def _time(self, choice: Sequence[int]) -> float:
        return math.fsum(times[one] for times, one in zip(self._seconds, choice, strict=True))

    def _filled(self, choice: tuple[int, ...], allowed: int) -> tuple[int, ...]:
        """Return ``choice`` with faster ones for single regions, as long as they fit, those that spare most first."""
        found = list(choice)
        while True:
            live = self._live(found)
            faster = []
            for at, times in enumerate(self._seconds):
                now = found[at]
                others = [(level, one.place) for level, one in zip(live, self._moments, strict=True)]
                room = min(
                    ((allowed - level) // one.alive[at] for level, one in others if one.alive[at] and one.own != at),
                    default=0,
                )
                for other, time in enumerate(times):
                    if time < times[now] and self._more[at][other] - self._more[at][now] <= room:
                        faster.append((times[now] - time, at, other))
            for _, at, other in sorted(faster, reverse=True):
                now, found[at] = found[at], other
                if self.peak_of(found) <= allowed:
                    break
                found[at] = now
            else:
                return tuple(found)

    def within(self, budget: StepBudget, memory_bytes: int, name: str) -> Fitted:
        """Return the fastest plan within ``budget`` on a device with so much memory; raises ``PlanError``."""
        without = tuple(len(self.choices[group]) - 1 for group in self.groups)
        least, most = self.least(), self.peak_of(without)
        allowed = budget.bytes
        if allowed is None and budget.share is not None:
            allowed = least + int(budget.share * max(0, most - least))
        if allowed is None:
            allowed = int((budget.of_device or 0) * memory_bytes)
        if least > allowed:
            raise _too_small(budget, allowed, least)
        choice = without if most <= allowed else self._assign(allowed)
        picked = [self.choices[group][one] for group, one in zip(self.groups, choice, strict=True)]
        policy = policy_for(self.profiles, self.choices, self.groups, self.paths, choice, name)
        return Fitted(
            policy,
            allowed,
            self.peak_of(choice),
            least,
            most,
            sum(one.keep.seconds for one in picked if one.keep is not None),
            sum(sum(self.times[group]) for group in self.groups),
            self.paths,
            tuple(None if one.keep is None else tuple(sorted(one.keep.saved)) for one in picked),
            tuple(self.bytes[group][one] for group, one in zip(self.groups, choice, strict=True)),
            self.in_flight,
        )


def _choices(pricing: Pricing, profile: RegionProfile, times: Sequence[float], *, is_free: bool) -> tuple[Choice, ...]:
    """Return the choices for a region: full recomputation first, then what saves more."""
    options = [keep.saved for keep in pareto(profile, times)]
    if options[0]:  # saving it costs no bytes: full recomputation was observed
        options.insert(0, frozenset())
    found = [pricing.choice(profile, times, saved, f"{len(saved)} ops" if saved else "full") for saved in options]
    return (*found, Choice(NONE, None)) if is_free else tuple(found)


def _too_small(budget: StepBudget, allowed: int, least: int) -> PlanError:
    found = f"{budget} ({allowed} bytes) is below the least peak of a step of this model on these inputs"
    return PlanError(
        Problem("activation_checkpointing.budget", found, f"{least} bytes ({bytes_text(least)}) or more", fix=_FIX)
    )


_FIX = "give more, or shrink the batch, the sequence, or what checkpointing cannot: shard parameters, chunk the loss"
