"""What stands beside a plan: the ways to checkpoint that people choose by hand, and the curve that plans lie on."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

from sac.ops.names import resolve_ops
from sac.ops.registry import find_op
from sac.planner.choices import NONE
from sac.planner.keep_sets import priced
from sac.planner.layers import BudgetTooSmallError
from sac.planner.planner import Planner, Point
from sac.planner.plans import Plan
from sac.planner.prepare import choice_of, pricing_engine
from sac.planner.profile import RegionProfile

EVERY_SECOND_LAYER = "every 2nd layer full"
ATTENTION_ALTERNATE = "attention + every 2nd matmul"
ATTENTION_MATMULS = "attention + all matmuls"

_PRODUCTS = ("matmul", "grouped_matmul", "low_precision_matmul")
_CURVE_POINTS = 8


def with_alternatives(planner: Planner, made: Plan, *, same_layers: bool = False) -> Plan:
    """Return the plan with its baselines, and the curve of plans between the least peak and no checkpointing."""
    return replace(made, baselines=baselines(planner), curve=curve(planner, made, same_layers=same_layers))


def baselines(planner: Planner) -> tuple[Point, ...]:
    """Return what none, full, and three usual ways between them cost; a step is run with those that save some ops.

    In a region, attention and matrix products are what the save-sets of those names mean. Every second product is the
    1st, 3rd, 5th … in forward order, as ``do: alternate`` has it.
    """
    by_label = {label: _usual(planner, label) for label in (ATTENTION_ALTERNATE, ATTENTION_MATMULS)}
    layers = {path: layer for one in planner.profiles for path, layer in zip(one.paths, one.layers, strict=True)}
    none, full = planner.without_checkpointing, planner.everywhere(lambda kind: 0)
    second = tuple(both[layers[path] % 2] for path, *both in zip(planner.step.paths, full, none, strict=True))
    return (
        planner.point(NONE, none),
        planner.point("full", full),
        planner.point(EVERY_SECOND_LAYER, second),
        *by_label.values(),
    )


def curve(planner: Planner, made: Plan, *, same_layers: bool = False) -> tuple[Point, ...]:
    """Return the fastest choices for budgets spread evenly from the least peak to that without checkpointing.

    Each choice comes once. For a budget that nothing fits into it is the choice with the least peak: with the same
    choice on all layers that is higher, and a step that was run may have gone less high than was predicted.
    """
    found: dict[tuple[int, ...], Point] = {}
    for number in range(_CURVE_POINTS):
        share = number / (_CURVE_POINTS - 1)
        budget = made.least + math.ceil(share * (made.most - made.least))
        try:
            choice = planner.assign(budget, same_layers=same_layers)
        except BudgetTooSmallError as error:
            choice = planner.assign(error.least, same_layers=same_layers)
        found.setdefault(choice, planner.point(f"{share:.0%} of the range", choice))
    return tuple(found.values())


def forward_seconds(made: Plan) -> float:
    """Return the predicted time of one forward of all blocks that were planned."""
    return math.fsum(math.fsum(made.times[kind]) for kind in made.kinds)


def _usual(planner: Planner, label: str) -> Point:
    """Run a step in which all regions save what ``label`` says, and return what it costs."""
    run_by = pricing_engine(planner.engine)
    choices, sizes = [], []
    for profile, times, known in zip(planner.profiles, planner.times, planner.choices, strict=True):
        keep = priced(profile, times, frozenset(_saved(profile, label)), run_by)
        choices.append((*known, choice_of(profile, keep, label, run_by)))
        sizes.append([choice.bytes for choice in choices[-1]])
    step = copy.deepcopy(planner.step)  # what is learnt here is nothing to the plan
    step.bytes = sizes
    beside = replace(planner, choices=tuple(choices), step=step, records={})
    last = beside.everywhere(lambda kind: len(beside.choices[kind]) - 1)
    beside.run(last)
    return beside.point(label, last)


def _saved(profile: RegionProfile, label: str) -> Iterator[int]:
    attention, products = resolve_ops(("attention",)), resolve_ops(_PRODUCTS)
    turn = 0
    for entry in profile.candidates:
        op = find_op(entry.op)
        if op is not None and attention.matches(op):
            yield entry.number
        elif op is not None and products.matches(op):
            if label == ATTENTION_MATMULS or turn % 2 == 0:
                yield entry.number
            turn += 1
