"""Notices rules that matched nothing once every region has run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from sac.errors import Problem, RegionError, SacWarning, listing
from sac.policy.model import Rule
from sac.policy.shipped import is_shipped, shipped_policies
from sac.selective.stats import RegionStats
from sac.selective.table import Table

COMPILED = "compiled"  # the save-set of compiled graphs as a whole


class HitWatch:
    """Adds up the hits of each region's first call; when all regions have run, reports rules without any.

    ``strict``: that is an error. Otherwise it is a warning, also if no rule at all has a hit: rules may match in later
    steps, when sequences are longer or the batch is no longer empty.
    """

    def __init__(self, paths: Iterable[str], rules: Iterable[Rule], *, strict: bool) -> None:
        self._pending = set(paths)
        self._compiled: list[str] = []
        self._rules = list(rules)
        self._hit: set[str] = set()
        self.strict = strict
        self.waits = bool(self._pending)

    def saw(self, path: str, table: Table, stats: RegionStats) -> None:
        """A region has run; ``stats`` holds the hits of its call. Raises ``RegionError`` under ``strict``."""
        self._hit.update(table.rules[place].rule.id for place in _places(table, stats))
        self._pending.discard(path)
        if stats.compiled_graphs:
            self._compiled.append(path)
        if self._pending and stats.calls < 2:
            return
        self.waits = False
        self._tell_of_compiled()
        idle = self.idle()
        if not idle:
            return
        problems = idle_problems(idle, {rule.id: _problem(rule) for rule in idle}, any_hit=bool(self._hit))
        if problems and self.strict:
            raise RegionError(problems)
        for problem in problems:
            warnings.warn(str(problem), SacWarning, stacklevel=2)

    def _tell_of_compiled(self) -> None:
        """Warn that rules do not reach what is compiled below a region, unless one of them is on that as a whole."""
        if self._compiled and self._rules and not any(COMPILED in rule.ops for rule in self._rules):
            warnings.warn(str(_compiled_problem(self._compiled)), SacWarning, stacklevel=2)

    def idle(self) -> list[Rule]:
        """Return the rules that nothing has matched so far and that are not optional."""
        return [rule for rule in self._rules if rule.id not in self._hit and not rule.optional]


def idle_problems(idle: Sequence[Rule], problems: Mapping[str, Problem], *, any_hit: bool) -> list[Problem]:
    """Return what there is to say of ``idle`` rules, by whose ids ``problems`` are named.

    Rules of a shipped policy are ours to know, not the user's. If no rule at all matches (not ``any_hit``), that is one
    problem, of the choice of policy.
    """
    found = [problems[rule.id] for rule in idle if not is_shipped(rule.mark)]
    names = dict.fromkeys(rule.origin for rule in idle if is_shipped(rule.mark)) if not any_hit else ()
    fix = "`sac trace` lists the ops there are; choose another policy, or write one for this model"
    legal = listing(shipped_policies())
    return found + [
        Problem(f"policy {name}", "no rule of it matches anything in this model", legal, fix=fix) for name in names
    ]


def _places(table: Table, stats: RegionStats) -> list[int]:
    chosen = {bound.index: place for place, bound in enumerate(table.rules)}
    return [chosen[index] for index in stats.hits if index in chosen]


def _compiled_problem(paths: list[str]) -> Problem:
    more = f" and {len(paths) - 1} more regions" if len(paths) > 1 else ""
    return Problem(
        where=f"{paths[0]}{more}",
        found="torch.compile was applied to something inside the region. That is one piece here: what rules say of "
        "modules and ops inside does not reach it, and it is run again as a whole",
        fix="compile the whole block or model instead, after sac.apply: block.compile() or torch.compile(model)",
    )


def _problem(rule: Rule) -> Problem:
    what = "module" if rule.speaks_of_module else "op"
    return Problem(
        where=rule.where(),
        found=f'rule "{rule.id}" matched no {what} in any region of the model',
        fix=f"`sac trace` lists the {what}s there are; mark the rule `optional: true` if it may match nothing",
    )
