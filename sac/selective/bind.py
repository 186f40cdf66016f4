"""From a policy to tables: its op names resolved on this build of torch, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from sac.errors import PolicyError, Problem
from sac.ops.names import NameProblem, OpMatcher, check_sets, resolve_ops
from sac.ops.registry import read_registry
from sac.policy.model import Decision, Policy, Rule
from sac.selective.table import BoundRule, Table


@dataclass(frozen=True, slots=True)
class BoundPolicy:
    """A policy whose names are resolved. ``missing``: per rule id, names that this build of torch lacks."""

    policy: Policy
    rules: tuple[BoundRule, ...]
    missing: dict[str, tuple[str, ...]]

    def rules_of(self, path: str, layer: int, stack_size: int, applies: Callable[[Rule], bool]) -> list[BoundRule]:
        """Return the rules that hold for the region at ``path``, one layer of a stack.

        A rule for some regions only is left out where it does not apply at all (``applies``), so that regions which it
        could not tell apart are of one kind.
        """
        return [
            bound
            for bound in self.rules
            if not bound.rule.speaks_of_some_regions
            or (bound.rule.speaks_of_region(path, layer, stack_size) and applies(bound.rule))
        ]

    def table(self, rules: Iterable[int], *, must_save: bool = True) -> Table:
        """Return the table of the rules with these indices."""
        return Table(self.policy, tuple(self.rules[index] for index in rules), must_save=must_save)


def bind_policy(policy: Policy) -> BoundPolicy:
    """Resolve the op names of ``policy``; raises ``PolicyError`` with all names that mean nothing."""
    rules: list[BoundRule] = []
    missing: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    # A planned policy has many rules for few ops, and to read torch's registry takes milliseconds.
    registry = read_registry()
    resolve = cache(lambda ops, saves: resolve_ops(ops, policy.sets, for_saving=saves, registry=registry))
    for name, found in check_sets(policy.sets).items():
        place = str(policy.set_marks.get(name, policy.where("sets")))
        problems.extend(_told(place, problem) for problem in found)
    for index, rule in enumerate(policy.rules):
        matcher: OpMatcher = resolve(rule.ops, rule.do != Decision.RECOMPUTE.value)
        rules.append(BoundRule(rule, matcher, index))
        for problem in matcher.problems:
            marked = problem.index < len(rule.op_marks)
            problems.append(_told(str(rule.op_marks[problem.index]) if marked else rule.where("ops"), problem))
        if matcher.missing:
            missing[rule.id] = matcher.missing
    if problems:
        raise PolicyError(problems)
    return BoundPolicy(policy, tuple(rules), missing)


def _told(where: str, problem: NameProblem) -> Problem:
    return Problem(where, problem.found, expected=problem.legal, nearest=problem.nearest, fix=problem.fix)


def rebuild_table(policy: Policy, indices: Iterable[int], must_save: bool) -> Table:
    """Make a table again from what a pickle holds of it."""
    return bind_policy(policy).table(indices, must_save=must_save)
