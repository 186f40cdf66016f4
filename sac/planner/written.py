"""A plan as a policy file that people can read: the policy, with comments on what it is for and what each rule does."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import torch
import yaml

from sac.planner.baselines import forward_seconds
from sac.planner.choices import Choice, layers_of
from sac.planner.demands import recomputed
from sac.planner.keep_sets import priced
from sac.planner.plans import Plan
from sac.planner.prepare import pricing_engine
from sac.planner.profile import RegionProfile
from sac.policy.dump import dump_policy
from sac.policy.model import Rule
from sac.policy.sizes import bytes_text

_WIDTH = 100
_NOTHING: Mapping[str, str] = MappingProxyType({})


def written(made: Plan, about: Mapping[str, str] = _NOTHING) -> str:
    """Return the policy of a plan as YAML with comments, which loads to an equal policy.

    ``about``: what else the header says, such as the model, its inputs and the command, by what it is called.
    """
    text = dump_policy(made.policy)
    lines = text.splitlines()
    for rule, place in reversed([*zip(made.policy.rules, _rule_lines(text), strict=True)]):
        lines[place:place] = _comment(_of_rule(made, rule))
    header = [line for item in _header(made, about) for line in _comment(item)]
    return "\n".join([*header, *lines]) + "\n"


def _rule_lines(text: str) -> list[int]:
    """Return the number of the line on which each rule begins."""
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
    yield f"Planned by sac {version('sac')} with torch {torch.__version__}."
    for name, value in about.items():
        yield f"{name}: {value}"
    yield f"device: {made.device.name} ({made.device.title})"
    yield f"engine: {made.engine}"
    yield f"budget: {made.budget} bytes ({bytes_text(made.budget)})"
    yield f"peak: {point.peak} bytes ({bytes_text(point.peak)}), {how}"
    static = f"of it parameters, buffers and inputs: {bytes_text(made.static)}"
    yield f"{static}, state of the optimizer: {bytes_text(made.extra)}"
    yield f"recomputed: {point.flops / 1e9:.4g} GFLOP in {seconds_text(point.seconds)} per step (predicted{share})"
    for note in made.notes:
        yield f"note: {note}"
    for kind, profile in enumerate(made.profiles):
        for one, layers in _used(made, kind).items():
            yield f"{_place(profile, layers)}: {_what(made.choices[kind][one])}"


def _used(made: Plan, kind: int) -> dict[int, list[int]]:
    """Return the layers of a kind by what was chosen for them, in the order of the layers."""
    layer = dict(zip(made.profiles[kind].paths, made.profiles[kind].layers, strict=True))
    used: dict[int, list[int]] = {}
    for path, of, one in zip(made.paths, made.kinds, made.point.choice, strict=True):
        if of == kind:
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
    kind, one = _meant(made, rule)
    profile, choice = made.profiles[kind], made.choices[kind][one]
    if choice.keep is None:
        return "no checkpointing in these layers: autograd keeps what it keeps, and nothing runs again"
    run_by = pricing_engine(made.engine)
    mine = {number for number in choice.keep.saved if _names(rule, profile, number)}
    held = {profile.roots[value]: profile.bytes[value] for value in recomputed(profile, choice.keep.saved, run_by).held
            if profile.maker[value] in mine}  # fmt: skip
    less = priced(profile, made.times[kind], choice.keep.saved - mine, run_by)
    spared = seconds_text(less.seconds - choice.seconds)
    return f"{bytes_text(sum(held.values()))} per layer; without it {spared} more run again"


def _meant(made: Plan, rule: Rule) -> tuple[int, int]:
    """Return the kind that a rule speaks of, and what was chosen for its first such region."""
    for path, kind, one in zip(made.paths, made.kinds, made.point.choice, strict=True):
        profile = made.profiles[kind]
        layer = profile.layers[profile.paths.index(path)]
        if rule.speaks_of_region(path, layer, profile.stack_size):
            return kind, one
    raise AssertionError(f"rule {rule.id} speaks of no region of the plan")


def _names(rule: Rule, profile: RegionProfile, number: int) -> bool:
    entry = profile.entries[number]
    at_module = rule.module is None or rule.module.matches(entry.module)
    return entry.op in rule.ops and at_module and (rule.call is None or rule.call.matches(entry.call))


def seconds_text(seconds: float) -> str:
    """Return a short time with three digits: ``0.0148 ms``, ``12.5 ms``, ``1.25 s``."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
