"""The rules of a plan: few, with ranges of layers, save-sets and paths, that decide op by op as its choices do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from operator import or_
from typing import Any, NamedTuple

from sac.blocks.find import Block
from sac.ops.names import resolve_ops
from sac.ops.registry import find_op
from sac.ops.save_sets import SAVE_SETS
from sac.planner.profile import Entry, Option, RegionProfile
from sac.policy.model import ALTERNATE, Decision, Layers, Policy, Rule
from sac.policy.patterns import PathPattern

# Note [The rules of a plan]
#
# What a plan saves in the layers of a stack is a set of calls (op, module, number of the call) per layer. A rule on
# stacks, layers, ops, modules and calls matches a product of such sets. It may match nothing that the plan recomputes.
# Each call that no rule matches yet in all layers that save it gets one that matches as many others as that allows:
# all calls, all modules, a whole save-set. In the end, rules become one rule where the rule on all that they name is
# allowed too.

_SETS = tuple(name for name, one in SAVE_SETS.items() if not any(entry.condition for entry in one.entries))


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """What a plan says of a block: its option; see ``RegionProfile`` for its ops."""

    block: Block
    profile: RegionProfile
    option: Option

    def rule_of(self, policy: Policy, op: str) -> str:
        """Return what the policy of the plan says of an op in the region, if it names the op."""
        if self.option.saved is None:
            return "no checkpointing"
        rules = (one for one in policy.rules if one.ops and self.block.is_meant_by(one))
        return next((f"rule {one.id}" for one in rules if is_named(one.ops, op)), "")


class _Site(NamedTuple):
    """A call of an op in a module of a stack, with the layers that save it and those that recompute it."""

    stack: PathPattern
    op: str
    module: str
    call: int
    saved: frozenset[int]
    recomputed: frozenset[int]


class _Product(NamedTuple):
    """A rule to be: on these ops, Functions or units in these modules, and these numbers of their calls."""

    stacks: frozenset[PathPattern]
    names: frozenset[str]
    modules: frozenset[str]
    calls: frozenset[int]
    layers: frozenset[int]

    def matches(self, site: _Site) -> bool:
        """Return whether it matches a call in the layers that the rule is for."""
        at = site.stack in self.stacks and site.module in self.modules and site.call in self.calls
        return at and is_named(self.names, site.op)


def policy_of(regions: Sequence[PlannedRegion]) -> Policy:
    """Return the policy by which regions save what the plan says."""
    stacks: dict[PathPattern, list[PlannedRegion]] = {}
    for region in regions:
        stacks.setdefault(stack_pattern(region.block), []).append(region)
    return Policy("planned", tuple(_rules(stacks)))


def stack_pattern(block: Block) -> PathPattern:
    """Return the pattern that matches the blocks at the same place in the stack, and none of other stacks."""
    rest = block.path.removeprefix(block.stack).lstrip(".").partition(".")[2]
    number = "*" if block.path != block.stack else ""
    return PathPattern.parse(".".join(part for part in (block.stack, number, rest) if part))


def saved_by(policy: Policy | None, block: Block, profile: RegionProfile) -> frozenset[int]:
    """Return the entries that the rules of a policy on ops save in a block, as far as ops and modules tell."""

    def matches(rule: Rule, entry: Entry) -> bool:
        at_module = rule.module is None or rule.module.matches(entry.module)
        fits = rule.fits_shape(entry.shape) and (not rule.dtype or entry.dtype in rule.dtype)
        if rule.matches_module or not (at_module and fits and (rule.call is None or rule.call.matches(entry.call))):
            return False
        kind, _, name = entry.op.partition(" ")
        return is_named(rule.ops, entry.op) or (bool(name) and rule.matches_unit(name, name if kind == "unit" else ""))

    rules = [*filter(block.is_meant_by, policy.rules)] if policy else []
    found: dict[Rule | None, list[int]] = {}
    for one in profile.candidates:
        found.setdefault(next((rule for rule in rules if matches(rule, one)), None), []).append(one.number)
    every = {Decision.SAVE.value: 1, ALTERNATE: 2}
    return frozenset(n for rule, its in found.items() if rule and rule.do in every for n in its[:: every[rule.do]])


def _rules(stacks: Mapping[PathPattern, Sequence[PlannedRegion]]) -> Iterator[Rule]:
    """Yield the rules for the planned layers of each stack; see Note [The rules of a plan]."""

    def limits(some: Collection[PathPattern], layers: frozenset[int]) -> dict[str, Any]:
        everywhere = all(layers >= {*range(stacks[pattern][0].block.stack_size)} for pattern in some)
        blocks = tuple(one for one in stacks if one in some) if len(stacks) > 1 else ()
        return {"blocks": blocks, "layers": None if everywhere else _layers(layers)}

    plain = {at: frozenset(one.block.layer for one in stacks[at] if one.option.saved is None) for at in stacks}
    for number, layers in enumerate(dict.fromkeys(filter(None, plain.values())), 1):
        some = [pattern for pattern in stacks if plain[pattern] == layers]
        word = "none" if number == 1 else f"none-{number}"
        yield Rule(word, do=Decision.SAVE.value, module=PathPattern.parse(""), **limits(some, layers))
    taken: Counter[str] = Counter()
    both = [(one, _sites(stacks, one)) for one in (Decision.SAVE, Decision.OFFLOAD)]
    for do, sites, product in [(*pair, product) for pair in both for product in _products(pair[1])]:
        kind = _kind(min(product.names))
        names = sorted(name.removeprefix(f"{kind} ") for name in product.names)
        word = names[0].split(".")[-1] if kind else names[0].split(".")[:2][-1].split("::")[-1].strip("_")
        taken[word] += 1
        more: dict[str, Any] = {"do": do.value, kind or "ops": tuple(names)} | limits(product.stacks, product.layers)
        yield Rule(
            word if taken[word] == 1 else f"{word}-{taken[word]}",
            module=None if product.modules == _all(sites, "module") else PathPattern.parse(*sorted(product.modules)),
            call=None if product.calls == _all(sites, "call") else Layers("index", tuple(sorted(product.calls))),
            **more,
        )


@cache
def is_named(names: Collection[str], op: str) -> bool:
    """Return whether an op or a unit is one of those that a rule names, in each of its calls."""
    kind, _, name = op.partition(" ")
    found, matcher = None if name else find_op(op), resolve_ops(tuple(names))
    if name:
        return op in names or matcher.matches_unit(name, name if kind == "unit" else "")
    return op in names or (found is not None and matcher.matches(found) and not matcher.conditional(found))


def _sites(stacks: Mapping[PathPattern, Sequence[PlannedRegion]], do: Decision) -> tuple[_Site, ...]:
    """Return the calls that layers save, or offload; "recomputed" is what the rules may not match."""
    found: dict[tuple[PathPattern, str, str, int], tuple[set[int], set[int]]] = {}
    for pattern, one in ((pattern, one) for pattern, regions in stacks.items() for one in regions):
        for entry in () if one.option.saved is None or one.profile.reason else one.profile.candidates:
            chosen = one.option.sent if do is Decision.OFFLOAD else (one.option.saved or frozenset()) - one.option.sent
            both = found.setdefault((pattern, entry.op, entry.module, entry.call), (set(), set()))
            both[entry.number not in chosen].add(one.block.layer)
    for (pattern, *_), (_, recomputed) in found.items():  # a block that cannot be planned may call any of them
        recomputed.update(one.block.layer for one in stacks[pattern] if one.profile.reason)
    return tuple(_Site(*key, frozenset(saved), frozenset(recomputed)) for key, (saved, recomputed) in found.items())


def _all(sites: Sequence[_Site], name: str) -> frozenset[Any]:
    return frozenset(getattr(site, name) for site in sites)


def _products(sites: Sequence[_Site]) -> list[_Product]:
    """Return products that together match each site in all layers that save it, and in none that recomputes it."""

    def is_allowed(product: _Product) -> bool:
        is_mixed = len({*map(_kind, product.names)}) > 1
        return not is_mixed and not any(site.recomputed & product.layers and product.matches(site) for site in sites)

    found: list[_Product] = []
    for site in sorted((site for site in sites if site.saved), key=lambda one: -len(one.saved)):
        if any(one.matches(site) and site.saved <= one.layers for one in found):
            continue
        parts = (frozenset([site.stack]), frozenset([site.op]), frozenset([site.module]), frozenset([site.call]))
        product = _Product(*parts, site.saved)
        names = [name for name in (site.op.rpartition(".")[0], *_SETS) if is_named((name,), site.op)]
        wider: list[dict[str, Any]] = [{"calls": _all(sites, "call")}, {"modules": _all(sites, "module")}]
        for change in wider + [{"names": frozenset([name])} for name in names]:
            product = next(filter(is_allowed, [product._replace(**change)]), product)
        found.append(product)
    while True:
        pairs = ((first, second, _Product(*map(or_, first, second))) for first, second in combinations(found, 2))
        merged = next((one for one in pairs if is_allowed(one[2])), None)
        if merged is None:
            return sorted(found, key=lambda one: next(i for i, site in enumerate(sites) if one.matches(site)))
        found = [merged[2], *(one for one in found if one not in merged)]


def _kind(name: str) -> str:
    """Return ``function`` or ``unit``, or nothing for ops."""
    return name.partition(" ")[0] if " " in name else ""


def _layers(numbers: Collection[int]) -> Layers:
    """Return layer numbers as ranges."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        is_next = ranges and ranges[-1][1] == number - 1
        ranges.append((ranges.pop()[0], number) if is_next else (number, number))
    return Layers("numbers", tuple(ranges))
