"""Tables: as wide as their rows; on a narrow terminal without optional columns."""

from __future__ import annotations

import pytest

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


def test_on_a_narrow_screen_optional_columns_go() -> None:
    assert TABLE.text(60) == (
        "  mode                                 kept           step\n"
        " ─────────────────────────────────────────────────────────\n"
        "  none                      153.5 MiB 100 %   1.96 s ×1.00\n"
        "  ./some/long/policy.yaml    12.4 MiB   8 %   2.80 s ×1.43"
    )


def test_what_is_not_a_terminal_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for is_terminal, width in ((False, None), (True, 80)):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        assert screen_width() == width


def test_prose_is_indented_where_it_goes_on() -> None:
    lines = ("  saving mlp.up_proj would spare 12 ms", "", "short")
    assert wrapped_text(lines, None) == "\n".join(lines)
    assert wrapped_text(lines, 24) == "  saving mlp.up_proj\n      would spare 12 ms\n\nshort"
