"""The picture of a plan: recompute time over peak memory; needs the ``tools`` extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sac.commands.picture import COLOURS, MIB, save_figure
from sac.extras import import_extra
from sac.planner.planner import Point
from sac.planner.plans import Plan
from sac.planner.written import seconds_text
from sac.policy.sizes import bytes_text

_BLACK, _RED, _BLUE, *_OTHERS = COLOURS
_MARKERS = "ovsD^"


def save_plan_picture(made: Plan, title: str, path: str | Path) -> Path:
    """Draw the curve, the baselines, the plan and the budget and save it, by the ending of ``path`` (png, svg, pdf)."""
    import_extra("matplotlib", "tools").use("agg")
    pyplot = import_extra("matplotlib.pyplot", "tools")
    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    curve = sorted({(point.peak, point.seconds) for point in (*made.curve, made.point)})
    axes.plot(
        [peak / MIB for peak, _ in curve],
        [seconds * 1e3 for _, seconds in curve],
        color=_BLUE, marker=".", linewidth=1.6, drawstyle="steps-post", label="plans for other budgets",
    )  # fmt: skip
    for point, marker, colour in zip(made.baselines, _MARKERS, (_BLACK, *_OTHERS), strict=False):
        _mark(axes, point, marker, colour, size=8)
    _mark(axes, made.point, "*", _RED, size=18)
    axes.axvline(made.budget / MIB, color=_RED, linestyle="--", linewidth=1, label=f"budget {bytes_text(made.budget)}")
    _describe_plan(axes, made, title)
    return save_figure(figure, path)


def _mark(axes: Any, point: Point, marker: str, colour: str, *, size: int) -> None:
    label = f"{point.label}: {bytes_text(point.peak)}, {seconds_text(point.seconds)}"
    axes.plot(
        [point.peak / MIB], [point.seconds * 1e3], marker=marker, markersize=size, color=colour,
        markeredgecolor="white", linestyle="none", label=label, zorder=3,
    )  # fmt: skip


def _describe_plan(axes: Any, made: Plan, title: str) -> None:
    axes.set_xlabel("peak of one step (MiB)")
    axes.set_ylabel(f"predicted recomputation per step on {made.device.name} (ms)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Recomputation over peak memory\n{title}", loc="left", fontsize=12)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=10)
