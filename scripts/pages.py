"""Text that scripts put into pages, between two comments: ``<!-- NAME -->`` and ``<!-- /NAME -->``."""

from __future__ import annotations

import re
from pathlib import Path


def write_between(path: Path, name: str, text: str) -> None:
    """Put ``text``, on lines of its own, between the comments of this name. Raises ``ValueError`` if there are none."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{start}\n.*?{end}", re.DOTALL)
    if not pattern.search(old):
        raise ValueError(f"{path} has no {start} … {end}")
    path.write_text(pattern.sub(lambda _: f"{start}\n{text}\n{end}", old), encoding="utf-8")
