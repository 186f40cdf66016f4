"""The picture of `batch_table.py`: peak memory and throughput against the batch, one curve per mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batch_rows import Point, Result

from sac.extras import import_extra
from sac.tools.pictures import COLOURS

_MIB = 2**20


def save_picture(results: list[Result], budget_bytes: int, path: Path) -> None:
    """Draw one row of two plots per case and save it, by the ending of `path` (png, svg, pdf)."""
    import_extra("matplotlib", "tools").use("agg")
    pyplot = import_extra("matplotlib.pyplot", "tools")
    size = (11, 4 * len(results))
    figure, grid = pyplot.subplots(len(results), 2, figsize=size, layout="constrained", squeeze=False)
    for (memory, speed), result in zip(grid, results, strict=True):
        for index, row in enumerate(result.rows):
            points = [point for point in result.points if point.mode == row.mode]
            _draw(memory, speed, points, row.mode, COLOURS[index % len(COLOURS)])
        memory.axhline(budget_bytes / _MIB, color="#8A8A8A", linestyle="--", linewidth=1)
        memory.set_title(f"{result.case}: peak memory (MiB), the budget dashed", loc="left", fontsize=11)
        speed.set_title(f"{result.case}: tokens/s", loc="left", fontsize=11)
        for axes in (memory, speed):
            _describe(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw(memory: Any, speed: Any, points: list[Point], label: str, colour: str) -> None:
    memory.plot([p.batch for p in points], [p.peak_bytes / _MIB for p in points], marker="o", color=colour, label=label)
    timed = [(p.batch, p.tokens_per_s) for p in points if p.tokens_per_s is not None]
    speed.plot(*zip(*timed, strict=True), marker="o", color=colour, label=label)


def _describe(axes: Any) -> None:
    axes.set_xlabel("batch (rows)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
