"""Pictures: memory over a step."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from sac.extras import import_extra
from sac.tables import bytes_text
from sac.tools.comparison import Comparison

# Okabe and Ito's colours, which remain distinct for colour-blind readers and in grey; black is first, for `none`.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A")


def save_picture(comparison: Comparison, path: str | Path) -> Path:
    """Draw the memory of each mode over its step and save it in the format of ``path``'s suffix (png, svg, pdf).

    Creates the folder if it is missing. Needs the ``tools`` extra.
    """
    figure = import_extra("matplotlib.figure", "tools").Figure(figsize=(11, 6), layout="constrained")
    axes, path = figure.subplots(), Path(path)
    for row, colour in zip((row for row in comparison.rows if not row.error), cycle(COLOURS), strict=False):
        x, y = zip(*((at, live / 2**20) for at, live in row.curve()), strict=True)
        label = f"{row.mode}: peak {bytes_text(row.peak_bytes)}, kept {bytes_text(row.kept_bytes)}"
        axes.step(x, y, where="post", color=colour, linewidth=1.6, label=label)
        axes.plot(x[y.index(max(y))], max(y), marker="o", color=colour)
    axes.axvline(1, color="#BBBBBB", linewidth=1, zorder=0)
    axes.set_xlim(0, 2)
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.set_ylabel("memory on top of weights and gradients (MiB)")
    axes.set_title(f"Memory over forward and backward\n{comparison.model}", loc="left")
    axes.grid(axis="y", color="#E5E5E5")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
