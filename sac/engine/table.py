"""The decision table: what a policy means for the ops and modules of one region."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from sac.engine.flags import as_called, is_custom_op
from sac.errors import PolicyError, Problem, warn
from sac.ops.facts import OpTraits, traits_of
from sac.ops.flops import has_formula
from sac.ops.names import OpMatcher, check_sets, is_must_save, resolve_ops
from sac.ops.registry import op_name, read_registry
from sac.ops.save_sets import condition_of
from sac.policy.model import ALTERNATE, Decision, Policy, Rule
from sac.torch_private import BOUND, OpOverload

# -- Decision tables: per module path and op, a call site that takes one lookup

_VALUE_READERS = frozenset(
    f"aten.{name}.default" for name in ("_local_scalar_dense", "item", "equal", "is_nonzero", "allclose")
)

Condition = Callable[[tuple[Any, ...], Mapping[str, Any], Any], bool]

NO_RULE = -1  # stands for the rule of what the must-save tier or the policy's default saved


@dataclass(frozen=True, slots=True)
class ResolvedRule:
    """A rule of a policy, its op names resolved against this build of torch; ``index`` is its index in the policy.

    ``decision``: on a match (for an alternating rule: on those that it keeps).
    """

    rule: Rule
    matcher: OpMatcher
    index: int
    decision: Decision

    @property
    def saves(self) -> bool:
        """Whether a match is saved (for an alternating rule: may be saved), on the device or the host."""
        return self.decision.keeps


@dataclass(frozen=True, slots=True)
class ConditionalRule:
    """A rule that may match a call of one op, depending on the call."""

    resolved: ResolvedRule
    condition: Condition | None = None

    def matches(self, call: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> bool:
        """Return whether the rule matches call number ``call`` with these arguments and this result."""
        rule = self.resolved.rule
        if rule.call is not None and not rule.call.matches(call):
            return False
        if rule.shape is not None or rule.dtype:
            tensor = first_tensor(out)
            if tensor is None or not rule.fits_shape(tensor.shape):
                return False
            if rule.dtype and str(tensor.dtype).removeprefix("torch.") not in rule.dtype:
                return False
        return self.condition is None or self.condition(args, kwargs, out)


class CallSite:
    """Everything that the dispatch modes need to know about one op at one module path."""

    def __init__(self, op: Any, path: str, traits: OpTraits) -> None:
        self.op = op
        self.run = op._op if type(op) is OpOverload else op  # what calling the op calls
        # The same, where no torch-function mode or class would see it.
        self.bound = BOUND.get(op_name(op), self.run)
        self.path = path
        self.traits = traits
        self.is_view = traits.is_view
        self.writes = bool(traits.mutated_args or traits.mutated_kwargs)
        # An op that neither returns nor writes a tensor reads a size, a stride or a value: there is nothing to keep.
        self.is_bookkeeping = traits.is_infrastructure or traits.is_view or not (traits.returns_tensor or self.writes)
        self.is_collective = traits.is_collective
        # Ops that the tape skips: profiler marks, and ops that read a size, a stride or a number.
        self.is_unrecorded = not traits.is_collective and (
            traits.is_infrastructure or not (traits.returns_tensor or self.writes)
        )
        self.reads_value = self.is_unrecorded and op_name(op) in _VALUE_READERS  # the program may branch on its result
        # An ordinary op reads tensors and returns a tensor; it has no trait that the tape must handle specially.
        self.is_ordinary = traits.is_flat and not (
            self.writes
            or traits.may_draw
            or traits.is_collective
            or traits.is_infrastructure
            or self.is_unrecorded
            or (self.is_view and traits.view_of < 0)
            or is_custom_op(op)
        )
        self.has_decision = False  # whether a rule, the default or the must-save tier decides on its result
        self.is_uninitialised = traits.is_uninitialised
        self.tensor_positions = traits.tensor_positions
        self.savable = not traits.unsavable_reason or bool(traits.savable_if)
        self.savable_if = condition_of(traits.savable_if) if traits.savable_if else None
        self.conditional_rules: tuple[ConditionalRule, ...] = ()
        self.final_rule: ResolvedRule | None = None
        self.final_decision = Decision.RECOMPUTE
        self.must_save = False
        self.must_save_condition: Condition | None = None
        self.may_save = False
        # It changes the layout of its argument and no contents, as `squeeze_` does.
        self.is_inplace_view = torch.Tag.inplace_view in getattr(op, "tags", ())
        self.is_custom_op = is_custom_op(op)
        self.is_cheap = op_name(op).startswith("aten.") and not has_formula(op)


def decide(counter: Any, site: CallSite, args: Any, kwargs: Any, out: Any) -> tuple[Decision, ResolvedRule | None]:
    """Return the decision on the result of this call, and the rule that matched; count both in ``counter``."""
    call = counter.calls[site]
    counter.calls[site] = call + 1
    decision, rule = site.final_decision, site.final_rule
    for conditional in site.conditional_rules:
        if conditional.matches(call, args, kwargs, out):
            rule = conditional.resolved
            decision = rule.decision
            if rule.rule.do == ALTERNATE:
                turn = counter.alternations[rule.index] = counter.alternations[rule.index] + 1
                decision = decision if turn % 2 else Decision.RECOMPUTE
            break
    if rule is not None:
        counter.hits[rule.index] += 1
    if site.must_save and not decision.keeps:
        condition = site.must_save_condition
        if condition is None or condition(args, kwargs, out):
            decision = Decision.SAVE
    if decision.keeps and site.savable_if is not None and not site.savable_if(args, kwargs, out):
        decision = Decision.RECOMPUTE
    return decision, rule


def run_op(site: CallSite, args: Any, kwargs: Any) -> Any:
    """Run the op of a call site as its caller would have run it without a mode."""
    if site.is_custom_op:
        with as_called(site.op, args):
            return site.op(*args, **kwargs)
    return site.run(*args, **kwargs)


class DecisionTable:
    """The rules that apply to one layer of one stack, and the call sites derived from them; see ``add_site``.

    ``offloads``: the indices of the rules of which saved values wait on the host (``NO_RULE``: the default).
    ``traced``: for the report, the decisions in the last graph of ``torch.compile``; ``left_in_eager``: the number of
    calls that were to be traced, but that Dynamo or its backend ran op by op.
    """

    def __init__(self, policy: Policy, rules: tuple[ResolvedRule, ...]) -> None:
        self.policy = policy
        self.rules = rules
        self.default = policy.default
        self.traced: Any = None
        self.left_in_eager = 0
        self.offloads = self._offloads()
        self.saves_everything = self._saves_everything()
        self.decides_on_ops = not self.saves_everything and (
            self.default.keeps or any(resolved.saves for resolved in rules)
        )
        # Path and the rule of the unit around -> id of an op (its hash is Python code) -> call site.
        self.sites_at: dict[Any, dict[int, CallSite]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.policy, tuple(bound.index for bound in self.rules))

    def rule_name(self, index: int) -> str:
        """Return the id of the rule with this index; ``default`` for ``NO_RULE``."""
        return next((one.rule.id for one in self.rules if one.index == index), "default")

    def sites_of(self, path: str, unit: ResolvedRule | None = None) -> dict[int, CallSite]:
        """Return the call sites so far, by id of the op, of the module at ``path``; ``unit``: see ``add_site``."""
        key = path if unit is None else (path, unit.index)
        try:
            return self.sites_at[key]  # the usual case: each module asks when it begins
        except KeyError:
            return self.sites_at.setdefault(key, {})

    def _saves_everything(self) -> bool:
        """Return whether the policy leaves nothing to recompute.

        Plain autograd implements that, unless something is offloaded.
        """
        if self.whole_rule(""):
            return True
        return all(resolved.saves and resolved.rule.do != ALTERNATE for resolved in self.rules) and (
            self.default.keeps
            or any(
                "*" in rule.ops and rule.module is None and rule.layers is None and rule.matches_each_call
                for rule in (resolved.rule for resolved in self.rules)
            )
        )

    def rules_of_unit(self, path: str, unit: str = "", function: str = "") -> tuple[ConditionalRule, ...]:
        """Return the rules that may match calls in a module of a unit: a named one, or an autograd Function."""
        if (whole := self.whole_rule(path)) is not None:
            return (ConditionalRule(whole),)
        return tuple(
            ConditionalRule(resolved)
            for resolved in self.rules
            if not resolved.rule.matches_module
            and (resolved.rule.matches_unit(function, unit) or resolved.matcher.matches_unit(function, unit))
            and not (resolved.rule.do == ALTERNATE and "*" in resolved.rule.ops)  # "every second op" is about ops
            and (resolved.rule.module is None or resolved.rule.module.matches(path))
        )

    def _offloads(self) -> frozenset[int]:
        if (whole := self.whole_rule("")) is not None:  # no other rule decides anything
            return frozenset({whole.index} if whole.decision is Decision.OFFLOAD else ())
        found = {resolved.index for resolved in self.rules if resolved.decision is Decision.OFFLOAD}
        return frozenset(found | {NO_RULE} if self.default is Decision.OFFLOAD else found)

    def whole_rule(self, path: str) -> ResolvedRule | None:
        """Return the rule that saves the module at ``path``, or one around it, as a whole; the outermost counts."""
        for around in reversed(paths_up(path)):
            resolved = next((one for one in self.rules if _decides_on(one.rule, around)), None)
            if resolved is not None and resolved.saves:
                return resolved
        return None

    def add_site(self, op: Any, path: str, unit: ResolvedRule | None = None) -> CallSite:
        """Create, store and return the call site of ``op`` in the module at ``path``.

        ``unit``: the rule that recomputes the unit in which the op runs, with the ops inside.
        """
        site = CallSite(op, path, traits_of(op))
        if site.savable and not site.is_bookkeeping:
            self._resolve(site, unit)
        site.has_decision = bool(site.may_save or site.conditional_rules or site.final_rule is not None)
        self.sites_of(path, unit)[id(op)] = site
        return site

    def _resolve(self, site: CallSite, unit: ResolvedRule | None) -> None:
        conditional_rules: list[ConditionalRule] = []
        site.final_decision = self.default
        rules = self.rules
        if (whole := self.whole_rule(site.path)) is not None:
            site.final_rule, site.final_decision, rules = whole, whole.decision, ()
        elif unit is not None:
            site.final_rule, site.final_decision = unit, Decision.RECOMPUTE
            rules = tuple(resolved for resolved in rules if resolved.index < unit.index)  # they are asked first
        for resolved in rules:
            rule = resolved.rule
            if rule.matches_module:
                if not resolved.saves and any(_decides_on(rule, path) for path in paths_up(site.path)):
                    site.final_rule, site.final_decision = resolved, Decision.RECOMPUTE
                    break
                continue
            if rule.module is not None and not rule.module.matches(site.path):
                continue
            if not resolved.matcher.matches(site.op):
                continue
            name = resolved.matcher.conditional(site.op)
            condition = condition_of(name) if name else None
            if rule.do != ALTERNATE and condition is None and rule.matches_each_call:
                site.final_rule, site.final_decision = resolved, resolved.decision
                break
            conditional_rules.append(ConditionalRule(resolved, condition))
        site.conditional_rules = tuple(conditional_rules)
        site.must_save, condition_name = self._must_save(site)
        site.must_save_condition = condition_of(condition_name) if condition_name else None
        site.may_save = (
            site.final_decision.keeps
            or site.must_save
            or any(conditional.resolved.saves for conditional in conditional_rules)
        )

    def _must_save(self, site: CallSite) -> tuple[bool, str]:
        """Return whether the results of a routing op are kept even if no rule saves them, and under which condition."""
        rules = [resolved for resolved in (site.final_rule, *(c.resolved for c in site.conditional_rules)) if resolved]
        found = is_must_save(site.op)
        against = [one for one in rules if one.rule.do == Decision.RECOMPUTE.value and one.matcher.names(site.op)]
        if found[0] and against:
            rule = against[0].rule
            text = (
                f'rule "{rule.id}" recomputes {site_name(site)}, which may return something else the second time: '
                "gradients are then wrong, or backward fails"
            )
            warn(Problem(rule.where("do"), text))
            return False, ""
        return found


def first_tensor(out: Any) -> torch.Tensor | None:
    """Return the first tensor of an op's result."""
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, (tuple, list)):
        return next((found for found in map(first_tensor, out) if found is not None), None)
    return None


