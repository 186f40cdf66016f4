"""`sac trace`: the decision for each op of a model's regions, after one forward and backward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

import sac
from sac.policy.read import bytes_text
from sac.reporting import DecisionRow, decisions_of
from sac.tools.comparison import forward_backward, inputs_on
from sac.tools.models import BuiltModel
from sac.tools.render import flops_text, print_rows

COLUMNS = ("module", "op", "call", "decision", "rule", "bytes", "FLOPs", "reason")


def print_trace(built: BuiltModel, value: str, *, device: str, as_json: bool) -> int:
    """Put the config ``value`` on the model, run one step's forward and backward, and print a table per region kind."""
    model = sac.apply(built.model.to(device), value)
    forward_backward(model, inputs_on(device, built.inputs_of_step(0)))
    rows = decisions_of(model)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print(f"{built.name} under {value}\n")
    for region, of_region in groupby(rows, key=lambda row: row.region):
        print_decisions(region, list(of_region))
    return 0


def print_decisions(region: str, rows: Sequence[DecisionRow]) -> None:
    """Print one region kind: its ops in forward order, and what was decided in sum; views are counted only."""
    shown = [row for row in rows if row.bytes or row.flops or row.rule]
    print(region)
    print_rows(COLUMNS, [_cells(row) for row in shown], right=("call", "bytes", "FLOPs"))
    for decision in dict.fromkeys(row.decision for row in shown):
        decided = [row for row in shown if row.decision == decision]
        sizes = bytes_text(sum(row.bytes for row in decided))
        print(f"  {decision}: {len(decided)} ops, {sizes}, {flops_text(sum(row.flops for row in decided))}")
    if len(shown) < len(rows):
        print(f"  not shown: {len(rows) - len(shown)} ops without memory of their own; --json has them")
    print()


def _cells(row: DecisionRow) -> tuple[str, ...]:
    return (
        row.module or "(region)",
        row.op,
        str(row.call),
        row.decision,
        row.rule or "–",
        bytes_text(row.bytes),
        flops_text(row.flops) if row.flops else "–",
        row.reason,
    )
