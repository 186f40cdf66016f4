"""Pages of the documentation as tests read them: text, snippets, tables, sections."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def pages() -> list[str]:
    """Every page of the project, by path."""
    return ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def fenced(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def snippets(page: str, language: str) -> list[str]:
    return fenced(text_of(page), language)


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the one table whose head begins so."""
    (table,) = re.findall(
        rf"^\| {re.escape(head)} \|[^\n]*\n\|[-|]+\|\n((?:\|.*\n)+)", text_of(page), flags=re.MULTILINE
    )
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]


def sections(page: str, level: int = 2) -> dict[str, str]:
    """The text under each heading of a level, up to the next of that level."""
    parts = re.split(rf"^{'#' * level} (.+)\n", text_of(page), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
