"""Regions in graphs of ``torch.compile``: policies as tags for the partitioner; what is kept out of graphs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac.engine.context import eager_contexts
from sac.engine.op_trace import TracedCalls
from sac.engine.table import CallSite, DecisionTable, decide
from sac.engine.untraced import kept_out_of_graphs
from sac.errors import Problem, warn
from sac.policy.model import Decision
from sac.torch_private import SHOWS_RESULTS_TO_POLICIES, is_traced


def checkpoint_contexts(
    table: DecisionTable, path: str = "", module: nn.Module | None = None, *, in_graph: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the two contexts of one call of ``torch.utils.checkpoint``, which calls this function once per call.

    ``in_graph``: the call is part of a Dynamo graph that is traced, or run as it is (backend "eager").
    """
    if is_traced():
        forward, recompute = create_selective_checkpoint_contexts(TracedPolicy(table, module))
        return forward, recompute
    if in_graph:
        table.left_in_eager += 1
    return eager_contexts(table, module, in_graph=in_graph)


# -- Regions in what ``torch.compile`` traces

# Note [Regions under torch.compile]
#
# Our frame cannot be traced. Inside a compiled function a region is a call of `torch.utils.checkpoint`: Dynamo puts it
# into its graph, with our decisions as tags for the partitioner. What only our frame can do (`Settings.needs_frame`) is
# not dropped: such a region runs in eager mode, as a call that Dynamo does not trace. This breaks the graph there;
# under `fullgraph=True` torch raises its own error, which states our reason.

_TAKEN = {"function", "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"}


def run_traced(
    function: Callable[..., Any], table: DecisionTable, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run ``function(*args, **kwargs)`` as a region of a graph that is being traced."""
    contexts = partial(checkpoint_contexts, table, in_graph=True)  # with a path Dynamo would compile each region
    if not _TAKEN.isdisjoint(kwargs):  # the function's own arguments, which torch would take as its own
        function, kwargs = partial(function, **kwargs), {}
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


run_in_eager = kept_out_of_graphs(
    "sac runs this region in eager: inputs that are kept elsewhere, trackers, generators, state providers and "
    "use_reentrant cannot be put into a graph",
)


# -- Under ``torch.compile``: decisions as tags for the partitioner

# Note [Modules under torch.compile]
#
# No module code runs when a module's ops are traced. Dynamo has inlined it, and each node of its graph carries the
# stack of modules that the node came from, outermost first: id, access path from Dynamo's root, class (torch 2.13, see
# tests/stacks/test_compile.py). If the region's block is known, the ids tell which module of the region this
# is. Otherwise the access paths do: torch calls the context function before it traces the first op of a region, while
# the current node is the call of the region itself, so the innermost module is the block. There is no current module if
# the block itself is compiled (`block.compile()`); access paths then begin at our own forward (`L['self'].module.mlp`).


def _tell_of_results(table: DecisionTable) -> None:
    """Warn about rules that match on an op's result if torch does not show results to policies."""
    blind = [one.rule for one in table.rules if one.rule.shape is not None or one.rule.dtype]
    if blind and not SHOWS_RESULTS_TO_POLICIES:
        problem = Problem(
            blind[0].where(),
            f'rule "{blind[0].id}" matches on the shape, dtype or size of results, which torch {torch.__version__} '
            "does not show to a policy under torch.compile: it matches nothing there",
            fix="use a later torch, or say which op is meant by module or call",
        )
        warn(problem)


class TracedPolicy:
    """A decision table as the policy function that torch's modes call under ``torch.compile``: partitioner tags.

    ``module`` is the region's block, if known.
    """

    def __init__(self, table: DecisionTable, module: nn.Module | None = None) -> None:
        self.table = table
        self.calls: MutableMapping[CallSite, int] = defaultdict(int)  # counted for rules
        self.alternations: MutableMapping[int, int] = defaultdict(int)
        self.hits: MutableMapping[int, int] = defaultdict(int)
        self.figures = table.traced = TracedCalls(offloads=bool(table.offloads))
        _tell_of_results(table)
        self._paths = {} if module is None else {str(id(part)): name for name, part in module.named_modules()}
        stack = _modules_at_work()
        self._base = stack[-1][1] if stack else ""

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Return the decision on this call as torch's ``CheckpointPolicy``."""
        table, figures, path = self.table, self.figures, self._module()
        site = table.sites_of(path).get(id(op)) or table.add_site(op, path)
        if site.is_bookkeeping:
            return CheckpointPolicy.PREFER_RECOMPUTE
        decision, rule = Decision.RECOMPUTE, site.final_rule
        if site.may_save or site.conditional_rules:
            decision, rule = decide(self, site, args, kwargs, getattr(context, "op_output", None))
        saves = decision.keeps  # a compiled graph offloads nothing
        figures.saved, figures.recomputed = figures.saved + saves, figures.recomputed + (not saves)
        if rule is not None:
            figures.rules[rule.rule.id] = figures.rules.get(rule.rule.id, 0) + 1
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def _module(self) -> str:
        """Return the path, relative to the region, of the module that is being traced."""
        stack = _modules_at_work()
        if self._paths:
            return next((self._paths[key] for key, _ in reversed(stack) if key in self._paths), "")
        if not stack or stack[-1][1] == self._base:
            return ""
        base = self._base or f"{stack[-1][1].partition('.')[0]}.module"
        return stack[-1][1].removeprefix(base).removeprefix(".")


def _modules_at_work() -> list[tuple[str, str]]:
    """Return id and access path of each module that the traced node came from, outermost first."""
    stack = torch.fx.traceback.current_meta.get("nn_module_stack") or {}
    return [(str(key).partition("@")[0], _clean(way)) for key, (way, _) in stack.items()]


def _clean(way: str) -> str:
    """Return ``L['self'].layers[3].mlp`` as ``self.layers.3.mlp``, without what our forwards and wrappers add."""
    text = re.sub(r"^[LG]\['(\w+)'\]", r"\1", way)
    text = re.sub(r"\[\s*['\"]?([\w]+)['\"]?\s*\]", r".\1", text)
    return re.sub(r"\._modules|\._orig_mod|\.forward(\.__self__)?\.module", "", text)
