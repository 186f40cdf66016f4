"""What is alive at the peak of a step, by category, module, op and rule, and what would lower the peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from sac.blocks.find import Block
from sac.blocks.install import regions_of
from sac.blocks.paths import group_label
from sac.engine.op_trace import OpTraceRow
from sac.ops.registry import short_name
from sac.planner.step_log import (
    BUFFER,
    FORWARD,
    GRADIENT,
    IN_BACKWARD,
    INPUT,
    PARAMETER,
    RECOMPUTED,
    STATE,
    STATIC,
    Event,
    Made,
    Origin,
    Ran,
    Resized,
    StepLog,
)
from sac.policy.read import bytes_text

# -- Categories

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
BUFFERS = "buffers and inputs"
GATHERED = "gathered parameters"
ACTIVATIONS = "activations"
RECOMPUTED_ACTIVATIONS = "recomputed activations"
OTHER_ACTIVATIONS = "activations outside of blocks"
HEAD = "logits and loss"
TEMPORARIES = "temporaries of backward"
WORKSPACE = "results and workspace of the running op"
UNSEEN = "not seen by the explanation"
CATEGORIES = (
    PARAMETERS, BUFFERS, OPTIMIZER, GRADIENTS, GATHERED, ACTIVATIONS, OTHER_ACTIVATIONS, HEAD,
    RECOMPUTED_ACTIVATIONS, TEMPORARIES, WORKSPACE, UNSEEN,
)  # fmt: skip

_OF_STATIC = {
    PARAMETER: PARAMETERS,
    GRADIENT: GRADIENTS,
    STATE: OPTIMIZER,
    BUFFER: BUFFERS,
    INPUT: BUFFERS,
}

# Why an activation is alive, if it is not a rule.
NO_CHECKPOINTING = "no checkpointing"
BLOCK_INPUT = "input of a block"
RUNNING = "the block is running"
HELD = "the block's backward"  # or its recomputation: what it reads besides what a rule saves
UNSAVED = "the block's forward or backward"  # one of these two, over the whole step

# What lowers the bytes of a category where no policy does.
REMEDIES: Mapping[str, str] = {
    PARAMETERS: "shard them (`sac plan --fsdp N`), hold them in a narrower dtype, or train adapters on frozen weights",
    GRADIENTS: "shard them (`sac plan --fsdp N`), or let the optimizer step in backward, so that each is freed at once",
    OPTIMIZER: "shard it (`sac plan --fsdp N`), or use an optimizer with less state (8 bits, or factored)",
    BUFFERS: "a smaller batch, with more accumulation steps",
    GATHERED: "shard in smaller units: call fully_shard on smaller modules",
    OTHER_ACTIVATIONS: "a smaller batch, with more accumulation steps",
    HEAD: "a chunked or fused loss, which never holds all logits at once; or a smaller batch, with more accumulation "
    "steps",
    RECOMPUTED_ACTIVATIONS: "smaller regions (`granularity: submodule`), or a smaller batch",
    TEMPORARIES: "a smaller batch, with more accumulation steps",
    WORKSPACE: "a smaller batch, or another kernel for this op",
}
_WORTH_SAYING = 0.1  # of the peak


# -- The breakdown of a peak


@dataclass(frozen=True, slots=True)
class AliveRow:
    """Tensors that are alive at the peak for the same reason: their number, and the bytes of their storages.

    ``where``: the module or parameter, for all blocks of a stack at once. ``op``: the op that made them; empty for what
    exists before the step. ``kept_by``: what holds an activation: ``rule …``, ``must-save``, or another reason; empty
    for other categories. ``is_choice``: whether a policy decides on these bytes.
    """

    category: str
    where: str
    op: str
    kept_by: str
    count: int
    bytes: int
    is_choice: bool = False


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One moment of a step, and what is alive then: by index in ``Curve.rows``, the bytes and the number of tensors.

    ``x`` is 0 to 1 in the forward and 1 to 2 in the backward, by the number of events.
    """

    x: float
    moment: str
    alive: Mapping[int, tuple[int, int]]

    @property
    def bytes(self) -> int:
        """The bytes of everything that is alive."""
        return sum(size for size, _ in self.alive.values())


