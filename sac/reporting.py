"""`sac.report` and the trace: kept bytes per rule, and the decision for each op."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from sac.blocks.install import ModelReference, alike, regions_of
from sac.blocks.paths import group_label as group_label
from sac.engine.op_trace import NO_RULE, OpTraceRow, RegionStats, TracedCalls
from sac.engine.region import Region, RegionGroup
from sac.ops.registry import short_name
from sac.stores.offload import OffloadUse
from sac.stores.store import InputStoring
from sac.tables import Table, bytes_text, count_text, flops_text, screen_width, wrapped_text

# -- The decision for each op


def decisions_of(model: nn.Module) -> tuple[OpTraceRow, ...]:
    """Return the decisions of each region group of ``model`` that has run, in the order of the forward."""
    return tuple(
        replace(row, region=group_label([region.path for region in regions]))
        for group, regions in regions_by_group(model)
        for row in group.op_trace
    )


_TRACE_COLUMNS = ("module", "op", "call", "decision", "decided by", "bytes", "FLOPs")


@dataclass(frozen=True, slots=True, repr=False)
class Trace:
    """The decision for each op of a model under a config value; ``print`` shows a table per region group.

    ``rows`` are in the order of the forward, sizes in bytes.
    """

    model: str
    value: str
    rows: tuple[OpTraceRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as plain values."""
        return asdict(self)

    def regions(self) -> dict[str, tuple[OpTraceRow, ...]]:
        """Return the rows by region group."""
        regions = dict.fromkeys(row.region for row in self.rows)
        return {region: tuple(row for row in self.rows if row.region == region) for region in regions}

    def __str__(self) -> str:
        lines = [f"{self.model} under {self.value}", ""]
        for region, rows in self.regions().items():
            shown = [row for row in rows if row.bytes or row.flops or row.rule]
            table = Table(_TRACE_COLUMNS, tuple(map(_trace_cells, shown)), right=("call", "bytes", "FLOPs"))
            lines += [region, table.text(screen_width()), *_totals(shown, len(rows)), ""]
        return "\n".join(lines).rstrip("\n")

    def __repr__(self) -> str:
        saved = sum(row.decision != "recompute" for row in self.rows)
        calls = count_text(len(self.rows), "call")
        return f"<Trace of {self.model} under {self.value}: {calls} of ops, {saved} saved; print() shows all>"


def _totals(shown: Sequence[OpTraceRow], count: int) -> Iterator[str]:
    """Yield the totals of each decision; of ``count`` calls, those that are not shown (views) are only counted."""
    for decision in dict.fromkeys(row.decision for row in shown):
        decided = [row for row in shown if row.decision == decision]
        sizes = bytes_text(sum(row.bytes for row in decided))
        flops = flops_text(sum(row.flops for row in decided))
        yield f"  {decision}: {count_text(len(decided), 'call')}, {sizes}, {flops}"
    if rest := count - len(shown):
        yield f"  not shown: {count_text(rest, 'call')} without memory of their own; --json lists them"


def _trace_cells(row: OpTraceRow) -> tuple[str, ...]:
    by_rule = row.reason == f"rule {row.rule}" or not row.rule
    return (
        row.module or "(region)",
        short_name(row.op),
        str(row.call),
        row.decision,
        row.reason if by_rule else f"{row.reason} (rule {row.rule})",
        bytes_text(row.bytes),
        flops_text(row.flops) if row.flops else "–",
    )


def regions_by_group(model: nn.Module) -> list[tuple[RegionGroup, list[Region]]]:
    """Return the region groups of a model, each with its regions, in module order."""
    groups: dict[int, tuple[RegionGroup, list[Region]]] = {}
    for region in (forward.region for forward in regions_of(model)):
        groups.setdefault(id(region.group), (region.group, []))[1].append(region)
    return list(groups.values())


# -- ``sac.report``: saved bytes per rule, and ops that are recomputed


@dataclass(frozen=True, slots=True)
class RuleUse:
    """One rule in one region group: the calls of ops that it matched in one forward of one region, and the bytes held.

    ``rule`` is ``must-save`` for nondeterministic routing ops, which are saved in every mode, and ``default`` for a
    policy whose default saves. ``recomputes``: whether the rule recomputes what it matches.
    """

    rule: str
    hits: int
    saved_bytes: int
    recomputes: bool = False


