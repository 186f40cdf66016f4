"""Compare a plan with hand-chosen alternatives, and write it as a commented policy file."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import torch
import yaml

from sac.planner.choices import NONE, Choice
from sac.planner.layers import BudgetTooSmallError
from sac.planner.pareto import SaveOption, priced
from sac.planner.plan_file import Plan
from sac.planner.planner import Planner, Point
from sac.planner.profile import RegionProfile
from sac.planner.rules import layers_of, matches_entry
from sac.policy.model import Rule, dump_policy
from sac.policy.read import bytes_text
from sac.tables import seconds_text


def sac_version() -> str:
    """Return the version of sac; of a checkout that is not installed, that it is one."""
    try:
        return version("sac")
    except PackageNotFoundError:
        return "(not installed)"


# -- Alternatives to a plan: hand-chosen baselines, and the curve of plans

EVERY_SECOND_LAYER = "every 2nd layer full"

_CURVE_POINTS = 8


def with_alternatives(planner: Planner, made: Plan, *, same_layers: bool = False) -> Plan:
    """Return the plan with its baselines, and the curve of plans between the least peak and no checkpointing."""
    return replace(made, baselines=baselines(planner), curve=curve(planner, made, same_layers=same_layers))


def baselines(planner: Planner) -> tuple[Point, ...]:
    """Return the costs of none, full, full in every second layer, and the choices by hand, each run in a step."""
    return (*plain_baselines(planner), *(by_hand(planner, label) for label in planner.by_hand))


def by_hand(planner: Planner, label: str) -> Point:
    """Run a step with a choice of Note [Choices by hand], and return its cost."""
    choice = planner.choice_by_hand(label)
    planner.run(choice)
    return planner.point(label, choice)


def plain_baselines(planner: Planner) -> tuple[Point, ...]:
    """Return the costs of none, full, and full in every second layer, for which no step has to be run."""
    return (
        planner.point(NONE, planner.without_checkpointing),
        planner.point("full", planner.every_nth(1)),
        planner.point(EVERY_SECOND_LAYER, planner.every_nth(2)),
    )


def curve(planner: Planner, made: Plan, *, same_layers: bool = False) -> tuple[Point, ...]:
    """Return the fastest choices for budgets spread evenly from the least peak to the peak without checkpointing.

    Each choice occurs once. If nothing fits a budget, the choice with the least peak is used. This can happen because
    the same choice on all layers has a higher least peak, or because a measured peak was lower than predicted.
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
    """Return the predicted seconds of one forward of all planned blocks."""
    return math.fsum(math.fsum(made.times[group]) for group in made.groups)


# -- A plan as a commented policy file

_WIDTH = 100
_NOTHING: Mapping[str, str] = MappingProxyType({})


def write_policy(made: Plan, about: Mapping[str, str] = _NOTHING) -> str:
    """Return the policy of a plan as YAML with comments, which loads to an equal policy.

    ``about``: further lines of the header by title, such as the model, its inputs and the command.
    """
    text = dump_policy(made.policy)
    lines = text.splitlines()
    for rule, where in reversed([*zip(made.policy.rules, _rule_lines(text), strict=True)]):
        lines[where:where] = _comment(_of_rule(made, rule))
    header = [line for item in _header(made, about) for line in _comment(item)]
    return "\n".join([*header, *lines]) + "\n"


def _rule_lines(text: str) -> list[int]:
    """Return the line number on which each rule begins."""
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    rules = next(value for key, value in root.value if key.value == "rules")
    return [rule.start_mark.line for rule in rules.value]


def _comment(text: str) -> list[str]:
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return [f"# {line}" for line in textwrap.wrap(shown, _WIDTH - 2, subsequent_indent="  ", break_on_hyphens=False)]


def _header(made: Plan, about: Mapping[str, str]) -> Iterator[str]:
    point, forward = made.point, forward_seconds(made)
    how = "checked by a step" if point.is_checked else "predicted"
    share = f", {point.seconds / forward:.1%} of the blocks' forward" if forward else ""
    yield f"Planned by sac {sac_version()} with torch {torch.__version__}."
    for name, value in about.items():
        yield f"{name}: {value}"
    yield f"device: {made.pricing.device.name} ({made.pricing.device.title})"
    yield f"engine: {made.pricing.engine}"
    yield f"budget: {made.budget} bytes ({bytes_text(made.budget)})"
    yield f"peak: {point.peak} bytes ({bytes_text(point.peak)}), {how}"
    static = f"of it parameters, buffers and inputs: {bytes_text(made.static)}"
    yield f"{static}, state of the optimizer: {bytes_text(made.extra)}"
    yield f"recomputed: {point.flops / 1e9:.4g} GFLOP in {seconds_text(point.seconds)} per step (predicted{share})"
    for note in made.notes:
        yield f"note: {note}"
    for group, profile in enumerate(made.profiles):
        for one, layers in _used(made, group).items():
            yield f"{_place(profile, layers)}: {_what(made.choices[group][one])}"


def _used(made: Plan, group: int) -> dict[int, list[int]]:
    """Return the layers of a group by their choice, in the order of the layers."""
    layer = dict(zip(made.profiles[group].paths, made.profiles[group].layers, strict=True))
    used: dict[int, list[int]] = {}
    for path, of, one in zip(made.paths, made.groups, made.point.choice, strict=True):
        if of == group:
            used.setdefault(one, []).append(layer[path])
    return used


def _place(profile: RegionProfile, layers: list[int]) -> str:
    ranges = layers_of(layers).ranges or ()
    told = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    return f"{profile.stack or 'the model'}, layer{'s' if len(layers) > 1 else ''} {told}"


def _what(choice: Choice) -> str:
    if choice.keep is None:
        return "no checkpointing"
    again = f"{seconds_text(choice.seconds)} run again per layer"
    if not choice.keep.saved:
        return f"saves nothing; {again}"
    return f"saves what {len(choice.keep.saved)} calls give, {bytes_text(choice.bytes)}; {again}"


def _of_rule(made: Plan, rule: Rule) -> str:
    if rule.matches_module:
        return "no checkpointing in these layers: autograd keeps what it keeps, and nothing runs again"
    profile, times, keep = _meant(made, rule)
    run_by = made.pricing.run_by
    mine = {number for number in keep.saved if matches_entry(rule, profile.entries[number])}
    held = {profile.roots[value]: profile.bytes[value] for value in profile.recomputed(keep.saved, run_by).held
            if profile.maker[value] in mine}  # fmt: skip
    less = priced(profile, times, keep.saved - mine, run_by)
    spared = seconds_text(less.seconds - keep.seconds)
    return f"{bytes_text(sum(held.values()))} per layer; without it {spared} more run again"


def _meant(made: Plan, rule: Rule) -> tuple[RegionProfile, Sequence[float], SaveOption]:
    """Return the profile, the times and the save option of the first region in which a rule saves something."""
    for path, group, one in zip(made.paths, made.groups, made.point.choice, strict=True):
        profile, keep = made.profiles[group], made.choices[group][one].keep
        layer = profile.layers[profile.paths.index(path)]
        if keep is None or not rule.matches_region(path, layer, profile.stack_size):
            continue
        if any(matches_entry(rule, profile.entries[number]) for number in keep.saved):
            return profile, made.times[group], keep
    raise AssertionError(f"rule {rule.id} saves nothing in any region of the plan")
