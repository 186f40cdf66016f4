"""`sac.report` and the trace: kept bytes per rule, and the decision for each op."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from sac.blocks.install import regions_of
from sac.blocks.paths import group_label as group_label
from sac.native.load import status
from sac.policy.read import bytes_text
from sac.recompute.op_trace import NO_RULE, compiled_calls
from sac.recompute.regions import Region, RegionGroup
from sac.stores.store import InputStoring

# -- The decision for each op


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """The decision for one op of one region group.

    ``region`` names the regions of the group (``model.layers.0-31 (x32)``), ``module`` is the module path relative to
    the region, ``call`` counts the op's uses in that module from 0, ``bytes`` is the size of the op's result, and
    ``flops`` comes from torch's formulas (0 if no formula is known).
    """

    region: str
    module: str
    op: str
    call: int
    rule: str
    decision: str
    bytes: int
    flops: int
    reason: str


def decisions_of(model: nn.Module) -> tuple[DecisionRow, ...]:
    """Return the decisions of each region group of ``model`` that has run, in the order of the forward."""
    rows = []
    for group, regions in regions_by_group(model):
        label = group_label([region.path for region in regions])
        for row in group.op_trace:
            rows.append(
                DecisionRow(
                    label, row.module, row.op, row.call, row.rule, row.decision, row.bytes, row.flops, row.reason
                )
            )
    return tuple(rows)


def regions_by_group(model: nn.Module) -> list[tuple[RegionGroup, list[Region]]]:
    """Return the region groups of a model, each with its regions, in module order."""
    groups: dict[int, tuple[RegionGroup, list[Region]]] = {}
    for region in (forward.region for forward in regions_of(model)):
        groups.setdefault(id(region.group), (region.group, []))[1].append(region)
    return list(groups.values())


# -- ``sac.report``: saved bytes per rule, and ops that are recomputed

UNMATCHED_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RuleUse:
    """One rule in one region group, per region: the calls that it matched, and the bytes held for backward by it.

    ``rule`` is ``must-save`` for nondeterministic routing ops, which are saved in every mode, and ``default`` for a
    policy whose default saves.
    """

    rule: str
    hits: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class UnmatchedOp:
    """An op that no rule matches and that is recomputed: its calls, result bytes and FLOPs per region."""

    op: str
    calls: int
    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class TracedReport:
    """The decisions passed to ``torch.compile`` when it last traced a region: calls of ops to save, and to recompute.

    ``rules``: the calls that each rule matched. Among the results to save, the partitioner keeps a choice of what
    autograd needs, so no bytes are known.
    """

    saved: int
    recomputed: int
    rules: dict[str, int]


@dataclass(frozen=True, slots=True)
class KindReport:
    """The numbers of one region group, per region; bytes are those of the last call, each whole storage counted once.

    ``calls``: eager calls, summed over all regions. ``left_in_eager``, also over all regions: calls under
    ``torch.compile`` that were not compiled (a graph break inside the region, backend "eager"); their decisions are the
    same, and no bytes are known.
    ``traced``: None if no region was compiled. ``compiled_graphs``: compiled graphs that ran inside the region; rules
    treat each of them as one op.
    ``input_host_bytes``: inputs kept in host memory for a device, in addition to ``input_bytes``.
    ``dead_bytes``: saved by decision, then freed at the end of forward because backward can never read them.
    ``engine``: the engine of the last call, ``replay`` or ``rerun``; empty if none was needed. ``no_replay``: why
    regions of this group are no longer replayed.
    """

    regions: str
    count: int
    calls: int
    saved_bytes: int
    input_bytes: int
    input_host_bytes: int
    dead_bytes: int
    rules: tuple[RuleUse, ...]
    unmatched: tuple[UnmatchedOp, ...]
    traced: TracedReport | None = None
    left_in_eager: int = 0
    compiled_graphs: int = 0
    engine: str = ""
    no_replay: str = ""

    @property
    def has_run(self) -> bool:
        """Whether a forward with grad has run or was compiled."""
        return bool(self.calls or self.left_in_eager or self.traced)

    @property
    def kept_bytes(self) -> int:
        """Bytes that one region holds on devices between forward and backward, inputs included."""
        return self.saved_bytes + self.input_bytes


@dataclass(frozen=True, slots=True)
class Report:
    """The result of ``sac.report``; ``str`` formats it for people, ``to_dict`` returns it as plain values.

    ``kept_inputs``: which inputs are kept elsewhere than in the caller's tensors, and where; empty if none are.
    ``native``: whether this process uses the C++ library, or why not. ``native_ops``: ops that the library has recorded
    in the last call of each region.
    """

    mode: str
    kept_inputs: str
    kinds: tuple[KindReport, ...]
    zero_hit_rules: tuple[str, ...]
    left_alone: tuple[str, ...]
    notes: tuple[str, ...]
    native: str
    native_ops: int

    @property
    def kept_bytes(self) -> int:
        """Bytes that all regions together hold on devices between forward and backward, inputs included."""
        return sum(kind.kept_bytes * kind.count for kind in self.kinds)

    @property
    def input_host_bytes(self) -> int:
        """Bytes of inputs that all regions together hold in host memory for devices."""
        return sum(kind.input_host_bytes * kind.count for kind in self.kinds)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        plain = asdict(self)
        for kind, told in zip(self.kinds, plain["kinds"], strict=True):
            told["kept_bytes"] = kind.kept_bytes
        return {**plain, "kept_bytes": self.kept_bytes, "input_host_bytes": self.input_host_bytes}

    def __str__(self) -> str:
        count = sum(kind.count for kind in self.kinds)
        lines = [f"activation checkpointing: {self.mode}, {count} regions" + ("" if count else " on this model")]
        if self.kinds and not any(kind.has_run for kind in self.kinds):
            lines.append("no forward with grad has run yet")
        if self.kept_inputs:
            lines.append(f"of each region's inputs: {self.kept_inputs}")
        for kind in self.kinds:
            lines += _kind_lines(kind)
        if self.zero_hit_rules:
            lines.append(f"rules without a hit: {', '.join(self.zero_hit_rules)}")
        if self.left_alone:
            lines.append(f"frozen, left alone: {group_label(self.left_alone)}")
        return "\n".join([*lines, *self.notes, self.native])


def report(model: nn.Module) -> Report:
    """Return a report of what the regions of ``model`` kept in their last forward with grad, in bytes.

    For a model without regions (mode none, an idle pipeline stage, ``sac.apply`` never called) the report has mode
    ``none`` and is empty. Before the first forward all numbers are 0.
    """
    forwards = list(regions_of(model))
    if not forwards:
        return Report("none", "", (), (), (), (), status(), 0)
    applied = forwards[0].applied
    kinds = tuple(_kind_report(group, regions) for group, regions in _alike(model))
    hit = {use.rule for group in kinds for use in group.rules if use.hits}
    hit |= {rule for group in kinds if group.traced is not None for rule in group.traced.rules}
    rules = {resolved.rule.id for forward in forwards for resolved in forward.region.group.table.rules}
    return Report(
        applied.mode,
        "; ".join(dict.fromkeys(filter(None, (_kept_inputs(one.applied.settings.input_storing) for one in forwards)))),
        kinds,
        tuple(sorted(rules - hit)) if any(group.calls or group.traced for group in kinds) else (),
        applied.left_alone,
        applied.notes,
        status(),
        sum(forward.region.stats.native_ops for forward in forwards),
    )


_CHOSEN = {"first": "the first floating-point one is kept", "all": "all floating-point ones are kept"}


def _kept_inputs(keeping: InputStoring | None) -> str:
    """Return which inputs are kept where; a user's predicate cannot be described further."""
    if keeping is None:
        return ""
    which = _CHOSEN[keeping.which] if isinstance(keeping.which, str) else "those that `keep` chooses are kept"
    return f"{which} {keeping.store.describe()}"


