"""From observed steps to the policy that fits a budget."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from sac.config_keys import StepBudget
from sac.errors import PlanError, Problem
from sac.planner.choices import NONE, Choice, policy_for
from sac.planner.cost import entry_times
from sac.planner.devices import Device, device_at_hand, device_named
from sac.planner.layers import BudgetTooSmallError, MemoryConstraint, assign, assign_alike, peak
from sac.planner.memory import StepModel
from sac.planner.pareto import pareto
from sac.planner.pricing import Pricing
from sac.planner.profile import RegionProfile
from sac.planner.step import StepRecord
from sac.policy.model import Policy
from sac.policy.read import bytes_text
from sac.region.settings import REPLAY
from sac.tables import seconds_text

# Note [From an observed step to every other]
#
# The step was observed under full recomputation. What another choice changes is known from the tape of the region
# (Note [Profiles]), from above:
# - It leaves behind the storages that replay starts from, or for no checkpointing those that autograd saves.
# - While its forward runs, these are alive in addition to what is alive in any case.
# - In its backward, everything that autograd saves is there at once after the replay, whatever was kept. On top come
#   storages that are only the start of a replay, those that backward has already read when the replay begins, and what
#   is alive between the steps of the replay (`replay_bytes`).
# Freeing earlier than assumed makes the peak lower, never higher. So a plan can be used without having been tried.


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

    ``allowed``: the budget in bytes. ``saved``: for the region at each position, the entries that are saved, or None
    for no checkpointing. ``held``: the bytes that they take.
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

    def __str__(self) -> str:
        again = self.seconds / self.forward_seconds if self.forward_seconds else 0.0
        return (
            f"planned for a budget of {bytes_text(self.allowed)}: predicted peak {bytes_text(self.peak)} (least "
            f"{bytes_text(self.least)}, without checkpointing {bytes_text(self.most)}), "
            f"{again:.0%} of the blocks' forward run again ({seconds_text(self.seconds)})"
        )


class Fitting:
    """The search for a plan on the grounds of observed steps; see Note [From an observed step to every other].

    ``profiles``: those of the regions, one per kind. ``records``: steps that begin with the bytes of steps to come.
    ``extra``: bytes that will be there and are not in the records.
    ``is_free``: whether no checkpointing is a choice, which goes beyond what a policy allows.
    """

    def __init__(
        self,
        profiles: Sequence[RegionProfile],
        records: Sequence[StepRecord],
        device: Device,
        *,
        extra: int = 0,
        is_free: bool = True,
    ) -> None:
        self.profiles = tuple(profiles)
        paths = records[0].paths
        of_path = {path: group for group, profile in enumerate(profiles) for path in profile.paths}
        self.paths, self.groups = paths, tuple(of_path[path] for path in paths)
        pricing = Pricing(REPLAY, device)
        self.times = [entry_times(profile, device) for profile in profiles]
        self.choices = [
            _choices(pricing, profile, times, is_free=is_free)
            for profile, times in zip(profiles, self.times, strict=True)
        ]
        sizes = [
            [option_bytes(profile, choice) for choice in choices]
            for profile, choices in zip(profiles, self.choices, strict=True)
        ]
        self.step = StepModel(self.groups, sizes, paths, extra=extra)
        for record in records:
            self.step.learn(record, (0,) * len(paths))
        self._predict(sizes)
        self._held = [self.step.held_by(group) for group in self.groups]
        self._seconds = [tuple(choice.seconds for choice in self.choices[group]) for group in self.groups]
        self._constraints: tuple[MemoryConstraint, ...] = self.step.constraints()

    def _predict(self, sizes: Sequence[Sequence[int]]) -> None:
        """Put what each choice takes into the model of the step, from what full recomputation has taken."""
        step = self.step
        for group, (profile, choices) in enumerate(zip(self.profiles, self.choices, strict=True)):
            if group not in self.groups:
                continue
            held = step.held[group, 0]
            forward, backward = step.own.get((group, 0, False), 0), step.own.get((group, 0, True), 0)
            inputs = max(0, held - sizes[group][0])
            for index, choice in enumerate(choices[1:], start=1):
                more = max(0, sizes[group][index] - sizes[group][0])
                step.held[group, index] = held + more
                step.own[group, index, False] = forward + more
                step.own[group, index, True] = backward + replay_bytes(profile, choice, inputs)

    @property
    def has_freedom(self) -> bool:
        """Whether there is a choice besides full recomputation."""
        return any(len(self.choices[group]) > 1 for group in self.groups)

    def peak_of(self, choice: Sequence[int]) -> int:
        """Return the predicted peak of a choice, in bytes."""
        return peak(self._constraints, self._held, choice)[0]

    def _assign(self, allowed: int) -> tuple[int, ...]:
        if len({*self.paths}) < len(self.paths):
            return assign_alike(self._constraints, self._held, self._seconds, allowed, self.groups)
        return assign(self._constraints, self._held, self._seconds, allowed)

    def least(self) -> int:
        """Return the least peak, in bytes."""
        try:
            return self.peak_of(self._assign(0))
        except BudgetTooSmallError as error:
            return error.least

    def index_of(self, saved: Sequence[Sequence[int] | None]) -> tuple[int, ...] | None:
        """Return the choice that saves these entries at each position, if there is one."""
        if len(saved) != len(self.groups):
            return None
        found = []
        for group, wanted in zip(self.groups, saved, strict=True):
            known = [None if one.keep is None else tuple(sorted(one.keep.saved)) for one in self.choices[group]]
            entries = None if wanted is None else tuple(wanted)
            if entries not in known:
                return None
            found.append(known.index(entries))
        return tuple(found)

    def within(
        self, budget: StepBudget, memory_bytes: int, name: str, known: Sequence[Sequence[int] | None] | None = None
    ) -> Fitted:
        """Return the fastest plan within ``budget`` on a device with so much memory; raises ``PlanError``.

        ``known``: what an earlier plan saves at each position. It is used again if it fits.
        """
        without = tuple(len(self.choices[group]) - 1 for group in self.groups)
        least, most = self.least(), self.peak_of(without)
        allowed = budget.bytes
        if allowed is None and budget.share is not None:
            allowed = least + int(budget.share * max(0, most - least))
        if allowed is None:
            allowed = int((budget.of_device or 0) * memory_bytes)
        choice = self.index_of(known) if known is not None else None
        if choice is None or self.peak_of(choice) > allowed:
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
            tuple(self.step.bytes[group][one] for group, one in zip(self.groups, choice, strict=True)),
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
