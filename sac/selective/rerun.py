"""The rerun engine: what one region call's recorder is, and when a kind of region needs none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from sac.region.handles import Ending, Handle
from sac.region.inputs import KeptInputs
from sac.region.parking import PackHooks, surrounding_hooks
from sac.region.storages import storage_sizes
from sac.selective.modes import ForwardMode, RecomputeMode
from sac.selective.record import CallRecord
from sac.selective.rows import Rows
from sac.selective.stats import NO_RULE, KeptFigures
from sac.selective.table import Table
from sac.selective.tensors import tensors_of
from sac.selective.whole_modules import SavedModules


class RerunRecorder:
    """Carries a table out on one region call; the ``Recorder`` that a frame talks to."""

    sees_ops = True

    def __init__(
        self,
        table: Table,
        path: str,
        owners: tuple[nn.Module, ...],
        rows: Rows | None = None,
        *,
        freeze_buffers: bool = True,
        early_stop: bool = True,
        modules: SavedModules | None = None,
        apart: frozenset[int] = frozenset(),
        verifies: bool = True,
    ) -> None:
        self.record = CallRecord(table, path, owners, freeze_buffers=freeze_buffers, modules=modules, verifies=verifies)
        self.apart = apart
        self.early_stop = early_stop
        self.rows = rows
        self.needs_mode = self.reads_values = False
        self.writes_or_draws = True  # after the forward: whether this alone needs a recorder
        self.chose_at: frozenset[str] = frozenset()  # after the forward: paths of modules in which ops chose
        self.figures: KeptFigures | None = None
        self._recompute: RecomputeMode | None = None
        self._reached = -1

    def begin(self, inputs: KeptInputs) -> None:
        """The region is about to run on ``inputs``."""
        self.record.inputs = inputs
        if self.record.modules is not None:
            self.record.modules.begin(inputs)
        # Without rules the calls of a region that have a recorder and those that have none must run the same ops again:
        # the collectives among them have to meet those of other ranks. To the end: what is kept asks for no
        # recomputation, and every rank has to run one.
        has_rules = bool(self.record.table.rules)
        self.record.keeps_persistent = has_rules and self.early_stop and surrounding_hooks() is None
        for kept in inputs.tensors:
            if isinstance(kept.data, torch.Tensor):
                self.record.labels.name_input(kept.data, kept.position, lasts=kept.stored is None)

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the mode that decides."""
        return ForwardMode(self.record, self.rows)

    def pack(self, tensor: torch.Tensor, handle: Handle) -> None:
        """See ``CallRecord.pack``."""
        if not self.record.paused:
            self.record.pack(tensor, handle)

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """See ``CallRecord.close``."""
        free = self.record.close(kept, last_missing)
        self.figures = figures_of(self.record, kept)
        self.record.decided = []
        self.writes_or_draws = self.record.writes_or_draws
        self.chose_at = frozenset(plan.path for plan in self.record.calls if plan.must_save)
        self.needs_mode, self.reads_values = self.record.needs_mode, self.record.reads_values
        return free

    def park(self, hooks: PackHooks) -> None:
        """See ``CallRecord.park``."""
        self.record.park(hooks)

    def recompute_mode(self, inputs: list[tuple[int, torch.Tensor]], ending: Ending) -> RecomputeMode:
        """Return the mode that serves."""
        self._recompute = RecomputeMode(self.record, inputs, ending)
        self._reached = ending.last_missing
        return self._recompute

    def check_recomputed(self) -> None:
        """Raise if a saved value could not be matched."""
        if self._recompute is not None:
            mode, self._recompute = self._recompute, None
            mode.check(self._reached)

    def drop(self) -> None:
        """Let every held value go."""
        self.record.drop()


def figures_of(record: CallRecord, kept: Iterable[Handle]) -> KeptFigures:
    """Count the storages that ``record`` and the handles of its region hold, each once and under its rule."""
    sizes: dict[int, tuple[int, int]] = {}  # address -> (bytes, rule)
    whole = record.table.whole_rule("") if record.table.saves_whole("") else None
    of_no_op = whole.index if whole is not None else NO_RULE
    for value in record.saved:
        rule = value.rule.index if value.rule is not None else NO_RULE
        for tensor in tensors_of(value.outputs):
            sizes.update({address: (size, rule) for address, size in storage_sizes(tensor).items()})
    calls = list(record.modules.calls.values()) if record.modules is not None else []
    for call in calls:
        sizes.update({address: (size, call.rule.index) for address, size in call.result_sizes().items()})
    for handle in kept:
        if not handle.borrowed and isinstance(handle.value, torch.Tensor):
            rule = record.rule_of.get(handle.storage, of_no_op)
            for address, size in storage_sizes(handle.value).items():
                sizes.setdefault(address, (size, rule))
    rules: defaultdict[int, int] = defaultdict(int)
    for value in record.decided:
        rules[value.rule.index if value.rule is not None else NO_RULE] += 0
    for size, rule in sizes.values():
        rules[rule] += size
    hits = dict(record.hits)
    if record.modules is not None:
        hits |= record.modules.hits
        for rule, size in record.modules.learnt.bytes_inside.items():
            rules[rule] += size
    return KeptFigures(sum(rules.values()), record.dead_bytes, dict(rules), hits)
