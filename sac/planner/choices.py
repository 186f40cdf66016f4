"""The choices for a region group, and the policy that applies one to each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sac.planner.pareto import SaveOption
from sac.planner.profile import RegionProfile
from sac.planner.rules import PlannedLayer, layers_of, rules_of
from sac.policy.model import Calls, Decision, PlannedRegion, PlanSection, Policy, Rule
from sac.policy.patterns import PathPattern

NONE = "none"  # no checkpointing: autograd keeps its saved tensors


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice for the regions of a group: save the entries of ``keep``, or no checkpointing (None).

    ``label`` is its name in tables. ``bytes`` are held for it; ``seconds`` and ``flops`` are recomputed.
    """

    label: str
    keep: SaveOption | None
    bytes: int = 0
    seconds: float = 0.0
    flops: int = 0


def policy_to_try(
    profiles: Sequence[RegionProfile],
    choices: Sequence[Sequence[Choice]],
    groups: Sequence[int],
    paths: Sequence[str],
    chosen: Sequence[int],
) -> Policy:
    """Return a policy that decides as that of ``policy_for`` and is made sooner: its rules are not for people."""
    rules: list[Rule] = []
    for group, profile in enumerate(profiles):
        used: dict[int, list[int]] = {}
        for layer, one in _layers_of_group(profile, group, groups, paths, chosen):
            used.setdefault(one, []).append(layer)
        for one, layers in used.items():
            rules += _rules_to_try(profile, choices[group][one], layers, f"{group}-{one}")
    return Policy("tried", tuple(rules))


def policy_for(
    profiles: Sequence[RegionProfile],
    choices: Sequence[Sequence[Choice]],
    groups: Sequence[int],
    paths: Sequence[str],
    chosen: Sequence[int],
    name: str,
    *,
    made_for: str = "",
) -> Policy:
    """Return the policy that applies the chosen option to the region at each position.

    Its rules are few: see Note [The rules of a plan].
    """
    stacks: dict[PathPattern, list[PlannedLayer]] = {}
    sizes: dict[PathPattern, int] = {}
    for group, profile in enumerate(profiles):
        of_stack = stacks.setdefault(stack_pattern(profile), [])
        sizes[stack_pattern(profile)] = profile.stack_size
        of_stack += [
            PlannedLayer(layer, profile, choices[group][one].keep)
            for layer, one in _layers_of_group(profile, group, groups, paths, chosen)
        ]
    rules: list[Rule] = []
    for number, (pattern, layers) in enumerate(stacks.items()):
        several = len(stacks) > 1
        prefix = f"{letters(number)}-" if several else ""
        rules += rules_of(layers, sizes[pattern], (pattern,) if several else (), prefix)
    regions = tuple(
        PlannedRegion((stack_pattern(profile),), layers_of(profile.layers), profile.signature) for profile in profiles
    )
    return Policy(name, tuple(rules), plan=PlanSection(made_for, regions) if made_for else None)


def _layers_of_group(
    profile: RegionProfile, group: int, groups: Sequence[int], paths: Sequence[str], chosen: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the layers of a group, each once and with its choice, in the order of the positions."""
    layer = dict(zip(profile.paths, profile.layers, strict=True))
    pairs = ((layer[path], one) for path, of, one in zip(paths, groups, chosen, strict=True) if of == group)
    return [*dict.fromkeys(pairs)]


def _rules_to_try(profile: RegionProfile, choice: Choice, layers: Sequence[int], name: str) -> Iterator[Rule]:
    where: Any = {"layers": layers_of(layers), "blocks": (stack_pattern(profile),)}
    if choice.keep is None:
        yield Rule(name, Decision.SAVE.value, module=PathPattern.parse(""), **where)
        return
    calls: dict[tuple[str, str], list[int]] = {}
    for number in sorted(choice.keep.saved):
        entry = profile.entries[number]
        calls.setdefault((entry.op, entry.module), []).append(entry.call)
    modules: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (op, module), of in calls.items():
        modules.setdefault((op, tuple(of)), []).append(module)
    for number, ((op, numbers), at) in enumerate(modules.items()):
        call = Calls(index=frozenset(numbers))
        yield Rule(f"{name}-{number}", Decision.SAVE.value, (op,), PathPattern.any_of(at), call=call, **where)


def stack_pattern(profile: RegionProfile) -> PathPattern:
    """Return the pattern that matches the regions of a profile at its place in its stack, and none of other stacks."""
    path = profile.paths[0]
    rest = path.removeprefix(profile.stack).lstrip(".").partition(".")[2]
    number = "*" if path != profile.stack else ""
    return PathPattern.parse(".".join(part for part in (profile.stack, number, rest) if part))


def letters(number: int) -> str:
    """Return a, b, …, z, aa, ab, … for 0, 1, …"""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(97 + rest) + text
    return text
