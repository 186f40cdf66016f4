"""The sweep's rows as a table for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .checking import CANNOT_BUILD, FAILS, NOT_TRAINABLE, PASSES, Row

COLUMNS = ("family", "model", "blocks", "kept: full", "selective", "FLOPs: full", "selective", "result")
ORDER = (PASSES, FAILS, NOT_TRAINABLE, CANNOT_BUILD)
LONGEST = 220


def counts_text(rows: Iterable[Row]) -> str:
    """Return how many families there are of each result, in one line."""
    counts = Counter(row.status for row in rows)
    return f"{counts.total()} families: " + ", ".join(f"{counts[status]} {_plural(status)}" for status in ORDER)


def _plural(status: str) -> str:
    return {PASSES: "pass", FAILS: "FAIL"}.get(status, status)


def cells(row: Row) -> list[str]:
    """Return a row as text; bytes and FLOPs as shares of those without checkpointing."""
    result = row.status if row.status == PASSES else f"{row.status}: {_short(row.reason)}"
    return [
        row.family,
        row.model,
        str(sum(row.blocks.values())) if row.blocks else "",
        *(_share(row.kept_bytes, mode) for mode in ("full", "selective")),
        *(_share(row.flops, mode) for mode in ("full", "selective")),
        result,
    ]


def _share(numbers: dict[str, int], mode: str) -> str:
    return f"{100 * numbers[mode] / numbers['none']:.0f} %" if mode in numbers and numbers.get("none") else ""


def _short(reason: str) -> str:
    first = reason.partition("\n")[0]
    return first if len(first) <= LONGEST else first[: LONGEST - 1] + "…"


def print_table(rows: Sequence[Row]) -> None:
    """Print the counts and one line for each family."""
    from sac.tools.render import print_rows

    print(counts_text(rows))
    print_rows(COLUMNS, [cells(row) for row in rows], right=COLUMNS[2:7])