@dataclass(frozen=True, slots=True)
class UnmatchedOp:
    """An op that no rule matches and that is recomputed: its calls, result bytes and FLOPs per region."""

    op: str
    calls: int
    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class KindReport:
    """The numbers of one region group, per region; bytes are those of the last call, each whole storage counted once.

    ``calls``: eager calls, summed over all regions. ``left_in_eager``, also over all regions: calls under
    ``torch.compile`` that were not compiled (a graph break inside the region, backend "eager"); their decisions are the
    same, and no bytes are known.
    ``traced``: None if no region was compiled. ``compiled_graphs``: compiled graphs that ran inside the region; rules
    treat each of them as one op.
    ``input_bytes``: inputs, and copies of inputs and buffers from before the region wrote to them;
    ``input_host_bytes``: inputs kept in host memory for a device, in addition.
    ``dead_bytes``: saved by decision, then freed at the end of forward because backward can never read them.
    ``offloads``: what became of what rules offload; ``saved_bytes`` counts what stayed on the device, not what has
    moved to the host.
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
    traced: TracedCalls | None = None
    left_in_eager: int = 0
    compiled_graphs: int = 0
    engine: str = ""
    no_replay: str = ""
    offloads: tuple[OffloadUse, ...] = ()

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of one region that wait in host memory between forward and backward, without inputs."""
        return sum(one.host_bytes for one in self.offloads)

    @property
    def has_run(self) -> bool:
        """Whether a forward with grad has run or was compiled."""
        return bool(self.calls or self.left_in_eager or self.traced)

    @property
    def kept_bytes(self) -> int:
        """Bytes that one region holds on devices between forward and backward, inputs included."""
        return self.saved_bytes + self.input_bytes


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The result of ``sac.report``; ``str`` formats it for people, ``to_dict`` returns it as plain values.

    ``kept_inputs``: which inputs are kept elsewhere than in the caller's tensors, and where; empty if none are.
    ``policy``: the name of the policy in mode selective, which may have been chosen by the model's family.
    """

    mode: str
    kept_inputs: str
    kinds: tuple[KindReport, ...]
    zero_hit_rules: tuple[str, ...]
    notes: tuple[str, ...]
    policy: str = ""

    @property
    def kept_bytes(self) -> int:
        """Bytes that all regions together hold on devices between forward and backward, inputs included."""
        return self._sums()["kept_bytes"]

    def _sums(self) -> dict[str, int]:
        names = ("kept_bytes", "input_bytes", "input_host_bytes", "offloaded_bytes")
        return {name: sum(getattr(kind, name) * kind.count for kind in self.kinds) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        kinds = tuple({**asdict(kind), "kept_bytes": kind.kept_bytes} for kind in self.kinds)
        return {**asdict(self), "kinds": kinds, **self._sums()}

    def __str__(self) -> str:
        count = sum(kind.count for kind in self.kinds)
        policy = f", policy {self.policy}" if self.policy else "" if count else " on this model"
        lines = [f"activation checkpointing: {self.mode}, {count} regions{policy}"]
        if self.kinds and not any(kind.has_run for kind in self.kinds):
            lines.append("no forward with grad has run yet")
        if self.kept_inputs:
            lines.append(f"of each region's inputs: {self.kept_inputs}")
        for kind in self.kinds:
            lines += _kind_lines(kind, self.zero_hit_rules)
        if self.zero_hit_rules:
            lines.append(f"rules without a call: {', '.join(self.zero_hit_rules)}")
        return wrapped_text([*lines, *self.notes], screen_width())

    def __repr__(self) -> str:
        count = count_text(sum(kind.count for kind in self.kinds), "region")
        return f"<Report: {self.mode}, {count}, {bytes_text(self.kept_bytes)} kept; print() shows all>"

    def saved_bytes_by_rule(self) -> dict[str, int]:
        """Return the bytes that each rule holds for backward, summed over all regions."""
        sizes: dict[str, int] = defaultdict(int)
        for kind in self.kinds:
            for use in kind.rules:
                sizes[use.rule] += use.saved_bytes * kind.count
        return dict(sizes)

    def scalars(self, prefix: str = "sac/") -> dict[str, float]:
        """Return figures for the logger of a trainer, in bytes over all regions: kept, of inputs, and per rule."""
        sizes = self._sums() | {f"saved_bytes/{rule}": size for rule, size in self.saved_bytes_by_rule().items()}
        shown = {name: size for name, size in sizes.items() if size or name in ("kept_bytes", "input_bytes")}
        return {f"{prefix}{name}": float(size) for name, size in shown.items()}


def report(model: nn.Module) -> Report:
    """Return a report of what the regions of ``model`` kept in their last forward with grad, in bytes.

    For a model without regions (mode none, an idle pipeline stage, ``sac.apply`` never called) the report has mode
    ``none`` and is empty. Before the first forward all numbers are 0.
    """
    forwards = list(regions_of(model))
    if not forwards:
        return Report("none", "", (), (), ())
    applied = forwards[0].applied
    kinds = tuple(_kind_report(of_group) for _, regions in regions_by_group(model) for of_group in alike(regions))
    hit = {use.rule for group in kinds for use in group.rules if use.hits}
    hit |= {rule for group in kinds if group.traced is not None for rule in group.traced.rules}
    rules = {resolved.rule.id for forward in forwards for resolved in forward.region.group.table.rules}
    storing = (forward.applied.settings.input_storing for forward in forwards)
    return Report(
        applied.mode,
        "; ".join(dict.fromkeys(_kept_inputs(keeping) for keeping in storing if keeping is not None)),
        kinds,
        tuple(sorted(rules - hit)) if any(group.calls or group.traced for group in kinds) else (),
        applied.notes if applied.fitting is None else (*applied.notes, applied.fitting.told),
        forwards[0].region.group.table.policy.name if applied.mode == "selective" else "",
    )


class MemoryNote(ModelReference):
    """Adds the report of a model to an out-of-memory error that its regions raise."""

    def __call__(self, error: BaseException) -> None:
        """Add the note, if this version of Python (3.11 or newer) has notes."""
        model = self.of()
        if model is not None and hasattr(error, "add_note"):
            with suppress(Exception):  # the user needs the error, with or without the report
                note = str(report(model))
                if note not in getattr(error, "__notes__", ()):  # also passes through the regions around this one
                    error.add_note(note)


def note_memory(model: nn.Module) -> None:
    """Have out-of-memory errors that the regions of ``model`` raise carry the report of the model as a note."""
    installed = next(regions_of(model), None)
    if installed is not None:  # all regions of a `sac.apply` share its record
        installed.applied.settings = replace(installed.applied.settings, add_note=MemoryNote(model))


_KEPT: Mapping[Any, str] = {
    "first": "the first floating-point one is kept",
    "all": "all floating-point ones are kept",
}


def _kept_inputs(keeping: InputStoring) -> str:
    """Return which inputs are kept where; a user's predicate cannot be described further."""
    return f"{_KEPT.get(keeping.which, 'those that `keep` chooses are kept')} {keeping.store.place}"


