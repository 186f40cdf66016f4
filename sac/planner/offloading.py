"""Plans in which values wait in host memory: their choices, the search, and the step that checks them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sac.planner.choices import Choice
from sac.planner.layers import MemoryConstraint
from sac.planner.link_search import LinkOption, LinkPlan, LinkProblem, Row
from sac.planner.planner import Planner, Point
from sac.planner.profile import Engine, RegionProfile
from sac.planner.step_time import region_times
from sac.planner.transfer_clock import Clocked, Link, StepTimes, Windows
from sac.policy.model import OffloadSection
from sac.stores.transfers import LIMITS

# Note [Plans that offload]
#
# Such a plan starts from the choices of a plan without a link, whose bytes and steps are measured. Of what a choice
# saves, any part may wait on the host instead; only its bytes matter, so of the parts with equal bytes one is a choice.
# The storages that the region returns, those that are small, and the results of routing ops stay on the device
# (Note [Offloaded values]).
#
# The search (Note [The search with a link]) estimates bytes: a choice leaves behind what it saves, less what it sends.
# Inputs on the host are missing wherever they are not needed. Then a step is run in which the transfers of the policy
# really take place, without data (Note [Transfers without data]). Its peak is that of the plan. If it is above the
# budget, or host memory has no room for the buffers of what waits there, the search runs again with less.

FULL_ON_HOST = "full + inputs on the host"
EVERYTHING = "offload everything"

_MOST_SAVING = 48  # choices of a group from which parts are offloaded
_MOST_PARTS = 24  # of one choice
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A plan that offloads. ``choices``: those of each group, of which ``point`` chose; ``step_s``: of its step.

    ``bound_s``: a lower bound of the seconds of a step within the budget. ``is_saturated``: whether the link down has
    hardly a pause in the forward.
    """

    point: Point
    choices: tuple[tuple[Choice, ...], ...]
    section: OffloadSection
    step_s: float
    bound_s: float = 0.0
    busy: float = 0.0


