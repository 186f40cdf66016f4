"""Trade a little predicted time of a plan for fewer rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sac.errors import PlanError, Problem
from sac.planner.choices import Choice, policy_for
from sac.planner.plan_file import Plan
from sac.planner.rules import matches_entry
from sac.planner.search import Planner
from sac.planner.step_time import plain_step_seconds
from sac.policy.model import Rule
from sac.tables import count_text, seconds_text

# Note [Simplifying a plan]
#
# A simpler plan is one with fewer rules that is within the budget, and at most a share of the time of a step slower.
# From the plan, steps are taken towards fewer rules: a rule is left out, or is applied to all layers, to all modules or
# to all calls of its ops; or the layers with one choice take another choice of the plan. Each step takes the change
# with the fewest rules, and the least time among these. Changes are priced exactly; their peaks are predicted. At the
# end a step is run with the plan; while its peak is above the budget, the last change is taken back.

_Saved = tuple[frozenset[int] | None, ...]  # by position: the entries that are saved; None: no checkpointing


def simplified(planner: Planner, made: Plan, share: float) -> Plan:
    """Return a plan with fewer rules that takes at most ``share`` of a step's time longer, or ``made`` itself.

    See Note [Simplifying a plan].
    """
    start = _Way.of(planner, planner.choices, made.point.choice)
    step_s = plain_step_seconds(planner) + made.point.seconds
    walk = [start]
    while (better := _better(walk[-1], made.budget, made.point.seconds + share * step_s)) is not None:
        walk.append(better)
    for way in reversed(walk[1:]):
        beside = planner.knowing(way.choices)
        if beside.step.peak_of(beside.run(way.choice)) <= made.budget:
            point = beside.point(made.point.label, way.choice)
            fewer = f"{count_text(len(way.rules), 'rule')} instead of {len(start.rules)}"
            note = f"simplified: {fewer}, for {seconds_text(max(0.0, point.seconds - made.point.seconds))} more"
            policy = replace(made.policy, rules=way.rules)
            return replace(made, policy=policy, point=point, choices=way.choices, notes=(*made.notes, note))
    return made


def read_share(value: Any) -> float:
    """Return a share of the time of a step as a number; raises ``PlanError``."""
    try:
        share = float(str(value).strip().removesuffix("%")) / 100
        if str(value).strip().endswith("%") and 0 <= share < 1:
            return share
    except ValueError:
        pass
    raise PlanError(Problem("simplify", f"{value!r} is not a share of the time of a step", '"0%" to "99%"'))


@dataclass(frozen=True, slots=True)
class _Way:
    """A choice for each position, among ``choices`` of its group; and the rules that say so."""

    planner: Planner
    choices: tuple[tuple[Choice, ...], ...]
    choice: tuple[int, ...]
    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, planner: Planner, choices: tuple[tuple[Choice, ...], ...], choice: tuple[int, ...]) -> _Way:
        policy = policy_for(planner.profiles, choices, planner.groups, planner.step.paths, choice, "simplified")
        return cls(planner, choices, choice, policy.rules)

    @property
    def picked(self) -> list[Choice]:
        """The choice at each position."""
        return [self.choices[group][one] for group, one in zip(self.planner.groups, self.choice, strict=True)]

    @property
    def saved(self) -> _Saved:
        """What each position saves."""
        return tuple(None if one.keep is None else one.keep.saved for one in self.picked)

    @property
    def seconds(self) -> float:
        """The time of recomputation and checkpointing."""
        return math.fsum(one.seconds for one in self.picked)

    def saving(self, saved: _Saved) -> _Way:
        """Return the way that saves this; it has further choices if none of those known does."""
        planner, choices, choice = self.planner, [[*one] for one in self.choices], []
        for group, wanted in zip(planner.groups, saved, strict=True):
            known = [None if one.keep is None else one.keep.saved for one in choices[group]]
            if wanted not in known:
                assert wanted is not None
                label = f"{len(wanted)} ops" if wanted else "full"
                profile, times = planner.profiles[group], planner.times[group]
                choices[group].append(planner.pricing.choice(profile, times, wanted, label))
                known.append(wanted)
            choice.append(known.index(wanted))
        return _Way.of(planner, tuple(map(tuple, choices)), tuple(choice))

    def changes(self) -> Iterator[_Saved]:
        """Yield what each position saves after one change."""
        for rule in self.rules:
            if rule.matches_module:
                continue
            yield self._changed(rule, adds=False)
            everywhere = replace(rule, layers=None)
            for wider in (
                everywhere,
                replace(rule, module=None),
                replace(rule, call=None),
                replace(everywhere, module=None),
            ):
                yield self._changed(wider, adds=True)
        used = dict.fromkeys(zip(self.planner.groups, self.saved, strict=True))
        for group, old in used:
            for other, new in used:
                if other == group and new != old:
                    places = zip(self.planner.groups, self.saved, strict=True)
                    yield tuple(new if place == (group, old) else place[1] for place in places)

    def _changed(self, rule: Rule, *, adds: bool) -> _Saved:
        """Return what is saved with what ``rule`` matches, or without it."""
        planner = self.planner
        found: list[frozenset[int] | None] = []
        for path, group, one in zip(planner.step.paths, planner.groups, self.saved, strict=True):
            profile = planner.profiles[group]
            layer = profile.layers[profile.paths.index(path)]
            if one is not None and rule.matches_region(path, layer, profile.stack_size):
                matched = {entry.number for entry in profile.candidates if matches_entry(rule, entry)}
                one = one | matched if adds else one - matched
            found.append(one)
        return tuple(found)


def _better(way: _Way, budget: int, seconds: float) -> _Way | None:
    """Return the change of ``way`` with the fewest rules that is within both limits, or None if none has fewer."""
    found = (way.saving(saved) for saved in dict.fromkeys(way.changes()))
    fewer = [one for one in found if len(one.rules) < len(way.rules) and one.seconds <= seconds]
    for one in sorted(fewer, key=lambda one: (len(one.rules), one.seconds)):
        if way.planner.knowing(one.choices).step.peak(one.choice)[0] <= budget:
            return one
    return None
