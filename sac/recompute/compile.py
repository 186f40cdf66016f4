"""A policy under ``torch.compile``: tags for the partitioner, by the module that each traced op came from."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from sac.errors import Problem, SacWarning
from sac.policy.model import ALTERNATE
from sac.recompute.rerun import RerunState, decide
from sac.recompute.table import DecisionTable, ResolvedRule, TracedCalls, paths_up
from sac.torch_private import SHOWS_RESULTS_TO_POLICIES, partitioner_budget

# Note [Modules under torch.compile]
#
# Nothing of a module runs when its ops are traced: Dynamo has inlined it, and leaves on each node of its graph the
# stack of modules that the node came from, outermost first: id, the way by which Dynamo came to it, class (torch 2.13,
# see tests/stacks/test_compile_modules.py). Which module of the region that is, the ids tell where the region's block
# is at hand. Otherwise the ways do: torch calls the context function before it traces the first op of a region, with
# the call of the region itself as the node at work, so that the innermost module is the block then. None is at work
# where the block is what is compiled (`block.compile()`): ways then begin at our own forward (`L['self'].module.mlp`).


def _tell_of_results(table: DecisionTable) -> None:
    """Warn of rules that speak of an op's result where torch does not show it."""
    blind = [one.rule for one in table.rules if one.rule.shape is not None or one.rule.dtype or one.rule.min_bytes]
    if blind and not SHOWS_RESULTS_TO_POLICIES:
        problem = Problem(
            blind[0].where(),
            f'rule "{blind[0].id}" speaks of the shape, dtype or size of results, which torch {torch.__version__} does '
            "not show to a policy under torch.compile: it matches nothing there",
            fix="use a later torch, or say which op is meant by module or call",
        )
        warnings.warn(str(problem), SacWarning, stacklevel=2)


def _tell_of_budget() -> None:
    """Warn if the partitioner has a memory budget of its own."""
    budget = partitioner_budget()
    if budget == 1:
        return
    wins = "it has no say in regions: what sac saves is saved there, and what it does not is recomputed"
    if budget == 0:
        wins = "at 0 it wins: everything is recomputed, what sac saves too"
    problem = Problem(
        "torch._functorch.config.activation_memory_budget",
        f"it is {budget}, and sac.apply has been called on what is compiled; {wins}",
        fix="leave it at 1, or leave sac.apply out",
    )
    warnings.warn(str(problem), SacWarning, stacklevel=2)


class TracedPolicy:
    """A table as the policy function that torch's own modes ask under ``torch.compile``: tags for the partitioner.

    ``module`` is the region's block, where it is at hand.
    """

    def __init__(self, table: DecisionTable, path: str, module: nn.Module | None = None) -> None:
        self.record = RerunState(table, path)
        self.calls = table.traced = TracedCalls()
        _tell_of_budget()
        _tell_of_results(table)
        self._paths = {} if module is None else {str(id(part)): name for name, part in module.named_modules()}
        stack = _modules_at_work()
        self._base = stack[-1][1] if stack else ""
        self._whole: dict[str, ResolvedRule | None] = {}
        self._turns: dict[int, list[str]] = {}  # rule that alternates -> modules that it has met

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Return torch's word for the decision on this call."""
        table, record = self.record.table, self.record
        path = self._module()
        site = table.sites_of(path).get(op) or table.add_site(op, path)
        if site.is_bookkeeping:
            return CheckpointPolicy.PREFER_RECOMPUTE
        saves, rule = site.savable, self._rule_of_module(path)
        if rule is None:
            saves, rule = False, site.final_rule
            if site.may_save or site.conditional_rules:
                saves, rule = decide(record, site, args, kwargs, getattr(context, "op_output", None))
        self._count(saves, rule)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def _rule_of_module(self, path: str) -> ResolvedRule | None:
        """Return the rule that saves the module at ``path``, or one around it, as a whole; all ops inside are saved.

        Of modules that a rule alternates it is every other one, in the order in which they are traced.
        """
        table = self.record.table
        if not table.matches_modules:
            return None
        if path not in self._whole:
            saving = [(around, bound) for around in reversed(paths_up(path)) if (bound := table.whole_rule(around))]
            chosen = (bound for around, bound in saving if bound.saves and self._has_turn(around, bound))
            self._whole[path] = next(chosen, None)
        return self._whole[path]

    def _has_turn(self, path: str, bound: ResolvedRule) -> bool:
        if bound.rule.do != ALTERNATE:
            return True
        modules = self._turns.setdefault(bound.index, [])
        if path not in modules:
            modules.append(path)
        return modules.index(path) % 2 == 0

    def _count(self, saves: bool, rule: ResolvedRule | None) -> None:
        calls = self.calls
        calls.saved, calls.recomputed = calls.saved + saves, calls.recomputed + (not saves)
        if rule is not None:
            calls.hits[rule.index] = calls.hits.get(rule.index, 0) + 1

    def _module(self) -> str:
        """Return the path, relative to the region, of the module that is being traced now."""
        stack = _modules_at_work()
        if self._paths:
            return next((self._paths[key] for key, _ in reversed(stack) if key in self._paths), "")
        if not stack or stack[-1][1] == self._base:
            return ""
        base = self._base or f"{stack[-1][1].partition('.')[0]}.module"
        return stack[-1][1].removeprefix(base).removeprefix(".")


def _modules_at_work() -> list[tuple[str, str]]:
    """Return id and way of each module from which the node now traced came, outermost first."""
    stack = torch.fx.traceback.current_meta.get("nn_module_stack") or {}
    return [(str(key).partition("@")[0], _clean(way)) for key, (way, _) in stack.items()]


def _clean(way: str) -> str:
    """Return ``L['self'].layers[3].mlp`` as ``self.layers.3.mlp``, without what our forwards and wrappers add."""
    text = re.sub(r"^[LG]\['(\w+)'\]", r"\1", way)
    text = re.sub(r"\[\s*['\"]?([\w]+)['\"]?\s*\]", r".\1", text)
    return re.sub(r"\._modules|\._orig_mod|\.forward(\.__self__)?\.module", "", text)
