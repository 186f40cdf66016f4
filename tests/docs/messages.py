"""The strings of the sources, with … for what differs from one to the next."""

from __future__ import annotations

import ast

from tests.docs.pages import ROOT


def every_text() -> set[str]:
    """Every string of the package."""
    files = (ROOT / "sac").rglob("*.py")
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {text for node in nodes if (text := _text(node)) is not None}


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join("…" if isinstance(part, ast.FormattedValue) else _text(part) or "" for part in node.values)
    return None