def _alike(model: nn.Module) -> Iterable[tuple[RegionGroup, list[Region]]]:
    """Yield the region groups of a model, each split into regions whose last calls have equal statistics."""
    for group, regions in regions_by_group(model):
        groups: dict[tuple[object, ...], list[Region]] = {}
        for region in regions:
            groups.setdefault(region.stats.figures(), []).append(region)
        for alike in groups.values():
            yield group, alike


def _kind_report(group: RegionGroup, regions: Sequence[Region]) -> KindReport:
    stats = regions[-1].stats
    return KindReport(
        regions=group_label(region.path for region in regions),
        count=len(regions),
        calls=sum(region.stats.calls for region in regions),
        saved_bytes=stats.saved_bytes,
        input_bytes=stats.input_bytes,
        input_host_bytes=stats.input_host_bytes,
        dead_bytes=stats.dead_bytes,
        rules=tuple(_rule_uses(group, regions)),
        unmatched=tuple(_unmatched(group)),
        traced=_traced(group),
        left_in_eager=compiled_calls(group.table).left_in_eager,
        compiled_graphs=stats.compiled_graphs,
        engine=stats.engine,
        no_replay=group.evidence.not_replayable,
    )


def _traced(group: RegionGroup) -> TracedReport | None:
    calls = compiled_calls(group.table).traced
    if calls is None:
        return None
    hits = {one.rule.id: calls.hits[one.index] for one in group.table.rules if one.index in calls.hits}
    return TracedReport(calls.saved, calls.recomputed, hits)


