"""Tables as text, and how counts, FLOPs and times are written in them."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# -- Numbers in human-readable units

LEGAL_BYTES = 'a whole number of bytes, or text such as "64KiB", "1MiB", "1.5GB"'
_SIZE = re.compile(r"([0-9]+\.?[0-9]*(?:e[0-9]{1,2})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def in_units(count: float, units: Sequence[str], step: int) -> str:
    """Return ``count`` in the largest of ``units`` that it reaches; each is ``step`` times the one before."""
    size, at = float(count), 0
    while abs(size) >= step and at < len(units) - 1:
        size, at = size / step, at + 1
    return f"{size:.1f} {units[at]}" if at else f"{count} {units[0]}"


def parse_bytes(text: str) -> int:
    """Return ``text`` as bytes: a number, followed by nothing, ``B``, ``kB`` … ``TB`` or ``KiB`` … ``TiB``.

    Units are case-insensitive, and fractions of a byte are dropped. Raises ``ValueError`` with the reason.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError("it is not a number with a unit")
    number, prefix, binary = found.groups()
    size = float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " ")
    if size >= 2**63:
        raise ValueError("it is more than 2**63 - 1 bytes")
    return int(size)


def bytes_text(count: int) -> str:
    """Return a byte count in binary units: ``1.5 MiB``."""
    return in_units(count, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


def flops_text(count: float) -> str:
    """Return a count of floating-point operations in decimal units: ``3.2 GFLOP``."""
    return in_units(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"), 1000)


def seconds_text(seconds: float) -> str:
    """Return a short time with three digits: ``0.0148 ms``, ``12.5 ms``, ``1.25 s``."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def parameters_text(count: int) -> str:
    """Return a number of parameters: ``1.2 B``, ``243.3 M``."""
    return in_units(count, ("", "k", "M", "B"), 1000).rstrip()


def percent_text(part: float, whole: float) -> str:
    """Return a share of a whole, three digits wide: `` 37 %``; empty if the whole is 0."""
    return f"{100 * part / whole:3.0f} %" if whole > 0 else ""


def count_text(count: int, noun: str) -> str:
    """Return a count of things: ``1 call``, ``2 calls``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


# -- Tables of text

# Whatever is not a terminal (a pipe, a file, a test) gets every column. On a narrow terminal a table lacks the columns
# named in `optional`. A row is one line, however long: `grep` needs whole rows, and a broken path cannot be copied.

_GAP = 3


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
        """Return the table as lines without an end of line, without optional columns that ``width`` has no room for."""
        widths = [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]
        total = 2 + sum(widths) + _GAP * (len(widths) - 1)
        if width is not None and total > width and self.optional:
            return self._without(self.optional[0]).text(width)
        header, *body = (self._line(row, widths) for row in (self.columns, *self.rows))
        return "\n".join([header, " " + "─" * (total - 1), *body])

    def _without(self, name: str) -> Table:
        place = self.columns.index(name)
        columns, *rows = (row[:place] + row[place + 1 :] for row in (self.columns, *self.rows))
        return Table(columns, tuple(rows), self.right, self.optional[1:])

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = [
            cell.rjust(size) if name in self.right else cell.ljust(size)
            for name, cell, size in zip(self.columns, row, widths, strict=True)
        ]
        return ("  " + (" " * _GAP).join(cells)).rstrip()
