"""docs/troubleshooting.md: each message on it is one of ours."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import ROOT, text_of


def every_text() -> list[str]:
    """Every string of the package, with … for what differs from one to the next."""
    files = (ROOT / "sac").rglob("*.py")
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [text for node in nodes if (text := _text(node)) is not None]


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join("…" if isinstance(part, ast.FormattedValue) else _text(part) or "" for part in node.values)
    return None


def messages() -> list[str]:
    """The texts in headings and in the first cells of tables, in code."""
    text = text_of("docs/troubleshooting.md")
    found = re.findall(r"^### `(.+)`$", text, flags=re.MULTILINE)
    cells = re.findall(r"^\| (?:`` (.+?) ``|`([^`]+)`) \|", text, flags=re.MULTILINE)
    return found + [double or single for double, single in cells]


def test_every_message_is_one_of_ours() -> None:
    """Its parts between … stand in a string of the package, in order."""
    texts, told = every_text(), messages()
    patterns = {one: ".*".join(re.escape(part) for part in one.split("…") if part.strip()) for one in told}
    assert len(patterns) == len(told) > 15
    wrong = [one for one in told if not any(re.search(patterns[one], text, flags=re.DOTALL) for text in texts)]
    assert wrong == []
