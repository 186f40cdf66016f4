"""What would change if one op were decided otherwise: time of recomputation against bytes kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from sac.engine.entry import RegionGroup
from sac.errors import PlanError
from sac.ops.registry import short_name
from sac.planner.cost import FREE, PRIORS, op_class, roofline
from sac.planner.devices import DEVICES, Device, device_at_hand
from sac.planner.profile import Entry
from sac.policy.read import bytes_text
from sac.recompute.op_trace import OpTraceRow
from sac.tables import flops_text, seconds_text

SHOWN = 3


@dataclass(frozen=True, slots=True)
class Alternative:
    """The other decision for one op of a region group, and its effect on one step, over all regions of the group.

    ``decision`` is the other one. ``seconds`` is the least time that backward gains (``save``) or loses
    (``recompute``), as the device's figures predict it, or None if the planner has none; ``flops`` those of the op, and
    ``bytes`` the most that it would hold or free.
    """

    region: str
    module: str
    op: str
    call: int
    decision: str
    seconds: float | None
    flops: int
    bytes: int

    def __str__(self) -> str:
        op = short_name(self.op)
        where = f"{self.module} {op}" if self.module else op
        number = f", call {self.call}" if self.call else ""
        cost = flops_text(self.flops) if self.flops else "its time"
        if self.seconds is not None:
            cost = f"{seconds_text(self.seconds)} ({cost})" if self.flops else seconds_text(self.seconds)
        if self.decision == "save":
            return f"saving {where}{number} in {self.region} would spare {cost} for {bytes_text(self.bytes)}"
        return f"recomputing {where}{number} in {self.region} would free {bytes_text(self.bytes)} for {cost}"


def alternatives(
    groups: Iterable[tuple[RegionGroup, str, int]], device: Device | None, limit: int = SHOWN
) -> tuple[Alternative, ...]:
    """Return the ``limit`` alternatives that change the most time; ``groups``: each with its label and region count.

    ``device`` is None if the planner has no figures for it: then they are those that would change the most time on
    ``STAND_IN``, without times. Only ops that the user can decide on are considered: no routing ops, no views, and of
    recomputed ops only those that run again in backward.
    """
    priced = [
        (seconds, one)
        for group, label, count in groups
        for seconds, one in _of_group(group, label, count, device or STAND_IN)
    ]
    priced.sort(key=lambda found: (-found[0], found[1].region, found[1].module, found[1].op, found[1].call))
    return tuple(one if device is None else replace(one, seconds=seconds) for seconds, one in priced[:limit])


STAND_IN = DEVICES["a100"]


def figures_at_hand(model: nn.Module) -> Device | None:
    """Return the figures of the device that holds the parameters of ``model``, or None if the planner has none."""
    found = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    try:
        return device_at_hand(found)
    except PlanError:
        return None


def _of_group(group: RegionGroup, label: str, count: int, device: Device) -> Iterator[tuple[float, Alternative]]:
    if group.calls is not None:
        again, freed = group.calls
    else:  # Python runs again, up to the last tensor that backward misses
        last = max((number for number, row in enumerate(group.op_trace) if row.flops), default=0)
        again, freed = frozenset(_call(row) for row in group.op_trace[:last]), frozenset()
    for row in group.op_trace:
        if not row.bytes or not _is_open(row) or _call(row) in freed:
            continue
        if row.decision == "recompute" and _call(row) not in again:
            continue
        if row.decision != "recompute" and not row.rule:
            continue  # by default: everything is
        other = "save" if row.decision == "recompute" else "recompute"
        entry = _entry(row)
        if op_class(entry) == FREE:
            continue
        seconds = roofline(entry, device, PRIORS) * count
        flops, size = row.flops * count, row.bytes * count
        yield seconds, Alternative(label, row.module, row.op, row.call, other, None, flops, size)


def _is_open(row: OpTraceRow) -> bool:
    """Return whether a rule or the default decided, which the user can change."""
    return row.reason in ("default", f"rule {row.rule}") and not row.op.startswith("module ")


def _call(row: OpTraceRow) -> tuple[str, str, int]:
    return row.module, row.op, row.call


def _entry(row: OpTraceRow) -> Entry:
    """Return the row as the planner prices it; its reads are not known, so its time is a lower bound."""
    return Entry(0, row.module, row.op, row.call, (), (), flops=row.flops, moved_bytes=row.bytes, dtype=row.dtype)