def paths_up(path: str) -> list[str]:
    """Return ``path`` and the paths of its enclosing modules; the last is the region's own, which is empty."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _decides_on(rule: Rule, path: str) -> bool:
    return rule.matches_module and rule.module is not None and rule.module.matches(path)


_GATHERING = frozenset({"aten.split_with_sizes_copy", "aten.set_", "aten.resize_"})  # the ops with which FSDP gathers


def gathers(site: CallSite) -> bool:
    """Whether an op fills parameters from their shards, so that its writes are not the region's own."""
    return site.traits.is_infrastructure or site.is_collective or site_name(site) in _GATHERING


def site_name(site: CallSite) -> str:
    """Return the name of the call site's op in messages."""
    return op_name(site.op)


def module_name(path: str) -> str:
    """Return the name of a module of the region in messages."""
    return f"module {path}" if path else "the region itself"


# -- Policies with resolved op names


@dataclass(frozen=True, slots=True)
class ResolvedPolicy:
    """A policy whose names are resolved. ``missing``: per rule id, names that this build of torch lacks."""

    policy: Policy
    rules: tuple[ResolvedRule, ...]
    missing: dict[str, tuple[str, ...]]

    def rules_of(self, path: str, layer: int, stack_size: int, applies: Callable[[Rule], bool]) -> list[ResolvedRule]:
        """Return the rules that apply to the region at ``path``, which is one layer of a stack.

        A rule for some regions only is left out if it does not apply at all (``applies``), so that regions between
        which it makes no difference share a region group.
        """
        return [
            resolved
            for resolved in self.rules
            if not (resolved.rule.blocks or resolved.rule.layers)
            or (resolved.rule.matches_region(path, layer, stack_size) and applies(resolved.rule))
        ]

    def table(self, rules: Iterable[int]) -> DecisionTable:
        """Return the table of the rules with these indices."""
        return DecisionTable(self.policy, tuple(self.rules[index] for index in rules))