def _kind_report(regions: Sequence[Region]) -> KindReport:
    group, stats = regions[-1].group, regions[-1].stats
    return KindReport(
        regions=group_label(region.path for region in regions),
        count=len(regions),
        calls=sum(region.stats.calls for region in regions),
        saved_bytes=stats.saved_bytes,
        input_bytes=stats.input_bytes,
        input_host_bytes=stats.input_host_bytes,
        dead_bytes=stats.saved.dead_bytes,
        rules=tuple(_rule_uses(group, stats)),
        unmatched=tuple(_unmatched(group)),
        traced=_traced(group),
        left_in_eager=group.table.left_in_eager,
        compiled_graphs=stats.compiled_graphs,
        engine=stats.engine,
        no_replay=group.not_replayable,
        offloads=tuple(
            replace(use, rule=group.table.rule_name(rule), held_bytes={**use.held_bytes})
            for rule, use in sorted(stats.offloads.items())
        ),
    )


def _traced(group: RegionGroup) -> TracedCalls | None:
    calls: TracedCalls | None = group.table.traced
    if calls is None:
        return None
    hits = {each.rule.id: calls.rules[each.rule.id] for each in group.table.rules if each.rule.id in calls.rules}
    return replace(calls, rules=hits)


def _rule_uses(group: RegionGroup, stats: RegionStats) -> Iterable[RuleUse]:
    sizes, calls = stats.by_rule, stats.saved.hits
    for resolved in group.table.rules:
        use = calls.get(resolved.index, 0), sizes.get(resolved.index, 0)
        yield RuleUse(resolved.rule.id, *use, recomputes=not resolved.saves)
    hits = sum(row.decision != "recompute" and not row.rule for row in group.op_trace)
    if NO_RULE in sizes and (hits or sizes[NO_RULE]):  # it is not a rule that the user wrote, and could have no call
        yield RuleUse("default" if group.table.default.keeps else "must-save", hits, sizes[NO_RULE])


