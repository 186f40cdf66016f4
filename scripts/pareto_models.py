"""Whole models: what people choose by hand, next to the plan for the same peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sac.errors import PlanError
from sac.planner.plan_file import make_plan
from sac.planner.planner import Planner, Point
from sac.planner.prepare import prepare
from sac.planner.write_policy import baselines
from tests.unit.planner.truth import model_named

EVERY = (3, 4)  # in addition to every second, which is among the planner's own baselines


@dataclass(frozen=True, slots=True)
class Pair:
    """One way on one model, and the plan whose budget is the peak of that way; seconds are of what runs again."""

    model: str
    way: str
    peak: int
    seconds: float
    plan_peak: int
    plan_seconds: float

    def is_violation(self, slack: float) -> bool:
        """Whether the plan is slower, or above its budget."""
        return self.plan_seconds > self.seconds * slack or self.plan_peak > self.peak


def pairs_of(name: str, layers: int) -> list[Pair]:
    """All ways on one model of the tests, with so many layers in each stack."""
    model, inputs = model_named(name, layers)
    planner = prepare(model, inputs)
    return [_beside(name, planner, point) for point in (*baselines(planner), *every_nth(planner))]


def every_nth(planner: Planner) -> Iterator[Point]:
    """Return the costs of full in every third and every fourth layer, in steps that are run."""
    for every in EVERY:
        choice = planner.every_nth(every)
        planner.run(choice)
        yield planner.point(f"every {every}{'rd' if every == 3 else 'th'} layer full", choice)


def _beside(name: str, planner: Planner, point: Point) -> Pair:
    try:
        plan = make_plan(planner, point.peak).point
    except PlanError:  # nothing fits, although this way does
        plan = planner.least()
    return Pair(name, point.label, point.peak, point.seconds, plan.peak, plan.seconds)
