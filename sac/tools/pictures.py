"""Pictures: memory over a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sac.extras import import_extra
from sac.policy.read import bytes_text
from sac.tools.comparison import Comparison, ModeResult

# Eight colours that remain distinct for colour-blind readers and in grey (Okabe and Ito's order, black first for
# `none`).
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A")
MIB = 2**20


def save_picture(comparison: Comparison, path: str | Path) -> Path:
    """Draw the memory of each mode over its step and save it in the format of ``path``'s suffix (png, svg, pdf).

    Creates the folder if it is missing. Needs the ``tools`` extra.
    """
    import_extra("matplotlib", "tools").use("agg")
    pyplot, path = import_extra("matplotlib.pyplot", "tools"), Path(path)
    figure, axes = pyplot.subplots(figsize=(11, 6), layout="constrained")
    for index, row in enumerate(row for row in comparison.rows if row.memory is not None):
        _draw(axes, row, COLOURS[index % len(COLOURS)])
    _describe(axes, comparison)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
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
