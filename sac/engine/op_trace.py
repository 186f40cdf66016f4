"""One row per op that a region ran, for trace and report, and figures of what a call keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sac.engine.table import NO_RULE as NO_RULE
from sac.engine.table import CallSite, ResolvedRule, first_tensor
from sac.ops.flops import flops_of
from sac.ops.registry import op_name
from sac.policy.model import Decision
from sac.stores.offload import OffloadUse
from sac.tensors import storage_address, storage_bytes, tensors_of

# -- Rows of the op trace: the decision on each op of one region call


@dataclass(frozen=True, slots=True)
class OpTraceRow:
    """One op of a region's forward.

    ``bytes`` are those of its results. ``flops`` come from torch's formulas (0: none known).

    ``module`` is the module path relative to the region, and ``call`` counts the op's calls in that module from 0.
    ``decision`` is ``save``, ``recompute`` or ``offload``. ``reason`` says what decided: a rule's id, ``must-save``,
    ``default``, or why the op cannot be saved. ``region`` names the regions of the group (``model.layers.0-31 (x32)``),
    or one region in the log; it is empty in the group's own record.
    """

    module: str
    op: str
    call: int
    decision: str
    rule: str
    reason: str
    bytes: int
    flops: int
    shape: tuple[int, ...]
    dtype: str
    region: str = ""


class OpTraceRecorder:
    """Collects one row per op that reaches the dispatcher."""

    def __init__(self) -> None:
        self.rows: list[OpTraceRow] = []
        self._calls: dict[tuple[str, str], int] = {}

    def add(self, site: Any, rule: ResolvedRule | None, decision: Decision, args: Any, kwargs: Any, out: Any) -> None:
        """Append the op that has just run."""
        self._append(site, rule, decision, args, kwargs, out)

    def add_unit(self, site: Any, rule: Any, decision: Decision, arguments: Any, returned: Any, first: int) -> None:
        """Append a call of an autograd Function or of a named piece; rows from ``first`` are those of its ops."""
        if decision.keeps:
            for number in range(first, len(self.rows)):
                if self.rows[number].reason == "default":
                    self.rows[number] = replace(self.rows[number], reason=f"inside {site.name}")
        self._append(site, rule, decision, arguments, {}, returned)

    def _append(self, site: Any, rule: Any, decision: Decision, args: Any, kwargs: Any, out: Any) -> None:
        is_op, result = isinstance(site, CallSite), first_tensor(out)
        key = site.path, op_name(site.op) if is_op else site.name
        call = self._calls[key] = self._calls.get(key, -1) + 1
        rule_id = rule.rule.id if rule is not None else ""
        sizes = {} if site.is_view else {storage_address(one): storage_bytes(one) for one in tensors_of(out)}
        flops = flops_of(site.op, args, kwargs, out) if is_op else 0
        shape = tuple(result.shape) if result is not None else ()
        dtype = str(result.dtype).removeprefix("torch.") if result is not None else ""
        size, reason = sum(sizes.values()), _reason(site, rule, decision)
        self.rows.append(OpTraceRow(*key, call, decision.value, rule_id, reason, size, flops, shape, dtype))


def _reason(site: Any, rule: ResolvedRule | None, decision: Decision) -> str:
    if site.traits.unsavable_reason:
        return str(site.traits.unsavable_reason)
    if rule is not None and decision in (rule.decision, Decision.RECOMPUTE):
        return f"rule {rule.rule.id}"
    is_kept = site.must_save or not isinstance(site, CallSite)  # a unit that communicates
    return "must-save" if decision is Decision.SAVE and is_kept else "default"


# -- What the last call of one region kept, for the report


@dataclass(frozen=True, slots=True)
class SavedFigures:
    """What one call keeps for backward, without the inputs: bytes of whole storages, each counted once.

    They are counted before anything is passed to outer hooks. ``dead_bytes``: decided to be saved, but freed because
    backward can never read it. ``by_rule`` (bytes) and ``hits`` (calls of ops) are keyed by the rule's index in the
    table.
    """

    saved_bytes: int = 0
    dead_bytes: int = 0
    by_rule: Mapping[int, int] = field(default_factory=dict)
    hits: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class RegionStats:
    """What the last call of one region kept. Two are equal if their bytes, calls of ops and graphs are.

    ``input_host_bytes``: of inputs kept in host memory for a device. ``compiled_graphs``: those of ``torch.compile``
    that it ran where rules decide. ``offloads``: what became of what rules offload, by rule. ``engine``: that of the
    last call, empty if it needed none.
    """

    calls: int = field(default=0, compare=False)
    saved: SavedFigures = SavedFigures()
    input_bytes: int = 0
    input_host_bytes: int = 0
    compiled_graphs: int = 0
    engine: str = field(default="", compare=False)
    offloads: Mapping[int, OffloadUse] = field(default_factory=dict)

    @property
    def by_rule(self) -> dict[int, int]:
        """Bytes saved on the device, by the rule's index."""
        moved = {rule: one.host_bytes for rule, one in self.offloads.items()}
        return {rule: size - moved.get(rule, 0) for rule, size in self.saved.by_rule.items()}

    @property
    def saved_bytes(self) -> int:
        """Bytes saved on the device for backward, without the inputs."""
        return self.saved.saved_bytes - sum(one.host_bytes for one in self.offloads.values())

    def take(self, saved: SavedFigures | None, input_bytes: tuple[int, int]) -> None:
        """Overwrite with what the call that has just run keeps; ``saved`` is None if no mode was needed."""
        self.calls += 1
        self.input_bytes, self.input_host_bytes = input_bytes
        if saved is not None or self.saved.by_rule:
            self.saved = saved or SavedFigures(hits=self.saved.hits)


# -- What was decided in graphs of ``torch.compile``, for the report


@dataclass(slots=True)
class TracedCalls:
    """The decisions passed to ``torch.compile`` when it last traced a region: calls of ops to save, and to recompute.

    ``rules``: the calls that each rule matched. ``offloads``: whether a rule offloads, which no compiled graph does:
    it saves. Among the results to save, the partitioner keeps a choice of what autograd needs, so no bytes are known.
    """

    saved: int = 0
    recomputed: int = 0
    rules: dict[str, int] = field(default_factory=dict)
    offloads: bool = False
