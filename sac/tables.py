"""Tables as text, and how counts, FLOPs and times are written in them."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

# -- Numbers in human-readable units


def in_units(count: float, units: Sequence[str], step: int) -> str:
    """Return ``count`` in the largest of ``units`` that it reaches; each is ``step`` times the one before."""
    size, at = float(count), 0
    while abs(size) >= step and at < len(units) - 1:
        size, at = size / step, at + 1
    return f"{size:.1f} {units[at]}" if at else f"{count} {units[0]}"


def flops_text(count: float) -> str:
    """Return a count of floating-point operations in decimal units: ``3.2 GFLOP``."""
    return in_units(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"), 1000)


def time_text(milliseconds: float) -> str:
    """Return a duration: ``1.25 s``, ``12.5 ms``."""
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 1e3 else f"{milliseconds:.1f} ms"


def seconds_text(seconds: float) -> str:
    """Return a short time with three digits: ``0.0148 ms``, ``12.5 ms``, ``1.25 s``."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def parameters_text(count: int) -> str:
    """Return a number of parameters: ``1.2 B``, ``243.3 M``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def percent_text(part: float, whole: float) -> str:
    """Return a share of a whole, three digits wide: `` 37 %``; empty if the whole is 0."""
    return f"{100 * part / whole:3.0f} %".replace(" ", _FIXED) if whole > 0 else ""


def count_text(count: int, noun: str) -> str:
    """Return a count of things: ``1 call``, ``2 calls``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


# -- Tables of text

# Note [Width of a table]
#
# Whatever is not a terminal (a pipe, a file, a test) gets each row on one line, however long: `grep` and `cut` need
# whole rows, and a path that is broken in two cannot be copied. On a terminal a table gets no wider than the screen:
# columns named in `optional` are left out first, then the cells of the widest columns are wrapped. A number stays on
# one line with its unit.

_FIXED = "\u00a0"  # a space at which no cell is wrapped; printed as an ordinary one
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[A-Za-z%])")
_GAP = 3
_LEAST = 4  # characters of a column


def screen_width() -> int | None:
    """Return the columns of the terminal that stdout writes to, or None if it writes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrapped_text(lines: Iterable[str], width: int | None) -> str:
    """Return lines of prose, wrapped at spaces to ``width``; what is left of a line is indented by four spaces more."""
    if width is None:
        return "\n".join(lines)
    found = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip(" ")) + 4)
        wrapped = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        found += wrapped or [""]
    return "\n".join(found)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under ``columns``.

    ``right`` names the columns that are aligned to the right, ``optional`` those that a narrow terminal may lack, the
    first of them first.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def text(self, width: int | None = None) -> str:
        """Return the table as lines without an end of line; see Note [Width of a table] for ``width``."""
        rows = [[_BEFORE_UNIT.sub(_FIXED, cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        while width is not None and _total(widths) > width:
            if self.optional:
                return self._without(self.optional[0]).text(width)
            widest = widths.index(max(widths))
            if widths[widest] <= _LEAST:
                break
            widths[widest] -= 1
        header, *body = (self._lines(row, widths) for row in rows)
        return "\n".join([*header, " " + "─" * (_total(widths) - 1), *(line for lines in body for line in lines)])

    def _without(self, name: str) -> Table:
        place = self.columns.index(name)
        columns, *rows = (row[:place] + row[place + 1 :] for row in (self.columns, *self.rows))
        return Table(columns, tuple(rows), self.right, self.optional[1:])

    def _lines(self, row: Sequence[str], widths: Sequence[int]) -> list[str]:
        wrapped = [textwrap.wrap(cell, size, break_on_hyphens=False) for cell, size in zip(row, widths, strict=True)]
        lines = []
        for parts in zip_longest(*wrapped, fillvalue="") if any(wrapped) else [("",) * len(row)]:
            cells = [
                part.rjust(size) if name in self.right else part.ljust(size)
                for name, part, size in zip(self.columns, parts, widths, strict=True)
            ]
            lines.append(("  " + (" " * _GAP).join(cells)).replace(_FIXED, " ").rstrip())
        return lines


def _total(widths: Sequence[int]) -> int:
    return 2 + sum(widths) + _GAP * (len(widths) - 1)
