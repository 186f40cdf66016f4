"""The decisions that a model's regions took, op by op."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from sac.blocks.wrap import regions_of
from sac.selective.kind import Kind, Region


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """What was decided for one op of one region kind.

    ``region`` names the regions of the kind (``model.layers.0-31 (x32)``), ``module`` is relative to the region,
    ``call`` counts the op's uses in that module from 0, ``bytes`` are those of its result, ``flops`` by torch's
    formulas (0: none known).
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
    """Return the decisions of each region kind that has run on ``model``, in the order of the forward."""
    rows = []
    for kind, regions in regions_by_kind(model):
        label = group_label([region.path for region in regions])
        for row in kind.rows:
            rows.append(
                DecisionRow(
                    label, row.module, row.op, row.call, row.rule, row.decision, row.bytes, row.flops, row.reason
                )
            )
    return tuple(rows)


def regions_by_kind(model: nn.Module) -> list[tuple[Kind, list[Region]]]:
    """Return the region kinds on a model, each with its regions, in module order."""
    groups: dict[int, tuple[Kind, list[Region]]] = {}
    for region in (forward.region for forward in regions_of(model)):
        groups.setdefault(id(region.kind), (region.kind, []))[1].append(region)
    return list(groups.values())


def group_label(paths: Iterable[str]) -> str:
    """Return one name for paths that differ in one number: ``model.layers.0-31 (x32)``, ``model.layers.0,2,4 (x3)``."""
    paths = list(paths)
    if len(paths) == 1:
        return paths[0] or "(model)"
    split = [path.split(".") for path in paths]
    places = [place for place in range(len(split[0])) if len({part[place] for part in split if place < len(part)}) > 1]
    same_length = len({len(part) for part in split}) == 1
    if not same_length or len(places) != 1 or not all(part[places[0]].isdigit() for part in split):
        return f"{paths[0]}, … (x{len(paths)})"
    numbers = sorted(int(part[places[0]]) for part in split)
    joined = [*split[0]]
    joined[places[0]] = _ranges(numbers)
    return f"{'.'.join(joined)} (x{len(paths)})"


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