class OffloadPlanner:
    """Finds plans that offload over ``link``; see Note [Plans that offload]."""

    def __init__(self, planner: Planner, link: Link) -> None:
        self.planner = planner
        self.link = link
        self.times: StepTimes = region_times(planner)
        self._take(
            _with_offloading(profile, choices, planner.pricing.run_by, link.smallest)
            for profile, choices in zip(planner.profiles, planner.choices, strict=True)
        )

    def _take(self, found: Iterable[Sequence[tuple[Choice, int]]]) -> None:
        """Use these choices of each group, each with the index of that without offloading among the planner's."""
        pairs = tuple(map(tuple, found))
        self.known = tuple(tuple(known for _, known in of_group) for of_group in pairs)
        self.choices = tuple(tuple(choice for choice, _ in of_group) for of_group in pairs)
        self._knowing = self.planner.knowing(self.choices)

    def among(self, planner: Planner, found: Iterable[Sequence[tuple[Choice, int]]]) -> OffloadPlanner:
        """Return a planner that has the choices ``found`` instead, of those of ``planner``, which knows more."""
        other = copy.copy(self)
        other.planner = planner
        other._take(found)
        return other

    def estimated(self, choice: tuple[int, ...], section: OffloadSection) -> LinkPlan:
        """Return what the clock says of a choice under the limits of ``section``, and its estimated peak."""
        return self._problem(inputs=section.inputs).run(choice, _windows(section))

    def measured(self, label: str, choice: tuple[int, ...], section: OffloadSection) -> tuple[Point, Clocked]:
        """Run a step with a choice; return its costs, and what the clock says of it."""
        clocked = self.estimated(choice, section).clocked
        return self._point(label, choice, clocked, section), clocked

    def plan(self, budget: int) -> Offloaded | None:
        """Return the fastest plan found whose step is within ``budget`` bytes; None if there is none."""
        found = [one for inputs in (False, True) if (one := self._within(budget, inputs=inputs)) is not None]
        return min(found, key=lambda one: one.step_s, default=None)

    def baselines(self) -> tuple[Point, ...]:
        """Return the costs of full with its inputs on the host, and of offloading everything."""
        limits = Windows(LIMITS.in_flight, LIMITS.ahead)
        rows = []
        for label, pick in ((FULL_ON_HOST, lambda choices: 0), (EVERYTHING, _all_offloaded)):
            choice = tuple(pick(self.choices[group]) for group in self.planner.groups)
            clocked = self._problem(inputs=True).run(choice, limits).clocked
            rows.append(self._point(label, choice, clocked, self._section(limits, inputs=True)))
        return tuple(rows)

    def _within(self, budget: int, *, inputs: bool) -> Offloaded | None:
        problem, aim = self._problem(inputs=inputs), budget
        for _ in range(_ROUNDS):
            found = problem.best(aim)
            if found is None:
                return None
            section = self._section(found.windows, inputs=inputs)
            point = self._point("plan", found.choice, found.clocked, section)
            more = 0 if self.link.has_room(point.pinned) else point.pinned - (self.link.host or 0)
            if more:  # of values stayed on the device: buffers in host memory are larger than what waits in them
                problem = replace(problem, link=replace(self.link, host=max(0, found.clocked.host - more)))
            elif point.peak <= budget:
                bound = problem.bound(budget, found.windows.in_flight)
                seconds, busy = found.clocked.seconds, found.clocked.busy
                return Offloaded(point, self.choices, section, seconds, bound, busy)
            else:
                aim = found.peak - (point.peak - budget)  # less than the estimate, so another plan is found
        return None

    def _section(self, windows: Windows, *, inputs: bool) -> OffloadSection:
        smallest = self.link.smallest if self.link.smallest != LIMITS.smallest else None
        return OffloadSection(inputs, smallest, windows.in_flight, windows.ahead)

    def _point(self, label: str, choice: tuple[int, ...], clocked: Clocked, section: OffloadSection) -> Point:
        record, host = self._knowing.run_offloading(choice, section, self.link.host)
        picked = [self.choices[group][one] for group, one in zip(self.planner.groups, choice, strict=True)]
        return Point(
            label,
            choice,
            kept=max(0, record.kept - record.static - self.planner.step.rest),
            peak=self.planner.step.peak_of(record),
            flops=sum(one.flops for one in picked),
            seconds=sum(one.seconds for one in picked),
            is_checked=True,
            host=host.waiting,
            pinned=host.pinned,
            stall=clocked.stall,
        )

    def _problem(self, *, inputs: bool) -> LinkProblem:
        step, groups = self.planner.step, self.planner.groups
        profiles = self.planner.profiles
        options = []
        for group, choices in enumerate(self.choices):
            held = step.held_by(group)
            own_input = profiles[group].input_bytes if inputs else 0
            options.append(
                tuple(
                    LinkOption(
                        held[known] - sum(choice.sent) + (0 if choice.keep is not None else own_input),
                        choice.seconds,
                        choice.sent,
                        own_input if choice.keep is not None else 0,
                    )
                    for choice, known in zip(choices, self.known[group], strict=True)
                )
            )
        away = [0]
        for group in groups:
            away.append(away[-1] + (profiles[group].input_bytes if inputs else 0))
        rows = []
        for moment, constraint in zip(step.moments, step.constraints(), strict=True):
            own = constraint.own
            if own is not None:
                own = tuple(own[known] for known in self.known[groups[moment.position]])
            base = constraint.base - away[moment.position]
            rows.append(Row(MemoryConstraint(base, constraint.upto, own), moment.position, moment.in_backward))
        return LinkProblem(groups, tuple(options), tuple(rows), self.times, self.link)


def _windows(section: OffloadSection) -> Windows:
    return Windows(
        LIMITS.in_flight if section.in_flight is None else section.in_flight,
        LIMITS.ahead if section.ahead is None else section.ahead,
    )


def sending(profile: RegionProfile, choice: Choice, wanted: frozenset[int], engine: Engine, smallest: int) -> Choice:
    """Return ``choice`` with those of the entries ``wanted`` on the host that can leave the device."""
    units = _units(profile, choice, engine, smallest) if choice.keep is not None else []
    leaving = [unit for unit in units if unit[0] <= wanted]
    entries = frozenset[int]().union(*(one for one, _ in leaving))
    return _on_host(choice, entries, tuple(size for _, sizes in leaving for size in sizes))


