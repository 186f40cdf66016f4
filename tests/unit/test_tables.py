"""Tables: as wide as their rows in a pipe, no wider than the screen on a terminal, and no text is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sac.tables import Table, percent_text, screen_width, wrapped_text

TABLE = Table(
    ("mode", "kept", "kept per block", "step"),
    (
        ("none", f"153.5 MiB {percent_text(1, 1)}", "49.0 MiB", "1.96 s ×1.00"),
        ("./some/long/policy.yaml", f"12.4 MiB {percent_text(8, 100)}", "2.0 MiB", "2.80 s ×1.43"),
    ),
    right=("kept", "kept per block", "step"),
    optional=("kept per block",),
)


def test_without_a_width_each_row_is_one_line() -> None:
    assert TABLE.text() == (
        "  mode                                 kept   kept per block           step\n"
        " ──────────────────────────────────────────────────────────────────────────\n"
        "  none                      153.5 MiB 100 %         49.0 MiB   1.96 s ×1.00\n"
        "  ./some/long/policy.yaml    12.4 MiB   8 %          2.0 MiB   2.80 s ×1.43"
    )


def test_on_a_narrow_screen_optional_columns_go_and_the_widest_cells_wrap_but_not_before_units() -> None:
    assert TABLE.text(42) == (
        "  mode                 kept           step\n"
        " ─────────────────────────────────────────\n"
        "  none            153.5 MiB   1.96 s ×1.00\n"
        "                      100 %\n"
        "  ./some/long      12.4 MiB   2.80 s ×1.43\n"
        "  /policy.yam           8 %\n"
        "  l"
    )


CELLS = st.text("ab./_ 1%(", max_size=12).map(str.strip)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=4), st.integers(24, 60))
def test_no_text_is_lost_and_no_line_is_too_long(rows: list[tuple[str, str, str]], width: int) -> None:
    table = Table(("first", "second", "third"), tuple(rows), right=("second",))
    lines = table.text(width).splitlines()
    assert max(map(len, lines)) <= width
    shown = "".join(lines[2:]) if len(lines[0].split()) == 3 else "".join(lines)
    for letter in "ab/_1%":
        assert shown.count(letter) >= sum(cell.count(letter) for row in rows for cell in row)


def test_what_is_not_a_terminal_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for is_terminal, width in ((False, None), (True, 80)):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        assert screen_width() == width


def test_prose_is_indented_where_it_goes_on() -> None:
    lines = ("  saving mlp.up_proj would spare 12 ms", "", "short")
    assert wrapped_text(lines, None) == "\n".join(lines)
    assert wrapped_text(lines, 24) == "  saving mlp.up_proj\n      would spare 12 ms\n\nshort"
