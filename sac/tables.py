"""Tables as text, and how counts, FLOPs and times are written in them."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
    """Return a share of a whole in brackets, three digits wide: ``( 37 %)``; empty if the whole is 0."""
    return f"({100 * part / whole:3.0f} %)".replace(" ", _FIXED) if whole > 0 else ""


def count_text(count: int, noun: str) -> str:
    """Return a count of things: ``1 call``, ``2 calls``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


# -- Tables of text

# Note [Width of a table]
#
# Whatever is not a terminal (a pipe, a file, a test) gets each row on one line, however long: `grep` and `cut` need
# whole rows, and a path that is broken in two cannot be copied. On a terminal a table gets no wider than the screen.
# First the gaps shrink, then columns named in `optional` are left out, then cells are wrapped, where it adds the fewest
# lines: at spaces if that is enough, otherwise also after the punctuation of paths and op names, at last anywhere. A
# number stays on one line with its unit.

_FIXED = "\u00a0"  # a space at which no cell is wrapped; printed as an ordinary one
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[A-Za-z%])")
_WORDS = re.compile(r"[^ ]+ *")
_PARTS = re.compile(r"[^ ./_\-,:]*[./_\-,:]+ *|[^ ./_\-,:]+ *| +")
_ANYWHERE = re.compile(r".", re.DOTALL)
_LEAST = 4  # characters of a column
_GAPS = (3, 2)


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
        for gap in _GAPS:
            widths = [max(map(len, cells)) for cells in self._columns()]
            if width is None or _total(widths, gap) <= width:
                return self._lines(widths, gap)
        assert width is not None
        for pattern in (_WORDS, _PARTS, _ANYWHERE):
            least = [
                _least(cells, _WORDS if name in self.right and pattern is _PARTS else pattern)
                for name, cells in zip(self.columns, self._columns(), strict=True)
            ]
            if _total(least, _GAPS[-1]) <= width:
                return self._lines(_shrunk(self._columns(), least, width), _GAPS[-1])
            if pattern is _WORDS and self.optional:
                return self._without(self.optional[0]).text(width)
        return self._lines(least, _GAPS[-1])

    def _columns(self) -> list[tuple[str, ...]]:
        rows = [tuple(_BEFORE_UNIT.sub(_FIXED, cell) for cell in row) for row in (self.columns, *self.rows)]
        return list(zip(*rows, strict=True))

    def _without(self, name: str) -> Table:
        place = self.columns.index(name)
        columns, *rows = (row[:place] + row[place + 1 :] for row in (self.columns, *self.rows))
        return Table(columns, tuple(rows), self.right, self.optional[1:])

    def _lines(self, widths: Sequence[int], gap: int) -> str:
        header, *rows = zip(*self._columns(), strict=True)
        lines = [*self._row(header, widths, gap), " " + "─" * (_total(widths, gap) - 1)]
        for row in rows:
            lines += self._row(row, widths, gap)
        return "\n".join(lines)

    def _row(self, row: Sequence[str], widths: Sequence[int], gap: int) -> list[str]:
        wrapped = [_wrapped(cell, size) for cell, size in zip(row, widths, strict=True)]
        lines = []
        for number in range(max(map(len, wrapped))):
            cells = [
                part.rjust(size) if name in self.right else part.ljust(size)
                for name, part, size in zip(
                    self.columns, (one[number] if number < len(one) else "" for one in wrapped), widths, strict=True
                )
            ]
            lines.append(_plain("  " + (" " * gap).join(cells)).rstrip())
        return lines


def _plain(cell: str) -> str:
    return cell.replace(_FIXED, " ")


def _total(widths: Sequence[int], gap: int) -> int:
    return 2 + sum(widths) + gap * (len(widths) - 1)


def _least(cells: Sequence[str], pattern: re.Pattern[str]) -> int:
    if pattern is _ANYWHERE:
        return min(_LEAST, max(map(len, cells)))
    return max((len(part.rstrip(" ")) for cell in cells for part in pattern.findall(cell)), default=0)


def _shrunk(columns: Sequence[Sequence[str]], least: Sequence[int], width: int) -> list[int]:
    """Return the widths of columns in a table that fits, each character taken where it adds the fewest lines."""
    found = [max(map(len, cells)) for cells in columns]
    heights = [[1] * len(cells) for cells in columns]
    while _total(found, _GAPS[-1]) > width:
        options = []
        for number, cells in enumerate(columns):
            if found[number] > least[number]:
                tried = [len(_wrapped(cell, found[number] - 1)) for cell in cells]
                others = [heights[other] for other in range(len(columns)) if other != number]
                lines = sum(map(max, zip(tried, *others, strict=True)))
                options.append((lines, sum(tried), -found[number], number, tried))
        *_, number, heights[number] = min(options)
        found[number] -= 1
    return [
        max(len(line) for cell in cells for line in _wrapped(cell, size))
        for cells, size in zip(columns, found, strict=True)
    ]


def _wrapped(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for part in _pieces(cell, width, (_WORDS, _PARTS, _ANYWHERE)):
        if lines[-1] and len(lines[-1] + part.rstrip(" ")) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip(" ") for line in lines]


def _pieces(text: str, width: int, patterns: Sequence[re.Pattern[str]]) -> Iterator[str]:
    """Yield the pieces of a text: words, and of a word that is too long its parts."""
    for piece in patterns[0].findall(text):
        if len(piece.rstrip(" ")) <= width or len(patterns) == 1:
            yield piece
        else:
            yield from _pieces(piece, width, patterns[1:])