def _on_host(choice: Choice, entries: frozenset[int], sent: tuple[int, ...]) -> Choice:
    label = f"{choice.label}, {len(entries)} on the host" if entries else choice.label
    return replace(choice, label=label, bytes=choice.bytes - sum(sent), offloaded=entries, sent=sent)


def _all_offloaded(choices: Sequence[Choice]) -> int:
    """Return the choice that runs least again, and of these the one that sends most."""
    saving = [at for at, one in enumerate(choices) if one.keep is not None]
    return min(saving, key=lambda at: (choices[at].seconds, -sum(choices[at].sent)))


def _with_offloading(
    profile: RegionProfile, choices: Sequence[Choice], engine: Engine, smallest: int
) -> list[tuple[Choice, int]]:
    """Return the choices of a group with those that offload a part, each with the index of that without offloading.

    No other is better in bytes on the device, bytes sent and seconds.
    """
    saving = [at for at, choice in enumerate(choices) if choice.keep is not None]
    few = [saving[round(at * (len(saving) - 1) / (_MOST_SAVING - 1))] for at in range(_MOST_SAVING)]
    found: list[tuple[Choice, int]] = []
    for at in dict.fromkeys(few if len(saving) > _MOST_SAVING else saving):
        choice = choices[at]
        assert choice.keep is not None
        for entries, sent in _parts(profile, choice, engine, smallest):
            found.append((_on_host(choice, entries, sent), at))
    found.sort(key=lambda one: (one[0].bytes, sum(one[0].sent), one[0].seconds))
    front: list[tuple[Choice, int]] = []
    for one, at in found:
        better = (other for other, _ in front if other.seconds <= one.seconds and sum(other.sent) <= sum(one.sent))
        if next(better, None) is None:
            front.append((one, at))
    first = next(at for at, (one, known) in enumerate(front) if known == 0 and not one.sent)
    front.insert(0, front.pop(first))  # full comes first, no checkpointing last
    return [*front, (choices[-1], len(choices) - 1)]


def _parts(
    profile: RegionProfile, choice: Choice, engine: Engine, smallest: int
) -> Iterator[tuple[frozenset[int], tuple[int, ...]]]:
    """Yield parts of what a choice saves that can wait on the host, with different bytes: entries, and storages."""
    units = _units(profile, choice, engine, smallest)
    parts: dict[int, tuple[frozenset[int], tuple[int, ...]]] = {0: (frozenset(), ())}
    for entries, sent in units:
        for size, (others, others_sent) in [*parts.items()]:
            parts.setdefault(size + sum(sent), (others | entries, (*others_sent, *sent)))
    sizes = sorted(parts)
    if len(sizes) > _MOST_PARTS:
        sizes = [sizes[round(at * (len(sizes) - 1) / (_MOST_PARTS - 1))] for at in range(_MOST_PARTS)]
    yield from (parts[size] for size in sizes)


def _units(
    profile: RegionProfile, choice: Choice, engine: Engine, smallest: int
) -> list[tuple[frozenset[int], tuple[int, ...]]]:
    """Return the entries that can only be offloaded together, with the bytes of the storages that leave the device."""
    assert choice.keep is not None
    of_root: dict[int, set[int]] = {}
    for value in profile.recomputed(choice.keep.saved, engine).held:
        of_root.setdefault(profile.roots[value], set()).add(profile.maker[value])
    routed = {profile.roots[value] for value in profile.routed}
    units: list[tuple[set[int], list[int]]] = []
    for root, entries in sorted(of_root.items()):
        leaves = profile.bytes[root] >= smallest and root not in profile.results and root not in routed
        merged: tuple[set[int], list[int]] = ({*entries}, [root] if leaves else [])
        for unit in [unit for unit in units if unit[0] & entries]:
            units.remove(unit)
            merged = merged[0] | unit[0], [*unit[1], *merged[1]]
        units.append(merged)
    sendable = (unit for unit in units if unit[1] and unit[0] <= choice.keep.saved)
    return [(frozenset(entries), tuple(profile.bytes[root] for root in sorted(roots))) for entries, roots in sendable]