@dataclass(frozen=True, slots=True)
class Curve:
    """What is alive over the step. ``rows`` have the largest bytes and the largest number of tensors of any point.

    ``before``: indices of the rows that are there before the step.
    """

    rows: tuple[AliveRow, ...]
    points: tuple[CurvePoint, ...]
    before: frozenset[int] = frozenset()

    @property
    def peak(self) -> CurvePoint:
        """The point with the most bytes, the first of several."""
        return max(self.points, key=lambda point: point.bytes)

    def by_category(self) -> dict[str, list[int]]:
        """Return for each category, in the order of ``CATEGORIES``, its bytes at each point."""
        used = {row.category for row in self.rows}
        found = {name: [0] * len(self.points) for name in CATEGORIES if name in used}
        for place, point in enumerate(self.points):
            for index, (size, _) in point.alive.items():
                found[self.rows[index].category][place] += size
        return found


@dataclass(frozen=True, slots=True)
class PeakBreakdown:
    """What is alive at the peak of one step; the bytes of ``rows`` sum to ``peak_bytes``.

    ``label`` names the mode or plan, ``moment`` says when the peak is. ``before_bytes``: how many of the bytes were
    there before the step.
    """

    label: str
    moment: str
    peak_bytes: int
    before_bytes: int
    rows: tuple[AliveRow, ...]
    curve: Curve = field(repr=False)

    def by_category(self) -> dict[str, int]:
        """Return the bytes of each category that has any, largest first."""
        found: dict[str, int] = {}
        for row in self.rows:
            found[row.category] = found.get(row.category, 0) + row.bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def choice_bytes(self) -> int:
        """The bytes on which a policy decides: activations that it could recompute instead."""
        return sum(row.bytes for row in self.rows if row.is_choice)

    def remedies(self) -> tuple[str, ...]:
        """Return what lowers the categories that make up much of the peak and on which no policy decides."""
        least = _WORTH_SAYING * self.peak_bytes
        return tuple(
            f"{category}, {bytes_text(count)}: {REMEDIES[category]}"
            for category, count in self.by_category().items()
            if category in REMEDIES and count >= least
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the breakdown as plain values, without the curve of the picture."""
        return {
            "label": self.label,
            "moment": self.moment,
            "peak_bytes": self.peak_bytes,
            "before_bytes": self.before_bytes,
            "choice_bytes": self.choice_bytes,
            "categories": self.by_category(),
            "rows": [asdict(row) for row in self.rows],
            "remedies": [*self.remedies()],
        }


def with_more(found: PeakBreakdown, rows: Sequence[AliveRow], *, are_before: bool = True) -> PeakBreakdown:
    """Return the breakdown with more rows, of bytes that the logged step does not contain and that never change.

    ``are_before``: whether they are there before the step.
    """
    more = [row for row in rows if row.bytes]
    count = sum(row.bytes for row in more)
    return replace(
        found,
        peak_bytes=found.peak_bytes + count,
        before_bytes=found.before_bytes + (count if are_before else 0),
        rows=_sorted((*found.rows, *more)),
        curve=_raised(found.curve, more, are_before=are_before),
    )


def _raised(curve: Curve, more: Sequence[AliveRow], *, are_before: bool) -> Curve:
    added = {len(curve.rows) + number: (row.bytes, row.count) for number, row in enumerate(more)}
    points = tuple(replace(point, alive={**point.alive, **added}) for point in curve.points)
    return Curve((*curve.rows, *more), points, curve.before | added.keys() if are_before else curve.before)


def _sorted(rows: Sequence[AliveRow]) -> tuple[AliveRow, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.category, row.where, row.op, row.kept_by)))


# -- From the log of a step to the breakdown


def explain(log: StepLog, model: nn.Module, blocks: Sequence[Block], label: str) -> PeakBreakdown:
    """Return what is alive at the peak of the step in ``log``; the regions of that step are still on ``model``.

    ``blocks`` are the blocks of ``model`` by which rows are named.
    """
    peak, stop, op = _peak_of(log)
    at = op.origin if op is not None else _made_last(log, stop)
    sorting = _Sorting(log, model, blocks, at)
    merged: dict[_Key, list[tuple[str, int]]] = {}  # -> block and bytes of each storage
    before = 0
    for made, size in _alive_at(log, stop):
        before += size if made.origin.part == STATIC else 0
        key, block = sorting.key_of(made)
        merged.setdefault(key, []).append((block, size))
    if op is not None:
        key, block = sorting.key_of(Made(-1, 0, op.origin))
        merged[replace(key, category=WORKSPACE)] = [(block, log.workspace_bytes(op.key))]
    rows = []
    for key, members in merged.items():
        where = sorting.named(key.inside, {block for block, _ in members})
        count = sum(size for _, size in members)
        rows.append(AliveRow(key.category, where, key.op, key.kept_by, len(members), count, key.is_choice))
    found = _sorted([row for row in rows if row.bytes])
    assert sum(row.bytes for row in found) == peak, "what is alive sums to the peak"
    return PeakBreakdown(label, sorting.moment(at), peak, before, found, _curve(log, sorting))


def _levels(log: StepLog) -> Iterator[tuple[int, int, Ran | None]]:
    """Yield for each event the level that it reaches, the number of events before, and the op that is running then."""
    sizes: dict[int, int] = {}
    levels = [0]
    live = 0
    for index, event in enumerate(log.events):
        if isinstance(event, Ran):
            yield levels[event.begin] + log.workspace_bytes(event.key), event.begin, event
        else:
            live += event.bytes - sizes.get(event.storage, 0)
            sizes[event.storage] = event.bytes
            yield live, index + 1, None
        levels.append(live)


def _peak_of(log: StepLog) -> tuple[int, int, Ran | None]:
    """Return the highest level, the number of events before it, and the op that was running, if there was one."""
    return max(_levels(log), key=lambda one: one[0], default=(0, 0, None))


def _alive_at(log: StepLog, stop: int) -> list[tuple[Made, int]]:
    """Return the storages that are alive after ``stop`` events, each with its size then."""
    alive: dict[int, tuple[Made, int]] = {}
    for event in log.events[:stop]:
        if isinstance(event, Made):
            alive[event.storage] = event, event.bytes
        elif isinstance(event, Resized):
            if event.is_freed:
                del alive[event.storage]
            else:
                alive[event.storage] = alive[event.storage][0], event.bytes
    return [*alive.values()]


def _made_last(log: StepLog, stop: int) -> Origin:
    return next((event.origin for event in reversed(log.events[:stop]) if isinstance(event, Made)), Origin(STATIC))


@dataclass(frozen=True, slots=True)
class _Key:
    """The row of a storage: ``inside`` is the path of its module or parameter in its block of ``stack``."""

    category: str
    stack: str
    inside: str
    op: str
    kept_by: str = ""
    is_choice: bool = False


class _Sorting:
    """Sorts storages into categories and rows. ``at``: what was being made at the peak."""

    def __init__(self, log: StepLog, model: nn.Module, blocks: Sequence[Block], at: Origin) -> None:
        self._log = log
        self._at = at
        self._blocks = {block.path: block for block in blocks}
        regions = [one.region for one in regions_of(model)]
        self._regions = {region.path: _decisions(region.group.op_trace) for region in regions}
        self._resized = {e.storage for e in log.events if isinstance(e, Resized) and not e.is_freed}

    def key_of(self, made: Made, *, at_peak: bool = True) -> tuple[_Key, str]:
        """Return the row of a storage, and the path of its block; not ``at_peak``: the same row over the whole step."""
        origin = made.origin
        category = self.category_of(made)
        module, op, kept_by, choice = origin.module, origin.op, "", False
        if category == ACTIVATIONS:
            kept_by, choice = self._kept_by(origin, made.storage, at_peak=at_peak)
        elif category == GRADIENTS:
            module, op = self._log.gradients.get(made.storage, module), ""
        elif origin.part == STATIC:
            op = ""
        block = self._block_of(module)
        # A policy moves activations: parameters and gradients of a block are one row.
        inside = "" if category in (PARAMETERS, GRADIENTS) and block else module[len(block) :].lstrip(".")
        stack = self._blocks[block].stack if block else ""
        return _Key(category, stack, inside, op, kept_by, choice), block

    def category_of(self, made: Made) -> str:
        """Return the category of a storage."""
        origin = made.origin
        if made.storage in self._log.gradients:
            return GRADIENTS
        if origin.part == STATIC:
            return _OF_STATIC.get(origin.op, BUFFERS)
        if made.storage in self._resized or origin.op.startswith("fsdp."):
            return GATHERED
        if self._is_head(origin):
            return HEAD
        if origin.part == RECOMPUTED:
            return RECOMPUTED_ACTIVATIONS
        if origin.part == IN_BACKWARD:
            return TEMPORARIES
        if origin.block or made.storage in self._log.block_inputs:
            return ACTIVATIONS
        return OTHER_ACTIVATIONS

    def _is_head(self, origin: Origin) -> bool:
        return bool(self._log.calls) and not origin.block and origin.blocks_before == self._log.calls

    def _kept_by(self, origin: Origin, storage: int, *, at_peak: bool) -> tuple[str, bool]:
        """Return what keeps an activation of a block, and whether a policy decides on it."""
        if storage in self._log.block_inputs:  # every policy needs it
            return BLOCK_INPUT, False
        if at_peak and self._at.part == FORWARD and self._at.block == origin.block != "":
            return RUNNING, False
        region = self._region_of(origin.module) if origin.block else None
        if region is None:
            return NO_CHECKPOINTING, True
        inside = origin.module[len(region) :].lstrip(".")
        row = _decision_on(self._regions[region], inside, origin)
        if row is None or row.decision == "recompute":
            return HELD if at_peak else UNSAVED, False
        return row.reason, row.reason != "must-save"

    def _region_of(self, path: str) -> str | None:
        return next((up for up in _paths_up(path) if up in self._regions), None)

    def _block_of(self, path: str) -> str:
        return next((up for up in _paths_up(path) if up in self._blocks), "")

    def named(self, inside: str, paths: set[str]) -> str:
        """Return the name of a row that is ``inside`` of these blocks (empty: of the model)."""
        ordered = [path for path in self._blocks if path in paths]
        label = group_label(ordered).rpartition(" (x")[0] or ordered[0] if ordered else ""
        return ".".join(part for part in (label, inside) if part) or "(model)"

    def moment(self, origin: Origin) -> str:
        """Return as text when something with this origin is made."""
        where = origin.module or "the model"
        part = {FORWARD: "forward", RECOMPUTED: "backward, while it is recomputed,", IN_BACKWARD: "backward"}
        if origin.part == STATIC:
            return "before the step"
        if origin.part == FORWARD and self._is_head(origin):
            return f"after the last block, in {where}" + (f" ({short_op(origin.op)})" if origin.op else "")
        return f"in the {part[origin.part]} of {where}" + (f" ({short_op(origin.op)})" if origin.op else "")


def _decisions(rows: Sequence[OpTraceRow]) -> dict[tuple[str, str, int], OpTraceRow]:
    return {(row.module, row.op, row.call): row for row in rows}


def _decision_on(rows: dict[tuple[str, str, int], OpTraceRow], inside: str, origin: Origin) -> OpTraceRow | None:
    """Return the decision on an op of a region: its own, or that on a module that is saved as a whole around it."""
    found = rows.get((inside, origin.op, origin.call))
    if found is not None:
        return found
    whole = {module: row for (module, op, _), row in rows.items() if op.startswith("module ")}
    return next((whole[up] for up in _paths_up(inside) if up in whole), None)


def _paths_up(path: str) -> Iterator[str]:
    """Yield a path and the paths of what is around it, the model's last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def short_op(op: str) -> str:
    """Return the name of an op without namespace and default overload, as tables show it."""
    return short_name(op).removeprefix("aten.")


# -- The curve over the step

_BINS = 400  # per pass


def _curve(log: StepLog, sorting: _Sorting) -> Curve:
    """Return what is alive over the step: of the events in each bin, at the highest level."""
    begin = next((index for index, event in enumerate(log.events) if _starts_step(event)), 0)
    forward = max(1, log.backward_begins - begin)
    backward = max(1, log.ends - log.backward_begins)
    best: dict[int, tuple[int, float, int, Ran | None]] = {}  # level, x, events before, running op; of each bin
    for index, (level, stop, op) in enumerate(_levels(log)):
        done = index - log.backward_begins
        x = (index - begin) / forward if done < 0 else 1 + done / backward
        at = int(x * _BINS)
        if begin <= index < log.ends and (at not in best or level > best[at][0]):
            best[at] = level, x, stop, op
    alive = _AliveRows(log, sorting)
    levels = {stop: alive.after(stop) for stop in sorted({stop for _, _, stop, _ in best.values()})}
    points = []
    for _, x, stop, op in (best[at] for at in sorted(best)):
        running = alive.running(op) if op is not None else {}
        moment = sorting.moment(op.origin if op is not None else _made_last(log, stop))
        points.append(CurvePoint(x, moment, {**levels[stop], **running}))
    return alive.curve(points)


class _AliveRows:
    """The rows of a curve: replays a log, and sorts what is alive into rows that stay the same over the step."""

    def __init__(self, log: StepLog, sorting: _Sorting) -> None:
        self._log = log
        self._sorting = sorting
        self._done = 0
        self._numbers: dict[tuple[_Key, bool], int] = {}  # of rows, by key and whether they are there before the step
        self._blocks: list[set[str]] = []
        self._storages: dict[int, tuple[int, int]] = {}  # row and bytes
        self._alive: dict[int, tuple[int, int]] = {}  # bytes and tensors of a row

    def after(self, stop: int) -> dict[int, tuple[int, int]]:
        """Return bytes and number of tensors of each row after ``stop`` events, which only grow from call to call."""
        for event in self._log.events[self._done : stop]:
            if isinstance(event, Made):
                self._storages[event.storage] = self._row_of(event), 0
                self._add(event.storage, event.bytes, 1)
            elif isinstance(event, Resized):
                self._add(event.storage, event.bytes, -1 if event.is_freed else 0)
        self._done = stop
        return {row: found for row, found in self._alive.items() if found[0]}

    def running(self, op: Ran) -> dict[int, tuple[int, int]]:
        """Return bytes and number of tensors of the running op's row."""
        row = self._row_of(Made(-1, 0, op.origin), WORKSPACE)
        size = self._log.workspace_bytes(op.key)
        return {row: (size, 1)} if size else {}

    def curve(self, points: Sequence[CurvePoint]) -> Curve:
        """Return the curve with these points."""
        most = [(0, 0)] * len(self._numbers)
        for point in points:
            for row, (size, count) in point.alive.items():
                most[row] = max(most[row][0], size), max(most[row][1], count)
        rows = tuple(
            AliveRow(key.category, self._sorting.named(key.inside, blocks), key.op, key.kept_by, count, size)
            for (key, _), blocks, (size, count) in zip(self._numbers, self._blocks, most, strict=True)
        )
        return Curve(rows, tuple(points), frozenset(row for (_, before), row in self._numbers.items() if before))

    def _row_of(self, made: Made, category: str = "") -> int:
        key, block = self._sorting.key_of(made, at_peak=False)
        key = replace(key, category=category or key.category, is_choice=False)
        number = self._numbers.setdefault((key, made.origin.part == STATIC), len(self._numbers))
        if number == len(self._blocks):
            self._blocks.append(set())
        self._blocks[number].add(block)
        return number

    def _add(self, storage: int, size: int, more: int) -> None:
        row, before = self._storages[storage]
        live, count = self._alive.get(row, (0, 0))
        self._storages[storage] = row, size
        self._alive[row] = live + size - before, count + more


def _starts_step(event: Event) -> bool:
    return not isinstance(event, Resized) and event.origin.part != STATIC
