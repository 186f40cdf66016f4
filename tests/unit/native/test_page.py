"""The lines in docs/native.md are those that `status` can return."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from sac.native import load
from tests.docs.pages import rows

LINES = [cells[0].strip("` ") for cells in rows("docs/native.md", "line")]


def strings() -> str:
    """All strings of the folder, in Python and in C++, without what is filled in."""
    folder = Path(load.__file__).parent
    nodes = (node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for path in folder.glob("csrc/*"):
        found += re.findall(r'"([^"\n]*)"', path.read_text(encoding="utf-8"))
    return "\n".join([*found, "SAC_NATIVE=0"])


@pytest.mark.parametrize("line", LINES)
def test_line(line: str) -> None:
    state, reason = line.split(", ", 1)
    assert state in ("native: on", "native: off")
    parts = [part for part in reason.removesuffix(" (run `sac build`)").split("…") if part.strip(" ()")]
    assert parts
    assert [part for part in parts if part.strip() not in strings()] == []