def _rule_uses(group: RegionGroup, regions: Sequence[Region]) -> Iterable[RuleUse]:
    stats = regions[-1].stats
    for resolved in group.table.rules:
        yield RuleUse(resolved.rule.id, stats.hits.get(resolved.index, 0), stats.by_rule.get(resolved.index, 0))
    if NO_RULE in stats.by_rule:
        name = "default" if group.table.default.value == "save" else "must-save"
        hits = sum(row.decision == "save" and not row.rule for row in group.op_trace)
        yield RuleUse(name, hits, stats.by_rule[NO_RULE])


def _unmatched(group: RegionGroup) -> Iterable[UnmatchedOp]:
    """Yield the most expensive ops that the default recomputes: by FLOPs, then by bytes."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in group.op_trace:
        if row.reason == "default" and row.decision == "recompute":
            for index, amount in enumerate((1, row.bytes, row.flops)):
                sums[row.op][index] += amount
    dearest = sorted(sums.items(), key=lambda item: (-item[1][2], -item[1][1], item[0]))
    return (UnmatchedOp(op, *amounts) for op, amounts in dearest[:UNMATCHED_SHOWN])


def _kind_lines(kind: KindReport) -> list[str]:
    lines = list(_eager_lines(kind)) if kind.calls or not kind.has_run else []
    if kind.left_in_eager:
        lines.append(
            f"{kind.regions}: {kind.left_in_eager} calls that torch.compile left in eager, with the same decisions; "
            "their bytes are not counted here"
        )
    if kind.traced is not None:
        told = kind.traced
        lines.append(f"{kind.regions}: compiled; decisions: save {told.saved} calls, recompute {told.recomputed}")
        lines += [f"  rule {rule}: {hits} calls" for rule, hits in told.rules.items()]
        lines.append("  the partitioner chooses what it keeps of these; their bytes are not counted here")
    return lines


def _eager_lines(kind: KindReport) -> Iterable[str]:
    on_host = f"; {bytes_text(kind.input_host_bytes)} of inputs in host memory" if kind.input_host_bytes else ""
    yield (
        f"{kind.regions}: keeps {bytes_text(kind.kept_bytes)} per region "
        f"({bytes_text(kind.saved_bytes)} saved, {bytes_text(kind.input_bytes)} of inputs{on_host})"
    )
    for use in kind.rules:
        yield f"  rule {use.rule}: {use.hits} calls, {bytes_text(use.saved_bytes)} saved"
    if kind.dead_bytes:
        yield f"  freed, since backward never reads it: {bytes_text(kind.dead_bytes)}"
    if kind.no_replay:
        yield f"  run again as Python, not replayed: {kind.no_replay}"
    if kind.compiled_graphs:
        yield f"  compiled graphs inside, each one piece that rules do not look into: {kind.compiled_graphs}"
    if kind.unmatched:
        ops = ", ".join(f"{op.op} (x{op.calls}, {bytes_text(op.bytes)})" for op in kind.unmatched)
        yield f"  recomputed by default, dearest first: {ops}"
