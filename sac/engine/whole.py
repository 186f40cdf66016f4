"""Modules that a rule saves as a whole: they run outside of the region, and their results are kept values of the tape.

So autograd keeps what it would keep without a region. A replay starts from what such a module returned, and from what
it wrote to. Its ops are on the tape, without decisions: earlier contents can be made again. If the region's Python runs
again, so does the module, unseen by the region's saved-tensor hooks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from sac.engine.objects import attributes_of, is_own_object
from sac.engine.op_trace import OpTraceRecorder
from sac.engine.table import DecisionTable, ResolvedRule
from sac.outer_hooks import active_packs, nodes_since, saved_without_hooks, without_hooks
from sac.policy.model import ALTERNATE
from sac.tensors import detached, storage_address, storage_bytes, tensor_parts
from sac.torch_private import next_node_number, transform_is_active, tree_leaves


class WholeModules:
    """The calls of saved modules in one run of a region. ``hits``: rule -> calls that it matched, of a forward."""

    def __init__(self, table: DecisionTable) -> None:
        self.table = table
        self.count_hooks = 1  # of the innermost saved-tensor hooks, those of the region
        self.is_inside = False  # no rule reaches modules inside of a saved one
        self.hits: dict[int, int] = defaultdict(int)
        self.inside: dict[int, dict[int, int]] = defaultdict(dict)  # rule -> storage that autograd keeps -> bytes
        self._turns: dict[int, int] = defaultdict(int)
        self._calls: dict[str, int] = defaultdict(int)
        self._packs: Any = ()

    def begin(self) -> None:
        """Note the region's saved-tensor hooks, which are the innermost ones."""
        self._packs = active_packs(self.count_hooks)

    def end(self) -> None:
        """Hold the region's hooks no longer: they lead back to here."""
        self._packs = ()

    def rule_of(self, path: str) -> ResolvedRule | None:
        """Return the rule that saves the call of the module at ``path`` that begins now, if there is one."""
        rule = self.table.whole_rule(path)
        if rule is None or not rule.saves or transform_is_active():
            return None
        self.hits[rule.index] += 1
        if rule.rule.do == ALTERNATE:
            self._turns[rule.index] += 1
            if not rule.rule.keeps_turn(self._turns[rule.index] - 1):
                return None
        return rule

    def run(
        self, mode: Any, path: str, rule: ResolvedRule, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a saved module, and have the recorder keep what it leaves behind."""
        number = self._calls[path]
        self._calls[path] += 1
        tape: Any = getattr(mode, "tape", None)
        is_recorded = hasattr(mode, "tape") and not mode.paused
        first = (len(tape.sites), len(tape.roots)) if is_recorded else (0, 0)
        first_node = next_node_number()
        outer = mode.path, mode.sites
        mode.path, mode.sites = self.table.sites_inside(path)
        trace = mode.op_trace if is_recorded else None
        inside = OpTraceRecorder()
        if trace is not None:  # it has one row for the module
            mode.op_trace = inside
        self.is_inside = True
        try:
            with without_hooks(self._packs):
                out = function(*args, **kwargs)
        finally:
            self.is_inside = False
            mode.path, mode.sites = outer
            if trace is not None:
                mode.op_trace = trace
        if is_recorded:
            results = [*tensors_in(out)]
            kept = keep(tape, results, [*tensors_in((args, kwargs))], first, rule.index)
            inner = _kept_inside(results, first_node)
            self.inside[rule.index].update(inner)
            kept |= {address: size for address, size in inner.items() if address not in tape.leaf_roots}
            if trace is not None:
                module = getattr(function, "__self__", None)
                flops = sum(row.flops for row in inside.rows)
                trace.add_module((path, number), rule, module, out, kept_bytes=sum(kept.values()), flops=flops)
        return out


def keep(
    tape: Any, results: list[Tensor], arguments: list[Tensor], first: tuple[int, int], rule: int
) -> dict[int, int]:
    """Keep the results of a module, and those arguments that it wrote to; return the bytes of each storage.

    ``first``: the first entry and the first value inside of the module.
    """
    sizes: dict[int, int] = {}
    written = [tensor for tensor in arguments if tape.known(tensor) is not None]
    for tensor in (*results, *written):
        value = tape.find(tensor)
        root = tape.roots[value]
        is_new = root >= first[1] or tape.last_write(value) >= first[0]
        if tape.makers[root] < 0 or not is_new:
            continue
        if value not in tape.kept:
            tape.kept[value] = detached(tensor)
            tape.kept_roots.add(root)
            tape.rule_of[value] = rule
        sizes |= {storage_address(part): storage_bytes(part) for part in tensor_parts(tensor)}
    return sizes


def _kept_inside(results: list[Tensor], first_node: int) -> dict[int, int]:
    """Return the storages that the graph of a module's results keeps, by address, with their bytes."""
    saved = [one.data for node in nodes_since(results, first_node) for one in saved_without_hooks(node)]
    return {storage_address(part): storage_bytes(part) for tensor in saved for part in tensor_parts(tensor)}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers, and in the attributes of objects in them."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_own_object(leaf):
            yield from (part for part in tree_leaves(attributes_of(leaf)) if isinstance(part, Tensor))
