"""The rules of a plan: few, with ranges of layers, save-sets and paths, that decide op by op as its choices do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, groupby, pairwise
from typing import Any

from sac.ops.names import resolve_ops
from sac.ops.registry import find_op
from sac.ops.save_sets import SAVE_SETS
from sac.planner.profile import Entry, Option, RegionProfile
from sac.policy.model import Decision, Layers, Policy, Rule
from sac.policy.patterns import PathPattern

# Note [The rules of a plan]
#
# What a plan saves in the layers of a stack is a set of calls (op, module, number of the call) per layer. A rule on
# layers, ops, modules and calls matches a product of such sets. It may match a call where that changes nothing: in
# layers without this call, and in layers without checkpointing. It may match nothing that the plan recomputes. Each
# call that no rule matches yet in all layers that save it gets one that matches as many others as that allows: all
# calls, all modules, a whole save-set. In the end, rules become one rule where the rule on all that they name is
# allowed too.

_SETS = tuple(name for name, one in SAVE_SETS.items() if not any(entry.condition for entry in one.entries))


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """What a plan says of the region at ``path``, a layer of a stack: its option; see ``RegionProfile`` for its ops."""

    path: str
    profile: RegionProfile
    option: Option

    @property
    def layer(self) -> int:
        """Its number in the stack."""
        return self.profile.layers[self.profile.paths.index(self.path)]

    def rule_of(self, policy: Policy, op: str) -> str:
        """Return what the policy of the plan says of an op in the region, if it names the op."""
        if self.option.saved is None:
            return "no checkpointing"
        place = self.path, self.layer, self.profile.stack_size
        rules = (one for one in policy.rules if one.ops and one.matches_region(*place))
        return next((f"rule {one.id}" for one in rules if is_named(one.ops, op)), "")


@dataclass(frozen=True, slots=True)
class _Site:
    """A call of an op in a module, with the layers that save it and those that recompute it."""

    op: str
    module: str
    call: int
    saved: frozenset[int]
    recomputed: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Product:
    """A rule to be: ``names`` are its ops, Functions or units, ``modules`` and ``calls`` None for all."""

    names: tuple[str, ...]
    modules: frozenset[str] | None
    calls: frozenset[int] | None
    layers: frozenset[int]

    def matches(self, site: _Site) -> bool:
        """Return whether it matches a call in the layers that the rule is for."""
        at_module = self.modules is None or site.module in self.modules
        return at_module and (self.calls is None or site.call in self.calls) and is_named(self.names, site.op)

    def with_all_of(self, other: _Product) -> _Product:
        """Return the rule on all that the two name."""
        modules = None if self.modules is None or other.modules is None else self.modules | other.modules
        calls = None if self.calls is None or other.calls is None else self.calls | other.calls
        names = tuple(dict.fromkeys((*self.names, *other.names)))
        return _Product(names, modules, calls, self.layers | other.layers)


def policy_of(regions: Sequence[PlannedRegion], name: str) -> Policy:
    """Return the policy by which regions save what the plan says."""
    stacks: dict[PathPattern, list[PlannedRegion]] = {}
    for region in regions:
        if not region.profile.reason:
            stacks.setdefault(stack_pattern(region.profile), []).append(region)
    several = len(stacks) > 1
    rules: list[Rule] = []
    for number, (pattern, layers) in enumerate(stacks.items()):
        prefix = f"{chr(97 + number) if number < 26 else number}-" if several else ""
        rules += rules_of(layers, (pattern,) if several else (), prefix)
    return Policy(name, tuple(rules))


def stack_pattern(profile: RegionProfile) -> PathPattern:
    """Return the pattern that matches the regions of a profile at its place in its stack, and none of other stacks."""
    path = profile.paths[0]
    rest = path.removeprefix(profile.stack).lstrip(".").partition(".")[2]
    number = "*" if path != profile.stack else ""
    return PathPattern.parse(".".join(part for part in (profile.stack, number, rest) if part))


def saved_by(policy: Policy, profile: RegionProfile) -> frozenset[int]:
    """Return the entries that the rules of a policy on ops save in a region, as far as ops and modules tell."""
    saved = set()
    for entry in profile.candidates:
        rule = next((one for one in policy.rules if not one.matches_module and matches_entry(one, entry)), None)
        if rule is not None and rule.do == Decision.SAVE.value:
            saved.add(entry.number)
    return frozenset(saved)


def rules_of(layers: Sequence[PlannedRegion], blocks: tuple[PathPattern, ...], prefix: str) -> list[Rule]:
    """Return the rules for the planned layers of one stack; see Note [The rules of a plan].

    ``blocks`` matches the regions of the stack, if there are others. ``prefix`` begins the names of the rules.
    """
    everywhere = frozenset(one.layer for one in layers)
    plain = frozenset(one.layer for one in layers if one.option.saved is None)
    sites = _sites(layers)
    modules = dict.fromkeys(("", *(site.module for site in sites)))
    found: list[Rule] = []
    taken: Counter[str] = Counter()
    for product in ([_Product((), frozenset([""]), None, plain)] if plain else []) + _products(sites):
        word = _word(product.names)
        taken[word] += 1
        barred = everywhere.difference(plain) if not product.names else frozenset[int]()
        barred = barred.union(*(site.recomputed for site in sites if product.matches(site)))
        numbers = _filled(product.layers, everywhere - product.layers - barred)
        inside = [module for module in modules if module in (product.modules or ())]
        rule = Rule(
            prefix + (word if taken[word] == 1 else f"{word}-{taken[word]}"),
            Decision.SAVE.value,
            layers=None if len(numbers) == layers[0].profile.stack_size else layers_of(numbers),
            blocks=blocks,
            module=None if product.modules is None else PathPattern.parse(*inside),
            call=None if product.calls is None else Layers("index", tuple(sorted(product.calls))),
            **_named(product.names),
        )
        found.append(rule)
    return found


def matches_entry(rule: Rule, entry: Entry) -> bool:
    """Return whether a rule on ops matches this entry of a region that it is for."""
    at_module = rule.module is None or rule.module.matches(entry.module)
    fits = rule.fits_shape(entry.shape) and (not rule.dtype or entry.dtype in rule.dtype)
    if not (at_module and fits and (rule.call is None or rule.call.matches(entry.call))):
        return False
    kind, _, name = entry.op.partition(" ")
    return is_named(rule.ops, entry.op) or (bool(name) and rule.matches_unit(name, name if kind == "unit" else ""))


@cache
def is_named(names: tuple[str, ...], op: str) -> bool:
    """Return whether an op or a unit is one of those that a rule names, in each of its calls."""
    kind, _, name = op.partition(" ")
    if name:
        return op in names or resolve_ops(names).matches_unit(name, name if kind == "unit" else "")
    found, matcher = find_op(op), resolve_ops(names)
    return op in names or (found is not None and matcher.matches(found) and not matcher.conditional(found))


def _sites(layers: Iterable[PlannedRegion]) -> tuple[_Site, ...]:
    """Return the calls that layers save; "recomputed" is what the rules may not match."""
    saved: dict[tuple[str, str, int], set[int]] = {}
    recomputed: dict[tuple[str, str, int], set[int]] = {}
    for one in layers:
        for entry in one.profile.entries if one.option.saved is not None else ():
            if entry.savable and not entry.must_save:
                into = saved if entry.number in (one.option.saved or ()) else recomputed
                into.setdefault((entry.op, entry.module, entry.call), set()).add(one.layer)
    keys = dict.fromkeys((*saved, *recomputed))
    return tuple(_Site(*key, frozenset(saved.get(key, ())), frozenset(recomputed.get(key, ()))) for key in keys)


def _products(sites: Sequence[_Site]) -> list[_Product]:
    """Return products that together match each site in all layers that save it, and in none that recomputes it."""

    def is_allowed(product: _Product) -> bool:
        is_mixed = len({*map(_kind, product.names)}) > 1
        return not is_mixed and not any(site.recomputed & product.layers and product.matches(site) for site in sites)

    found: list[_Product] = []
    for site in sorted((site for site in sites if site.saved), key=lambda one: -len(one.saved)):
        if any(one.matches(site) and site.saved <= one.layers for one in found):
            continue
        product = _Product((site.op,), frozenset([site.module]), frozenset([site.call]), site.saved)
        wider: list[dict[str, Any]] = [{"calls": None}, {"modules": None}]
        wider += [{"names": (name,)} for name in (_packet(site.op), *_SETS) if is_named((name,), site.op)]
        for change in wider:
            product = next(filter(is_allowed, [replace(product, **change)]), product)
        found.append(product)
    while True:
        pairs = ((first, second, first.with_all_of(second)) for first, second in combinations(found, 2))
        merged = next((one for one in pairs if is_allowed(one[2])), None)
        if merged is None:
            break
        found = [merged[2], *(one for one in found if one not in merged)]
    order = {site: number for number, site in enumerate(sites)}
    return sorted(found, key=lambda one: min(order[site] for site in sites if one.matches(site)))


def _named(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the matcher of a rule on these ops, Functions or units."""
    kind = _kind(names[0]) if names else ""
    return {kind or "ops": tuple(name.removeprefix(f"{kind} ") for name in names)}


