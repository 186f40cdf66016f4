"""What is alive at a peak, as tables for the terminal: `sac plan --explain`, `sac compare --explain`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sac.planner.peak import CATEGORIES, AliveRow, PeakBreakdown, short_op
from sac.policy.read import bytes_text
from sac.tables import screen_width, wrapped_text
from sac.tools.render import print_rows

_COLUMNS = ("alive at the peak", "bytes", "share", "tensors", "made by", "kept by")
_NUMBERS = ("bytes", "share", "tensors")
_MOST_ROWS = 6  # of one category
_LEAST_SHARE = 0.002  # of the peak, for a row of its own
_SMALL_CHOICE = 0.05  # of the peak: what policies decide on is not worth another policy


def print_explained(found: Sequence[PeakBreakdown], compared: Sequence[PeakBreakdown], advice: str) -> None:
    """Print what is alive at each peak of ``found``, and a table of the categories of the peaks ``compared``.

    ``advice`` is the line above what lowers the least of these peaks where no policy does.
    """
    for one in found:
        print("\n" + wrapped_text([heading(one)], screen_width()))
        print_rows(_COLUMNS, [*_lines(one)], right=_NUMBERS)
        print(wrapped_text([choice_text(one)], screen_width()))
    if len(compared) > 1:
        print_categories(compared)
    remedies = min(compared, key=lambda one: one.peak_bytes).remedies()
    if remedies:
        print(f"\n{advice}")
        for remedy in remedies:
            print(wrapped_text([f"- {remedy}"], screen_width()))


def print_categories(found: Sequence[PeakBreakdown]) -> None:
    """Print the categories of several peaks next to each other."""
    categories = {one.label: one.by_category() for one in found}
    names = [name for name in CATEGORIES if any(name in of_one for of_one in categories.values())]
    rows = [[name, *(bytes_text(of_one.get(name, 0)) for of_one in categories.values())] for name in names]
    rows.append(["together", *(bytes_text(one.peak_bytes) for one in found)])
    print()
    print_rows((_COLUMNS[0], *categories), rows, right=tuple(categories))


def heading(found: PeakBreakdown) -> str:
    """Return the line above a table: which peak it is, how high, and when."""
    return (
        f"{found.label}: peak {bytes_text(found.peak_bytes)} ({found.peak_bytes} bytes, {found.before_bytes} of them "
        f"before the step), {found.moment}"
    )


def choice_text(found: PeakBreakdown) -> str:
    """Return on how much of a peak a policy decides."""
    share = found.choice_bytes / max(1, found.peak_bytes)
    text = f"a policy decides on {bytes_text(found.choice_bytes)} ({share:.1%}) of this peak"
    return f"{text}: another policy hardly lowers it" if share < _SMALL_CHOICE else text


def _lines(found: PeakBreakdown) -> Iterator[tuple[str, ...]]:
    for category, count in found.by_category().items():
        rows = [row for row in found.rows if row.category == category]
        yield _cells(category, count, found.peak_bytes, sum(row.count for row in rows), "", "")
        if len(rows) == 1 and rows[0].where == "(model)":
            continue
        shown = [row for row in rows[:_MOST_ROWS] if abs(row.bytes) >= _LEAST_SHARE * found.peak_bytes]
        for row in shown:
            yield _cells(f"  {row.where}", row.bytes, found.peak_bytes, row.count, short_op(row.op), row.kept_by)
        rest = rows[len(shown) :]
        if shown and rest:
            yield _rest(rest, found.peak_bytes)


def _rest(rows: Sequence[AliveRow], peak: int) -> tuple[str, ...]:
    count = sum(row.count for row in rows)
    return _cells(f"  {len(rows)} smaller", sum(row.bytes for row in rows), peak, count, "", "")


def _cells(name: str, size: int, peak: int, count: int, op: str, kept_by: str) -> tuple[str, ...]:
    return name, bytes_text(size), f"{size / max(1, peak):.1%}", str(count or "–"), op, kept_by