def _unmatched(group: RegionGroup) -> Iterable[UnmatchedOp]:
    """Yield the five most expensive ops that the default recomputes: by FLOPs, then by bytes."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in group.op_trace:
        if row.reason == "default" and row.decision == "recompute":
            for index, amount in enumerate((1, row.bytes, row.flops)):
                sums[row.op][index] += amount
    dearest = sorted(sums.items(), key=lambda item: (-item[1][2], -item[1][1], item[0]))
    return (UnmatchedOp(op, *amounts) for op, amounts in dearest[:5])


def _kind_lines(kind: KindReport, never: Sequence[str]) -> list[str]:
    """Return the lines of one region group; ``never``: rules without a call in any group, listed elsewhere."""
    lines = list(_eager_lines(kind, never)) if kind.calls or not kind.has_run else []
    if kind.left_in_eager:
        lines.append(
            f"{kind.regions}: {count_text(kind.left_in_eager, 'forward')} that torch.compile left in eager, with the "
            "same decisions; their bytes are not counted here"
        )
    if (traced := kind.traced) is not None:
        decisions = f"save {count_text(traced.saved, 'call')}, recompute {traced.recomputed}"
        lines.append(f"{kind.regions}: compiled; decisions: {decisions}")
        lines += [f"  rule {rule}: {count_text(hits, 'call')}" for rule, hits in traced.rules.items()]
        lines.append("  the partitioner chooses what it keeps of these; their bytes are not counted here")
        if traced.offloads:
            lines.append("  a compiled graph offloads nothing: what rules offload is saved on the device")
    return lines


def _offload_text(use: OffloadUse) -> str:
    parts = [f"{bytes_text(use.host_bytes)} to host memory"] if use.host_bytes else []
    parts += [f"{bytes_text(size)} held on the device: {reason}" for reason, size in use.held_bytes.items()]
    return f"offloaded by {'' if use.rule == 'default' else 'rule '}{use.rule}: {'; '.join(parts)}"


def _eager_lines(kind: KindReport, never: Sequence[str]) -> Iterable[str]:
    on_host = f"; {bytes_text(kind.input_host_bytes)} of inputs in host memory" if kind.input_host_bytes else ""
    on_host += f"; {bytes_text(kind.offloaded_bytes)} offloaded to host memory" if kind.offloaded_bytes else ""
    yield (
        f"{kind.regions}: keeps {bytes_text(kind.kept_bytes)} per region "
        f"({bytes_text(kind.saved_bytes)} saved, {bytes_text(kind.input_bytes)} of inputs{on_host})"
    )
    for use in kind.rules:
        if use.hits:
            what = "recomputed" if use.recomputes else f"{bytes_text(use.saved_bytes)} saved"
            yield f"  rule {use.rule}: {count_text(use.hits, 'call')}, {what}"
    yield from (f"  {_offload_text(use)}" for use in kind.offloads)
    if kind.has_run:
        idle = [use.rule for use in kind.rules if not use.hits and use.rule not in never]
        yield from [f"  rules without a call here: {', '.join(idle)}"] if idle else ()
    if kind.dead_bytes:
        yield f"  freed, since backward never reads it: {bytes_text(kind.dead_bytes)}"
    if kind.no_replay:
        yield f"  run again as Python, not replayed: {kind.no_replay}"
    if kind.compiled_graphs:
        yield f"  compiled graphs inside, each one piece that rules do not look into: {kind.compiled_graphs}"
    if kind.unmatched:
        ops = ", ".join(f"{short_name(op.op)} (x{op.calls}, {bytes_text(op.bytes)})" for op in kind.unmatched)
        yield f"  recomputed by default, dearest first: {ops}"
