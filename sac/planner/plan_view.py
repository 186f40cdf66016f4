"""What a plan costs next to the usual choices: heading, table and notes."""

from __future__ import annotations

from dataclasses import replace

import torch

from sac.planner.plan_file import Plan
from sac.planner.planner import Point
from sac.planner.sizes import PlannedSizes, notes_of_sizes, table_of_sizes
from sac.planner.write_policy import forward_seconds, write_policy
from sac.policy.model import PlanFigures, Policy
from sac.policy.read import bytes_text
from sac.tables import Table, flops_text, seconds_text

_COLUMNS = ("", "peak", "kept", "recomputed", "time", "of forward", "fits", "")
_NUMBERS = ("peak", "kept", "recomputed", "time", "of forward")
_MEANING = (
    "peak: of one step, forward and backward, with parameters and gradients; kept: left by the blocks' forward for "
    "backward;",
    "recomputed, time: run again in one backward, and how long that and the recording of ops is predicted to take, "
    "next to the blocks' forward",
)


def heading_of(made: Plan) -> tuple[str, ...]:
    """Return the lines above the table of a plan: device and engine, budget and peaks."""
    device = made.pricing.device
    return (
        f"for {device.name} ({device.title}), engine {made.pricing.engine}, torch {torch.__version__}",
        f"budget {bytes_text(made.budget)}; least peak {bytes_text(made.least)}, without checkpointing "
        f"{bytes_text(made.most)}; of it {bytes_text(made.static)} parameters, buffers and inputs"
        + (f", {bytes_text(made.extra)} state of the optimizer" if made.extra else ""),
    )


def table_of(made: Plan) -> Table:
    """Return a row for the plan, for each baseline, and for each point of the curve."""
    rows = tuple(_cells(point, made) for point in _points(made))
    return Table(_COLUMNS, rows, right=_NUMBERS, optional=("of forward",))


def notes_of(made: Plan) -> tuple[str, ...]:
    """Return the lines below the table: what the columns mean, and the notes of the plan."""
    return (*_MEANING, *(f"note: {note}" for note in made.notes))


def policy_with_figures(made: Plan) -> Policy:
    """Return the policy of a plan, which can show and save the plan's figures."""
    figures = PlanFigures(heading_of(made), table_of(made), notes_of(made), write_policy(made))
    return replace(made.policy, figures=figures)


def policy_of_sizes(found: PlannedSizes) -> Policy:
    """Return the policy of the best size, which can show the plans for all tried sizes."""
    made = found.best_plan
    figures = PlanFigures(
        heading_of_sizes(found), table_of_sizes(found), notes_of_sizes(found), write_policy(made), found.best.size
    )
    return replace(made.policy, figures=figures)


def heading_of_sizes(found: PlannedSizes) -> tuple[str, ...]:
    """Return the lines above the table of sizes."""
    made = found.best_plan
    device = made.pricing.device
    return (
        f"for {device.name} ({device.title}), engine {made.pricing.engine}, torch {torch.__version__}",
        f"budget {bytes_text(made.budget)}; best {found.name}: {found.best.size}",
    )


def _points(made: Plan) -> tuple[Point, ...]:
    return (made.point, *made.baselines, *made.curve)


def _cells(point: Point, made: Plan) -> tuple[str, ...]:
    forward = forward_seconds(made)
    return (
        point.label,
        bytes_text(point.peak),
        bytes_text(point.kept),
        flops_text(point.flops),
        seconds_text(point.seconds),
        f"{point.seconds / forward:.1%}" if forward else "–",
        "yes" if point.peak <= made.budget else "no",
        "checked" if point.is_checked else "predicted",
    )
