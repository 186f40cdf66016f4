"""Pictures: memory over a step, and the curve of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from sac.errors import ConfigError, Problem
from sac.extras import import_extra
from sac.planner.peak import CATEGORIES, PeakBreakdown
from sac.planner.plan_file import Plan
from sac.planner.planner import Point
from sac.policy.read import bytes_text
from sac.tables import seconds_text
from sac.tools.comparison import Comparison, ModeResult

# Eight colours that remain distinct for colour-blind readers and in grey (Okabe and Ito's order, black first for
# `none`).
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A")

# -- The picture of a comparison: memory over one step, one curve per mode; needs the ``tools`` extra

MIB = 2**20


def save_picture(comparison: Comparison, path: str | Path) -> Path:
    """Draw the memory of each mode over its step and save it in the format of ``path``'s suffix (png, svg, pdf)."""
    import_extra("matplotlib", "tools").use("agg")
    pyplot = import_extra("matplotlib.pyplot", "tools")
    rows = [row for row in comparison.rows if row.memory is not None]
    figure, axes = pyplot.subplots(figsize=(11, 6), layout="constrained")
    for index, row in enumerate(rows):
        _draw(axes, row, COLOURS[index % len(COLOURS)])
    _describe(axes, comparison)
    return save_figure(figure, path)


def save_figure(figure: Any, path: str | Path) -> Path:
    """Save a figure in the format of ``path``'s suffix and close it; create the folder if it is missing.

    Raises ``ConfigError`` if the suffix is unknown or the file cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except ValueError as error:  # matplotlib's error for an unknown suffix
        raise ConfigError(Problem(str(path), f"the picture cannot be saved: {error}")) from error
    except OSError as error:
        raise ConfigError(Problem(str(path), f"the file cannot be written: {error.strerror}")) from error
    finally:
        import_extra("matplotlib.pyplot", "tools").close(figure)
    return path


def _draw(axes: Any, row: ModeResult, colour: str) -> None:
    memory = row.memory
    assert memory is not None
    x, y = zip(*((at, live / MIB) for at, live in row.curve()), strict=True)
    label = f"{row.mode}: peak {bytes_text(memory.peak_bytes)}, kept {bytes_text(row.kept_bytes)}"
    axes.step(x, y, where="post", color=colour, linewidth=1.6, label=label)
    axes.plot([x[y.index(max(y))]], [max(y)], marker="o", markersize=7, color=colour, markeredgecolor="white", zorder=3)


def _describe(axes: Any, comparison: Comparison) -> None:
    axes.axvline(1, color="#BBBBBB", linewidth=1, zorder=0)
    axes.set_xlim(0, 2)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("memory on top of weights and gradients (MiB)")
    axes.set_title(f"Memory over forward and backward\n{comparison.model}", loc="left", fontsize=12)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=10)


# -- The picture of an explanation: what is alive over the step, stacked; needs the ``tools`` extra

# What no policy changes is grey, activations are coloured; one colour per category, in their order.
_GREYS = ("#5A5A5A", "#6E6E6E", "#8A8A8A", "#A6A6A6", "#BDBDBD")
_BRIGHT = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#EEEEEE")
_COLOUR_OF = dict(zip(CATEGORIES, (*_GREYS, *_BRIGHT), strict=True))


def save_peak_picture(found: Sequence[PeakBreakdown], title: str, path: str | Path) -> Path:
    """Draw what is alive over each step, stacked by category, and save it in the format of ``path``'s suffix."""
    import_extra("matplotlib", "tools").use("agg")
    pyplot = import_extra("matplotlib.pyplot", "tools")
    size = 11, 1.5 + 3.5 * len(found)
    figure, panels = pyplot.subplots(len(found), 1, figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axes, one in zip(panels[:, 0], found, strict=True):
        _stack(axes, one)
    panels[0, 0].set_title(f"{title}\n{panels[0, 0].get_title(loc='left')}", loc="left", fontsize=11)
    return save_figure(figure, path)


def _stack(axes: Any, found: PeakBreakdown) -> None:
    levels = found.curve.by_category()
    layers = [[size / MIB for size in sizes] for sizes in levels.values()]
    colours = [_COLOUR_OF[name] for name in levels]
    x = [point.x for point in found.curve.points]
    axes.stackplot(x, layers, labels=[*levels], colors=colours, step="post", linewidth=0)
    axes.plot([found.curve.peak.x], [found.peak_bytes / MIB], marker="v", markersize=8, color=COLOURS[0], clip_on=False)
    axes.axvline(1, color="#BBBBBB", linewidth=1)
    axes.set_xlim(0, 2)
    axes.set_ylim(bottom=0)
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("alive (MiB)")
    axes.set_title(f"{found.label}: peak {bytes_text(found.peak_bytes)}, {found.moment}", loc="left", fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


# -- The picture of a plan: recompute time over peak memory; needs the ``tools`` extra

_BLACK, _RED, _BLUE, *_OTHERS = COLOURS
_MARKERS = "ovsPD^X<"


def save_plan_picture(made: Plan, title: str, path: str | Path) -> Path:
    """Draw the curve, baselines, plan and budget, and save them in the format of ``path``'s suffix (png, svg, pdf)."""
    import_extra("matplotlib", "tools").use("agg")
    pyplot = import_extra("matplotlib.pyplot", "tools")
    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    curve = sorted({(point.peak, point.seconds) for point in (*made.curve, made.point)})
    axes.plot(
        [peak / MIB for peak, _ in curve],
        [seconds * 1e3 for _, seconds in curve],
        color=_BLUE, marker=".", linewidth=1.6, drawstyle="steps-post", label="plans for other budgets",
    )  # fmt: skip
    for point, marker, colour in zip(made.baselines, _MARKERS, cycle((_BLACK, *_OTHERS)), strict=False):
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
    axes.set_ylabel(f"predicted recomputation per step on {made.pricing.device.name} (ms)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Recomputation over peak memory\n{title}", loc="left", fontsize=12)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=10)
