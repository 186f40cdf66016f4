"""Trade a little predicted time of a plan for fewer rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sac.errors import PlanError, Problem
from sac.planner.choices import Choice, policy_for
from sac.planner.link_search import LinkPlan
from sac.planner.offloading import OffloadPlanner, sending
from sac.planner.plan_file import Plan, notes_on
from sac.planner.planner import Planner
from sac.planner.rules import matches_entry
from sac.planner.step_time import plain_step_seconds
from sac.policy.model import Decision, OffloadSection, Rule
from sac.tables import count_text, seconds_text

# Note [Simplifying a plan]
#
# A simpler plan is one with fewer rules that is within the budget, and at most a share of the time of a step slower.
# From the plan, steps are taken towards fewer rules: a rule is left out, or is applied to all layers, to all modules or
# to all calls of its ops; or the layers with one choice take another choice of the plan. Each step takes the change
# with the fewest rules, and the least time among these. Changes are priced exactly; their peaks are predicted. At the
# end a step is run with the plan; while its peak is above the budget, the last change is taken back.
#
# Of a plan that offloads (Note [Plans that offload]), a rule may also save on the device what it offloads, or offload
# what it saves. Its limits stay; the clock prices changes, and the step that is run at the end offloads.

_Kept = tuple[frozenset[int], frozenset[int]]  # the entries that are saved, and those of them that are offloaded
_EachKept = tuple[_Kept | None, ...]  # by position; None: no checkpointing


def simplified(planner: Planner, made: Plan, share: float) -> Plan:
    """Return a plan with fewer rules that takes at most ``share`` of a step's time longer, or ``made`` itself.

    See Note [Simplifying a plan].
    """
    start = _start(planner, made)
    step_s = plain_step_seconds(planner) + made.point.seconds + made.point.stall
    walk = [start]
    limit = (made.point.seconds if made.offloaded is None else start.seconds) + share * step_s
    while (better := _better(walk[-1], made.budget, limit)) is not None:
        walk.append(better)
    for way in reversed(walk[1:]):
        found = way.measured(made)
        if found.point.peak <= made.budget and (made.link is None or made.link.has_room(found.point.pinned)):
            fewer = f"{count_text(len(way.rules), 'rule')} instead of {len(start.rules)}"
            note = f"simplified: {fewer}, for {seconds_text(max(0.0, way.seconds - start.seconds))} more"
            policy = replace(made.policy, rules=way.rules)
            return replace(found, policy=policy, choices=way.choices, notes=(*found.notes, note))
    return made


def _start(planner: Planner, made: Plan) -> _Way:
    if made.offloaded is None:
        found = tuple(tuple((choice, at) for at, choice in enumerate(of_group)) for of_group in planner.choices)
        return _Way.of(planner, found, made.point.choice)
    assert made.link is not None
    offloading = OffloadPlanner(planner, made.link)
    found = tuple(
        tuple(zip(choices, known, strict=True))
        for choices, known in zip(offloading.choices, offloading.known, strict=True)
    )
    return _Way.of(planner, found, made.point.choice, offloading, made.offloaded.section)


def read_share(value: Any) -> float:
    """Return a share of the time of a step as a number; raises ``PlanError``."""
    try:
        share = float(str(value).strip().removesuffix("%")) / 100
        if str(value).strip().endswith("%") and 0 <= share < 1:
            return share
    except ValueError:
        pass
    raise PlanError(Problem("simplify", f"{value!r} is not a share of the time of a step", '"0%" to "99%"'))


@dataclass(frozen=True)
class _Way:
    """A choice for each position, and the rules that say so.

    ``found``: the choices of each group, each with the index among those of ``planner`` of the one that offloads
    nothing. ``offloading``, ``section``: of a plan that offloads.
    """

    planner: Planner
    found: tuple[tuple[tuple[Choice, int], ...], ...]
    choice: tuple[int, ...]
    rules: tuple[Rule, ...]
    offloading: OffloadPlanner | None
    section: OffloadSection | None

    @classmethod
    def of(
        cls,
        planner: Planner,
        found: tuple[tuple[tuple[Choice, int], ...], ...],
        choice: tuple[int, ...],
        offloading: OffloadPlanner | None = None,
        section: OffloadSection | None = None,
    ) -> _Way:
        choices = tuple(tuple(one for one, _ in of_group) for of_group in found)
        policy = policy_for(planner.profiles, choices, planner.groups, planner.step.paths, choice, "simplified")
        return cls(planner, found, choice, policy.rules, offloading, section)

    @property
    def choices(self) -> tuple[tuple[Choice, ...], ...]:
        """The choices of each group."""
        return tuple(tuple(one for one, _ in of_group) for of_group in self.found)

    @property
    def kept(self) -> _EachKept:
        """What each position keeps."""
        return tuple(
            _kept(self.found[group][one][0]) for group, one in zip(self.planner.groups, self.choice, strict=True)
        )

    @property
    def seconds(self) -> float:
        """The time of recomputation and checkpointing; of a plan that offloads, of the whole step."""
        if self.offloading is not None:
            return self._estimated.clocked.seconds
        picked = (self.found[group][one][0] for group, one in zip(self.planner.groups, self.choice, strict=True))
        return math.fsum(one.seconds for one in picked)

    def is_predicted_to_fit(self, budget: int) -> bool:
        """Return whether the predicted peak, and what waits on the host, are within the budgets."""
        if self.offloading is not None:
            return self._estimated.peak <= budget and self.offloading.link.has_room(self._estimated.clocked.host)
        return self.planner.knowing(self.choices).step.peak(self.choice)[0] <= budget

    @cached_property
    def _among(self) -> OffloadPlanner:
        assert self.offloading is not None
        return self.offloading.among(self.planner, self.found)

    @cached_property
    def _estimated(self) -> LinkPlan:
        assert self.section is not None
        return self._among.estimated(self.choice, self.section)

    def measured(self, made: Plan) -> Plan:
        """Run a step, and return the plan ``made`` with its costs and notes."""
        if made.offloaded is None or self.section is None:
            knowing = self.planner.knowing(self.choices)
            knowing.run(self.choice)
            return replace(made, point=knowing.point(made.point.label, self.choice))
        point, clocked = self._among.measured(made.point.label, self.choice, self.section)
        offloaded = replace(
            made.offloaded, point=point, choices=self.choices, step_s=clocked.seconds, busy=clocked.busy
        )
        stale = notes_on(made.offloaded)
        notes = (*(note for note in made.notes if note not in stale), *notes_on(offloaded))
        return replace(made, point=point, offloaded=offloaded, notes=notes)

    def keeping(self, each: _EachKept) -> _Way:
        """Return the way that keeps this; it has further choices if none of those known does."""
        planner = self.planner
        plain, found, choice = [[*one] for one in planner.choices], [[*one] for one in self.found], []
        for group, wanted in zip(planner.groups, each, strict=True):
            place = next((at for at, (one, _) in enumerate(found[group]) if _kept(one) == wanted), None)
            if place is None:
                assert wanted is not None
                saved, offloaded = wanted
                profile, times = planner.profiles[group], planner.times[group]
                of_saved = (at for at, one in enumerate(plain[group]) if _kept(one) == (saved, frozenset()))
                index = next(of_saved, len(plain[group]))
                if index == len(plain[group]):
                    label = f"{len(saved)} ops" if saved else "full"
                    plain[group].append(planner.pricing.choice(profile, times, saved, label))
                made = plain[group][index]
                if self.offloading is not None:
                    engine, smallest = planner.pricing.run_by, self.offloading.link.smallest
                    made = sending(profile, made, offloaded, engine, smallest)
                    alike = (at for at, (one, _) in enumerate(found[group]) if _kept(one) == _kept(made))
                    place = next(alike, None)
                if place is None:
                    place = len(found[group])
                    found[group].append((made, index))
            choice.append(place)
        if any(len(known) > len(of_group) for known, of_group in zip(plain, planner.choices, strict=True)):
            planner = planner.knowing(tuple(map(tuple, plain)))
        return _Way.of(planner, tuple(map(tuple, found)), tuple(choice), self.offloading, self.section)

    def changes(self) -> Iterator[_EachKept]:
        """Yield what each position keeps after one change."""
        for rule in self.rules:
            if rule.matches_module:
                continue
            yield self._changed(rule, adds=False)
            if self.offloading is not None:
                moved = Decision.SAVE if rule.do == Decision.OFFLOAD.value else Decision.OFFLOAD
                yield self._changed(replace(rule, do=moved.value), adds=True)
            everywhere = replace(rule, layers=None)
            for wider in (
                everywhere,
                replace(rule, module=None),
                replace(rule, call=None),
                replace(everywhere, module=None),
            ):
                yield self._changed(wider, adds=True)
        used = dict.fromkeys(zip(self.planner.groups, self.kept, strict=True))
        for group, old in used:
            for other, new in used:
                if other == group and new != old:
                    places = zip(self.planner.groups, self.kept, strict=True)
                    yield tuple(new if place == (group, old) else place[1] for place in places)

    def _changed(self, rule: Rule, *, adds: bool) -> _EachKept:
        """Return what is kept with what ``rule`` matches, as it says, or without it."""
        planner = self.planner
        found: list[_Kept | None] = []
        for path, group, one in zip(planner.step.paths, planner.groups, self.kept, strict=True):
            profile = planner.profiles[group]
            layer = profile.layers[profile.paths.index(path)]
            if one is not None and rule.matches_region(path, layer, profile.stack_size):
                matched = frozenset(entry.number for entry in profile.candidates if matches_entry(rule, entry))
                saved, offloaded = one
                offloads = adds and rule.do == Decision.OFFLOAD.value
                one = (
                    (saved | matched if adds else saved - matched),
                    (offloaded | matched if offloads else offloaded - matched),
                )
            found.append(one)
        return tuple(found)


def _kept(choice: Choice) -> _Kept | None:
    return None if choice.keep is None else (choice.keep.saved, choice.offloaded)


def _better(way: _Way, budget: int, seconds: float) -> _Way | None:
    """Return the change of ``way`` with the fewest rules that is within both limits, or None if none has fewer."""
    found = (way.keeping(each) for each in dict.fromkeys(way.changes()))
    fewer = [one for one in found if len(one.rules) < len(way.rules) and one.seconds <= seconds]
    for one in sorted(fewer, key=lambda one: (len(one.rules), one.seconds)):
        if one.is_predicted_to_fit(budget):
            return one
    return None
