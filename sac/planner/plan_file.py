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
from sac.planner.offloading import Offloaded, OffloadPlanner
from sac.planner.peak import PeakBreakdown
from sac.planner.planner import Planner, Point
from sac.planner.pricing import Pricing
from sac.planner.profile import RegionProfile
from sac.planner.step_time import plain_step_seconds
from sac.planner.transfer_clock import Link
from sac.policy.model import Policy
from sac.policy.read import bytes_text
from sac.tables import seconds_text

NEEDS_NONE = "no checkpointing is needed"
_ROUNDS = 12
_SATURATED = 0.9  # of the forward
_WORTH = 1e-3  # of a step: what a plan that offloads has to gain
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
    link: Link | None = None  # if values may wait on the host
    offloaded: Offloaded | None = None  # if some do
    explained: tuple[PeakBreakdown, ...] = ()  # if asked for: the peak of the plan, and of the choice with the least


def make_plan(
    planner: Planner,
    budget: Any,
    *,
    title: str = "",
    same_layers: bool = False,
    link: Link | None = None,
) -> Plan:
    """Return the plan with the least time within ``budget``; raises ``PlanError`` if none fits.

    ``link``: values may wait in host memory, see Note [Plans that offload].
    """
    if link is not None:
        refuse_to_offload(planner, same_layers=same_layers)
    wanted = read_budget(budget)
    least, most = planner.least(), planner.point(NONE, planner.without_checkpointing)
    notes: list[str] = []
    if wanted.bytes is None:  # a share of the range of peaks: both ends have to be exact
        for end in (least, most):
            planner.run(end.choice)
        least, most = planner.point(least.label, least.choice), planner.point(NONE, most.choice)
    least = min([least, *_steps(planner, same_layers=same_layers)], key=lambda one: (one.peak, one.seconds))
    allowed = wanted.within(least.peak, most.peak)
    chosen, too_small, offloaded = most.choice, None, None
    if allowed < most.peak or planner.step.peak_of(planner.run(chosen)) > allowed:
        try:
            chosen = _fitting(planner, allowed, least, same_layers=same_layers)
            if not same_layers:
                chosen = _no_slower_than_by_hand(planner, chosen, allowed)
        except TooSmallError as error:
            too_small = error
        if link is not None:
            offloading = OffloadPlanner(planner, link)
            offloaded = offloading.plan(allowed)
            if offloaded is not None and too_small is None:
                plain_s = offloading.times.total + planner.point("plan", chosen).seconds
                offloaded = offloaded if offloaded.step_s < (1 - _WORTH) * plain_s else None
        if too_small is not None and offloaded is None:
            raise too_small if link is None else _also_over(link, too_small)
    else:
        notes.append(NEEDS_NONE)
    if planner.workspace is not None and (count := len(planner.workspace.estimated)):
        calls = f"{count} call{'s' if count > 1 else ''} of large ops"
        notes.append(f"what the kernels of {calls} allocate is estimated from above; --exact runs them")
    choices, section = planner.choices, None
    point = planner.point("plan", chosen) if offloaded is None else offloaded.point
    if offloaded is not None:
        choices, section = offloaded.choices, offloaded.section
        notes += notes_on(offloaded)
    made_for = (
        f"{title or type(planner.model).__name__}, {planner.pricing.device.name}: peak {point.peak} bytes of {allowed}"
        + (f", with {planner.step.extra} bytes of optimizer state" if planner.step.extra else "")
    )
    policy = policy_for(
        planner.profiles, choices, planner.groups, planner.step.paths, point.choice, "planned", made_for=made_for
    )
    return Plan(
        replace(policy, offload=section), point, allowed, min(least.peak, point.peak), most.peak, planner.profiles,
        choices, planner.pricing, planner.step.static, planner.step.extra, planner.groups, planner.step.paths,
        planner.times, notes=tuple(notes), link=link, offloaded=offloaded,
    )  # fmt: skip


def refuse_to_offload(planner: Planner, *, same_layers: bool) -> None:
    """Raise ``PlanError`` if the planner cannot choose what to offload for this model."""
    reasons = {
        "its blocks are called more than once in a step": planner.repeats,
        "several micro-batches are in flight": planner.step.in_flight > 1,
        "all layers of a group are to have the same rules": same_layers,
    }
    problems = [
        Problem("link", f"plans do not offload where {reason}", fix="plan without a link to the host")
        for reason, is_so in reasons.items()
        if is_so
    ]
    if problems:
        raise PlanError(problems)


def refuse_with_link(where: str, *, real: bool) -> None:
    """Raise ``PlanError`` for steps on real tensors together with a link; ``where`` names it in messages."""
    if real:
        found = "steps on real tensors do not show what leaves a device"
        raise PlanError(Problem(where, found, fix="leave one of the two out"))


def with_step_seconds(planner: Planner, made: Plan) -> Plan:
    """Return the plan with the predicted seconds of a whole step, in which it may wait for copies."""
    return replace(made, step_s=plain_step_seconds(planner) + made.point.seconds + made.point.stall)


def notes_on(offloaded: Offloaded) -> list[str]:
    """Return what a user has to know of a plan that offloads."""
    point, bound = offloaded.point, offloaded.bound_s
    step, stall = seconds_text(offloaded.step_s), seconds_text(point.stall)
    notes = [
        f"the step is predicted to take {step}, of which it waits {stall} for copies; no plan within this budget takes "
        f"less than {seconds_text(bound)} ({1 - bound / offloaded.step_s:.1%} less)",
        f"{bytes_text(point.pinned)} of pinned host memory per process are needed",
    ]
    if offloaded.busy > _SATURATED:
        notes.append(f"the link to the host is saturated: it is busy for {offloaded.busy:.0%} of the forward")
    return notes


def explained(planner: Planner, made: Plan) -> Plan:
    """Return the plan with what is alive at its peak, and at the least peak that was found if that is lower."""
    knowing, section = planner.knowing(made.choices), made.policy.offload
    planner = planner if section is not None else knowing  # choices that offload are not numbered as those before
    planner.progress(0, 3, "the least peak")
    planner.run(planner.least().choice)
    least = min(planner.records, key=lambda choice: planner.point("least", choice).peak)
    planner.progress(1, 3, "what is alive at the peak")
    found = [knowing.explain(made.point.choice, made.point.label, section)]
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


def _also_over(link: Link, error: TooSmallError) -> TooSmallError:
    """Return the error for a budget that no plan found meets by offloading over ``link`` either."""
    (problem,) = error.problems
    found = f"{problem.found}; offloading over the link to the host ({link}), no plan was found that fits"
    return TooSmallError(replace(problem, found=found), error.least)


_FIXES = "give more, or shrink the batch, the sequence, or what checkpointing cannot: shard parameters, chunk the loss"


def _where(moment: Moment, regions: int) -> str:
    if moment.path:
        return f"in the {'backward' if moment.in_backward else 'forward'} of {moment.path}"
    if moment.position == regions:
        return "in the head and the loss, after the last block"
    return f"between blocks, at place {moment.position}"
