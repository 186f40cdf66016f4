"""The texts of problems in the sources, with … for what differs from one to the next."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.docs.pages import ROOT

UNITS = ("blocks", "engine")  # whose errors and warnings a model or a training meets


def problem_texts() -> set[str]:
    """What `Problem`s of `UNITS` say was found, as far as the text stands where the problem is made."""
    files = [path for unit in UNITS for path in (ROOT / "sac" / unit).rglob("*.py")]
    return {text for path in files for text in _found_in(ast.parse(path.read_text(encoding="utf-8")))}


def every_text() -> set[str]:
    """Every string of the package."""
    files = (ROOT / "sac").rglob("*.py")
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {text for node in nodes if (text := _text(node)) is not None}


def _found_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = [one.value for one in node.keywords if one.arg == "found"]
            given += node.args[1:2] if name == "Problem" else node.args[:1] if name == "_problem" else []
            yield from (text for one in given if (text := _text(one)) is not None)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "found":
            sides = (node.value.body, node.value.orelse) if isinstance(node.value, ast.IfExp) else (node.value,)
            yield from (text for one in sides if (text := _text(one)) is not None)


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join("…" if isinstance(part, ast.FormattedValue) else _text(part) or "" for part in node.values)
    return None
