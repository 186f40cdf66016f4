"""The choices for a region group, and the policy that applies one to each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sac.planner.pareto import SaveOption
from sac.planner.profile import RegionProfile
from sac.policy.model import Calls, Decision, Layers, PlannedRegion, PlanSection, Policy, Rule
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
    """Return the policy that applies the chosen option to the region at each position."""
    stacks = {profile.stack for profile in profiles}
    rules: list[Rule] = []
    for group, profile in enumerate(profiles):
        stack = (stack_pattern(profile),) if len(stacks) > 1 else ()
        layer = dict(zip(profile.paths, profile.layers, strict=True))
        used: dict[int, list[int]] = {}
        for path, of, one in zip(paths, groups, chosen, strict=True):
            if of == group:
                used.setdefault(one, []).append(layer[path])
        for number, (one, layers) in enumerate(sorted(used.items(), key=lambda pair: min(pair[1]))):
            word = letters(group) if len(profiles) > 1 else ""
            rules += rules_for(profile, choices[group][one], layers, f"{word}{number + 1}", stack)
    regions = tuple(
        PlannedRegion((stack_pattern(profile),), layers_of(profile.layers), profile.signature) for profile in profiles
    )
    return Policy(name, tuple(rules), plan=PlanSection(made_for, regions) if made_for else None)


def layers_of(numbers: Iterable[int]) -> Layers:
    """Return layer numbers as ``Layers`` with ranges."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return Layers(ranges=tuple(ranges))


def rules_for(
    profile: RegionProfile, choice: Choice, chosen: Sequence[int], name: str, stack: tuple[PathPattern, ...]
) -> list[Rule]:
    """Return the rules that apply ``choice`` to the layers ``chosen`` of a group; ``stack`` matches their stack."""
    layers = None if len({*chosen}) == profile.stack_size else layers_of(chosen)
    if choice.keep is None:
        whole = PathPattern.parse("")
        return [Rule(f"{name}-none", Decision.SAVE.value, module=whole, layers=layers, blocks=stack)]
    calls: dict[tuple[str, str], list[int]] = {}
    for number in sorted(choice.keep.saved):
        entry = profile.entries[number]
        calls.setdefault((entry.op, entry.module), []).append(entry.call)
    count = Counter((entry.op, entry.module) for entry in profile.entries)
    grouped: dict[tuple[str, tuple[int, ...] | None], list[str]] = {}
    for (op, module), which in calls.items():
        key = op, None if len(which) == count[op, module] else tuple(which)
        grouped.setdefault(key, []).append(module)
    rules = []
    taken: Counter[str] = Counter()
    for (op, calls_of), modules in grouped.items():
        word = op.split(".")[1] if op.count(".") > 1 else op
        word = word.split("::")[-1].strip("_")
        taken[word] += 1
        again = f"-{taken[word]}" if taken[word] > 1 else ""
        rules.append(
            Rule(
                f"{name}-{word}{again}",
                Decision.SAVE.value,
                ops=(op,),
                module=PathPattern.any_of(modules),
                layers=layers,
                blocks=stack,
                call=Calls(index=frozenset(calls_of)) if calls_of is not None else None,
            )
        )
    return rules


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