def resolve_policy(policy: Policy) -> ResolvedPolicy:
    """Resolve the op names of ``policy``; raise ``PolicyError`` with all names that match nothing."""
    rules: list[ResolvedRule] = []
    missing: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    # A planned policy has many rules for few ops, and reading torch's registry takes milliseconds.
    registry = read_registry()
    resolve = cache(lambda ops, saves: resolve_ops(ops, policy.sets, for_saving=saves, registry=registry))
    for name, found in check_sets(policy.sets).items():
        problems.extend(replace(problem, where=policy.where(f"sets.{name}")) for problem in found)
    for index, rule in enumerate(policy.rules):
        matcher: OpMatcher = resolve(rule.ops, rule.do != Decision.RECOMPUTE.value)
        decision = Decision.SAVE if rule.do == ALTERNATE else Decision(rule.do)
        rules.append(ResolvedRule(rule, matcher, index, decision))
        for name_index, problem in matcher.problems.items():
            problems.append(replace(problem, where=rule.where(f"ops[{name_index}]")))
        if matcher.missing:
            missing[rule.id] = matcher.missing
    if problems:
        raise PolicyError(problems)
    return ResolvedPolicy(policy, tuple(rules), missing)


def _rebuild(policy: Policy, indices: Iterable[int]) -> DecisionTable:
    """Rebuild a table from its pickled parts."""
    return resolve_policy(policy).table(indices)


# -- The layer index of a single block, for ``sac.context_fn``

NAMES = ("layer_idx", "layer_id", "layer_number", "layer_index")


def layer_index(module: nn.Module) -> int | None:
    """Return the layer index that a block or one of its children has as an attribute in ``NAMES``, else None."""
    for owner in (module, *module.children()):
        for name in NAMES:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
