"""Tables and progress bars of the command line, and how numbers are written in them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from typing import Any

import sac
from sac.extras import import_extra
from sac.policy.read import bytes_text
from sac.reporting import DecisionRow, decisions_of
from sac.tools.comparison import Comparison, ModeResult, forward_backward, inputs_on
from sac.tools.models import BuiltModel

# -- Numbers in human-readable units


def flops_text(count: int) -> str:
    """Return a count of floating-point operations in decimal units: ``3.2 GFLOP``."""
    size = float(count)
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP"):
        if abs(size) < 1000:
            return f"{count} FLOP" if unit == "FLOP" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TFLOP"


def time_text(milliseconds: float) -> str:
    """Return a duration: ``1.25 s``, ``12.5 ms``."""
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 1e3 else f"{milliseconds:.1f} ms"


def parameters_text(count: int) -> str:
    """Return a number of parameters: ``1.2 B``, ``243.3 M``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


# -- Tables for the terminal; needs the ``tools`` extra

PROGRESS_AFTER_S = 2.0  # what finishes sooner needs no bar
_NUMBERS = ("kept", "kept per block", "peak", "recomputed", "step", "loss", "gradient difference")


def print_comparison(comparison: Comparison) -> None:
    """Print the comparison as one table, then the measuring conditions and the errors of modes that failed."""
    table = _table("mode", *_NUMBERS)
    baseline = next((row for row in comparison.rows if not row.error), None)
    for row in comparison.rows:
        table.add_row(row.mode, *(_cells(row, baseline) if not row.error else ("failed", *[""] * 6)))
    console = _console()
    console.print(table)
    console.print(_footnote(comparison), style="dim", highlight=False, markup=False)
    for row in comparison.rows:
        if row.error:
            console.print(f"\n{row.mode}: {row.error}", style="red", highlight=False, markup=False)


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows of text under ``columns``; the columns named in ``right`` are right-aligned."""
    table = _table(*columns, right=right)
    for row in rows:
        table.add_row(*row)
    _console().print(table)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function for ``compare(progress=)``; it draws a bar on stderr once two seconds have passed.

    If stderr is not a terminal, it writes a line instead, at most one in ``PROGRESS_AFTER_S``.
    """
    rich = import_extra("rich.progress", "tools")
    columns = (
        rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn()
    )  # fmt: skip
    bar = rich.Progress(*columns, console=_console(stderr=True), transient=True)
    written = time.monotonic()
    task = bar.add_task("")

    def advance(done: int, total: int, label: str) -> None:
        nonlocal written
        is_due = time.monotonic() - written > PROGRESS_AFTER_S
        if is_due and not bar.console.is_terminal:
            print(f"{label}: {done} of {total}", file=sys.stderr, flush=True)
            written = time.monotonic()
        elif is_due and not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total, description=label)

    try:
        yield advance
    finally:
        bar.stop()


def _cells(row: ModeResult, baseline: ModeResult | None) -> tuple[str, ...]:
    region_bytes = row.typical_region_bytes
    baseline = baseline or row
    return (
        f"{bytes_text(row.kept_bytes)} {_percent(row.kept_bytes, baseline.kept_bytes)}",
        "–" if region_bytes is None else bytes_text(region_bytes),
        f"{bytes_text(row.peak_bytes)} {_percent(row.peak_bytes, baseline.peak_bytes)}",
        "?" if row.recompute_flops is None else flops_text(row.recompute_flops),
        f"{time_text(row.median_step_ms)} ×{row.median_step_ms / baseline.median_step_ms:.2f}",
        f"{row.losses[-1]:.6f}",
        "?" if row.max_gradient_difference is None else f"{row.max_gradient_difference:.3g}",
    )


def _percent(part: int, whole: int) -> str:
    return f"({100 * part / whole:3.0f} %)" if whole > 0 else ""


def _footnote(comparison: Comparison) -> str:
    return (
        f"{comparison.model}, {parameters_text(comparison.parameters)} parameters, on {comparison.device}, "
        f"torch {comparison.torch_version}.\n"
        "kept: alive at the end of forward; peak: of forward and backward; both on top of weights and gradients, from "
        f"{_source(comparison)}.\n"
        f"step: median of {comparison.steps - 1} interleaved steps; loss: after step {comparison.steps}; "
        "gradient difference: largest absolute one to none after the first backward."
    )


def _source(comparison: Comparison) -> str:
    on_cpu = comparison.device == "cpu"
    return "the profiler's memory events" if on_cpu else "the profiler's memory events and the allocator"


def _table(*columns: str, right: Sequence[str] = _NUMBERS) -> Any:
    table = import_extra("rich.table", "tools").Table(box=import_extra("rich.box", "tools").SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _console(*, stderr: bool = False) -> Any:
    console = import_extra("rich.console", "tools").Console(stderr=stderr)
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width: do not wrap numbers there
    return console


# -- The table of a trace

_TRACE_COLUMNS = ("module", "op", "call", "decision", "rule", "bytes", "FLOPs", "reason")


def print_trace(built: BuiltModel, value: str, *, device: str, as_json: bool) -> int:
    """Apply the config ``value``, run one forward and backward, and print a table per region group."""
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
    """Print one region group: its ops in forward order and totals per decision; views are only counted."""
    shown = [row for row in rows if row.bytes or row.flops or row.rule]
    print(region)
    print_rows(_TRACE_COLUMNS, [_trace_cells(row) for row in shown], right=("call", "bytes", "FLOPs"))
    for decision in dict.fromkeys(row.decision for row in shown):
        decided = [row for row in shown if row.decision == decision]
        sizes = bytes_text(sum(row.bytes for row in decided))
        print(f"  {decision}: {len(decided)} ops, {sizes}, {flops_text(sum(row.flops for row in decided))}")
    if len(shown) < len(rows):
        print(f"  not shown: {len(rows) - len(shown)} ops without their own memory; --json lists them")
    print()


def _trace_cells(row: DecisionRow) -> tuple[str, ...]:
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