def _kind(name: str) -> str:
    """Return ``function`` or ``unit``, or nothing for an op."""
    return name.partition(" ")[0] if " " in name else ""


def _packet(op: str) -> str:
    """Return the name of an op without its overload."""
    return op.rpartition(".")[0] if op.count(".") > 1 and find_op(op) is not None else op


def _filled(chosen: frozenset[int], free: frozenset[int]) -> frozenset[int]:
    """Return the chosen layers, with the gaps between them, and the ends, that consist of ``free`` layers only."""
    order = sorted(chosen)
    edges = [(min({*free, order[0]}) - 1, order[0]), *pairwise(order), (order[-1], max({*free, order[-1]}) + 1)]
    gaps = (frozenset(range(low + 1, high)) for low, high in edges)
    return chosen.union(*(gap for gap in gaps if gap <= free))


def layers_of(numbers: Iterable[int]) -> Layers:
    """Return layer numbers as ``Layers`` with ranges."""
    ranges: list[tuple[int, int]] = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda one: one[1] - one[0]):
        consecutive = [number for _, number in group]
        ranges.append((consecutive[0], consecutive[-1]))
    return Layers("numbers", tuple(ranges))


def _word(names: Sequence[str]) -> str:
    """Return the name of a rule on these ops; that of none is no checkpointing."""
    name = names[0] if names else "none"
    parts = name.removeprefix(f"{_kind(name)} ").split(".")
    return parts[-1] if _kind(name) else parts[:2][-1].split("::")[-1].strip("_")
