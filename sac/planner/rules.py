"""The rules of a plan: few, with ranges of layers, save-sets and paths, that decide op by op as its choices do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, groupby, pairwise
from typing import Any

from sac.ops.names import resolve_ops
from sac.ops.registry import find_op
from sac.ops.save_sets import SAVE_SETS
from sac.planner.options import Option
from sac.planner.profile import Entry, RegionProfile
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
    plain = frozenset(one.layer for one in layers if one.option.saved is None)
    everywhere = frozenset(one.layer for one in layers)
    found: list[Rule] = []
    taken: Counter[str] = Counter()

    def add(word: str, chosen: frozenset[int], barred: Collection[int], **matchers: object) -> None:
        taken[word] += 1
        name = prefix + (word if taken[word] == 1 else f"{word}-{taken[word]}")
        ranges = _filled(chosen, everywhere - chosen - frozenset(barred))
        limit = None if len(ranges) == layers[0].profile.stack_size else layers_of(ranges)
        found.append(Rule(name, Decision.SAVE.value, layers=limit, blocks=blocks, **matchers))  # type: ignore[arg-type]

    if plain:
        add("none", plain, everywhere - plain, module=PathPattern.parse(""))
    sites = _sites(layers)
    for product in _products(sites):
        barred = frozenset[int]().union(*(site.recomputed for site in sites if product.matches(site)))
        modules = [
            module for module in dict.fromkeys(site.module for site in sites) if module in (product.modules or ())
        ]
        add(
            _word(product.names),
            product.layers,
            barred,
            **_named(product.names),
            module=None if product.modules is None else PathPattern.parse(_pattern(modules)),
            call=None if product.calls is None else Layers("index", tuple(sorted(product.calls))),
        )
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
            if not entry.must_save and (entry.savable or entry.is_declined):
                into = saved if entry.number in (one.option.saved or ()) else recomputed
                into.setdefault((entry.op, entry.module, entry.call), set()).add(one.layer)
    return tuple(
        _Site(*key, frozenset(saved.get(key, ())), frozenset(recomputed.get(key, ())))
        for key in dict.fromkeys((*saved, *recomputed))
    )


def _products(sites: Sequence[_Site]) -> list[_Product]:
    """Return products that together match each site in all layers that save it, and in none that recomputes it."""

    def is_allowed(product: _Product) -> bool:
        is_mixed = len({name.partition(" ")[0] if " " in name else "" for name in product.names}) > 1
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
    pairs = [*combinations(found, 2)]
    while pairs:
        first, second = pairs.pop(0)
        both = first.with_all_of(second)
        if is_allowed(both):
            found = [both, *(one for one in found if one not in (first, second))]
            pairs = [*combinations(found, 2)]
    order = {site: number for number, site in enumerate(sites)}
    return sorted(found, key=lambda one: min(order[site] for site in sites if one.matches(site)))


def _named(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the matcher of a rule on these ops, Functions or units."""
    kind = names[0].partition(" ")[0] if " " in names[0] else ""
    return {kind or "ops": tuple(name.removeprefix(f"{kind} ") for name in names)}


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
    """Return the name of a rule on these ops."""
    if " " in names[0]:
        return names[0].rpartition(" ")[2].rpartition(".")[2]
    first = names[0].split(".")
    return (first[1] if len(first) > 1 else first[0]).split("::")[-1].strip("_")


def _pattern(modules: Iterable[str]) -> str:
    """Return one pattern for the modules, with those of one parent as ``parent.{a,b}``."""
    of_parent: dict[str, list[str]] = {}
    for module in modules:
        parent, dot, name = module.rpartition(".")
        of_parent.setdefault(parent + dot, []).append(name)
    return _any_of([parent + _any_of(names) for parent, names in of_parent.items()])


def _any_of(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else "{" + ",".join(texts) + "}"
