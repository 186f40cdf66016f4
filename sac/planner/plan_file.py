"""Compute a plan for a budget: the policy that fits, and its predicted cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from sac.errors import PlanError, Problem
from sac.planner.budget import read_budget
from sac.planner.choices import NONE, Choice, policy_for
from sac.planner.layers import BudgetTooSmallError
from sac.planner.memory import Moment
from sac.planner.peak import PeakBreakdown
from sac.planner.planner import Planner, Point
from sac.planner.pricing import Pricing
from sac.planner.profile import RegionProfile
from sac.planner.step_time import plain_step_seconds
from sac.policy.model import Policy
from sac.policy.read import bytes_text

NEEDS_NONE = "no checkpointing is needed"
_ROUNDS = 12
_EVERY = (1, 2, 3, 4)  # by hand: full in every so many layers


@dataclass(slots=True)
class Plan:
    """A plan: the policy, the model and device it was made for, and the alternatives to it."""

    policy: Policy
    point: Point
    budget: int
    least: int
    most: int
    profiles: tuple[RegionProfile, ...]
    choices: tuple[tuple[Choice, ...], ...]
    pricing: Pricing
    static: int
    extra: int
    groups: tuple[int, ...] = ()  # region group of each position
    paths: tuple[str, ...] = ()  # path of the region at each position
    times: tuple[tuple[float, ...], ...] = ()  # seconds of each entry of each profile
    baselines: tuple[Point, ...] = ()
    curve: tuple[Point, ...] = ()
    notes: tuple[str, ...] = ()
    step_s: float | None = None  # if asked for: the predicted seconds of a whole step
    explained: tuple[PeakBreakdown, ...] = ()  # if asked for: the peak of the plan, and of the choice with the least


def make_plan(
    planner: Planner,
    budget: Any,
    *,
    title: str = "",
    same_layers: bool = False,
) -> Plan:
    """Return the plan with the least time within ``budget``; raises ``PlanError`` if none fits."""
    wanted = read_budget(budget)
    least, most = planner.least(), planner.point(NONE, planner.without_checkpointing)
    notes: list[str] = []
    if wanted.bytes is None:  # a share of the range of peaks: both ends have to be exact
        for end in (least, most):
            planner.run(end.choice)
        least, most = planner.point(least.label, least.choice), planner.point(NONE, most.choice)
    least = min([least, *_steps(planner, same_layers=same_layers)], key=lambda one: (one.peak, one.seconds))
    allowed = wanted.within(least.peak, most.peak)
    chosen = most.choice
    if allowed < most.peak or planner.step.peak_of(planner.run(chosen)) > allowed:
        chosen = _fitting(planner, allowed, least, same_layers=same_layers)
        if not same_layers:
            chosen = _no_slower_than_by_hand(planner, chosen, allowed)
    else:
        notes.append(NEEDS_NONE)
    point = planner.point("plan", chosen)
    made_for = (
        f"{title or type(planner.model).__name__}, {planner.pricing.device.name}: peak {point.peak} bytes of {allowed}"
        + (f", with {planner.step.extra} bytes of optimizer state" if planner.step.extra else "")
    )
    policy = policy_for(
        planner.profiles, planner.choices, planner.groups, planner.step.paths, chosen, "planned", made_for=made_for
    )
    return Plan(
        policy, point, allowed, min(least.peak, point.peak), most.peak, planner.profiles, planner.choices,
        planner.pricing, planner.step.static, planner.step.extra, planner.groups, planner.step.paths, planner.times,
        notes=tuple(notes),
    )  # fmt: skip


def with_step_seconds(planner: Planner, made: Plan) -> Plan:
    """Return the plan with the predicted seconds of a whole step."""
    return replace(made, step_s=plain_step_seconds(planner) + made.point.seconds)


def explained(planner: Planner, made: Plan) -> Plan:
    """Return the plan with what is alive at its peak, and at the least peak that was found if that is lower."""
    planner.progress(0, 3, "the least peak")
    planner.run(planner.least().choice)
    least = min(planner.records, key=lambda choice: planner.point("least", choice).peak)
    planner.progress(1, 3, "what is alive at the peak")
    found = [planner.explain(made.point.choice, made.point.label)]
    if planner.point("least", least).peak < made.point.peak:
        planner.progress(2, 3, "what is alive at the least peak")
        found.append(planner.explain(least, "least"))
    return replace(made, explained=tuple(found))


def _fitting(planner: Planner, budget: int, least: Point, *, same_layers: bool) -> tuple[int, ...]:
    """Return the fastest choice found whose measured step is within ``budget``; raises ``TooSmallError``."""
    found = _searched(planner, budget, same_layers=same_layers)
    if found is not None:
        return found
    planner.run(least.choice)
    if not same_layers:
        for choice in _by_hand(planner):
            planner.run(choice)
    _searched(planner, budget, same_layers=same_layers)  # with what these steps have taught
    steps = _steps(planner, same_layers=same_layers)
    fit = [one for one in steps if one.peak <= budget]
    if fit:
        return min(fit, key=lambda one: one.seconds).choice
    raise _too_small(planner, budget, min(steps, key=lambda one: one.peak))


def _searched(planner: Planner, budget: int, *, same_layers: bool) -> tuple[int, ...] | None:
    """Return the fastest choice by composed peaks whose measured step is within ``budget``; None if there is none."""
    aim = budget
    for _ in range(_ROUNDS):
        try:
            choice = planner.assign(aim, same_layers=same_layers)
        except BudgetTooSmallError:
            return None
        high = planner.step.peak_of(planner.run(choice))
        if high <= budget:
            return choice
        if planner.step.peak(choice)[0] <= aim:  # nothing was learnt that rules it out
            aim = min(aim - 1, aim - (high - budget))
    return None


def _by_hand(planner: Planner) -> list[tuple[int, ...]]:
    """Return full in every n-th layer, and the choices of Note [Choices by hand] for all regions."""
    return [*map(planner.every_nth, _EVERY), *map(planner.choice_by_hand, planner.by_hand)]


def _no_slower_than_by_hand(planner: Planner, chosen: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """Return the fastest choice by hand that fits if it is faster: composed peaks that are too high may hide it."""
    best = planner.point("plan", chosen)
    for choice in _by_hand(planner):
        one = planner.point("by hand", choice)
        if one.seconds < best.seconds and planner.step.peak_of(planner.run(choice)) <= budget:
            best = planner.point("plan", choice)
    return best.choice


def _steps(planner: Planner, *, same_layers: bool) -> list[Point]:
    """Return the measured costs of all choices that a step was run with; if layers interact, predictions may be off."""
    alike = [
        choice
        for choice in planner.records
        if not same_layers or len({*zip(planner.groups, choice, strict=True)}) == len({*planner.groups})
    ]
    return [planner.point("least", choice) for choice in alike]


class TooSmallError(PlanError):
    """The budget is below the least peak, ``least`` bytes."""

    def __init__(self, problems: Problem | Iterable[Problem], least: int = 0) -> None:
        super().__init__(problems)
        self.least = least

    def __reduce__(self) -> Any:
        return type(self), (self.problems, self.least)


def _too_small(planner: Planner, budget: int, least: Point) -> TooSmallError:
    """Return the error for a budget that is too small: the least budget that fits, and what determines it."""
    _, constraint = planner.step.peak(least.choice)
    moment = planner.step.moments[constraint]
    static = planner.step.static + planner.step.extra
    where = _where(moment, len(planner.groups))
    found = f"{bytes_text(budget)} is below the least peak of this model and these inputs, {bytes_text(least.peak)}"
    why = (
        f"{bytes_text(static)} are parameters, buffers, inputs and optimizer state; the peak is {where}"
        f", where checkpointing holds {bytes_text(least.kept)}"
    )
    return TooSmallError(Problem("budget", f"{found}: {why}", f"{least.peak} bytes or more", fix=_FIXES), least.peak)


_FIXES = "give more, or shrink the batch, the sequence, or what checkpointing cannot: shard parameters, chunk the loss"


def _where(moment: Moment, regions: int) -> str:
    if moment.path:
        return f"in the {'backward' if moment.in_backward else 'forward'} of {moment.path}"
    if moment.position == regions:
        return "in the head and the loss, after the last block"
    return f"between blocks, at place {moment.position}"
