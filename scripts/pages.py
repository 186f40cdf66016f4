"""Text that scripts put into pages, between two comments: ``<!-- NAME -->`` and ``<!-- /NAME -->``."""

from __future__ import annotations

import re
from pathlib import Path


def write_between(path: Path, name: str, text: str) -> None:
    """Put ``text``, on lines of its own, between the comments of this name. Raises ``ValueError`` if there are none."""
    page = path.read_text("utf-8")
    match = re.fullmatch(f"(.*?<!-- {name} -->\n).*?(<!-- /{name} -->.*)", page, re.DOTALL)
    if match is None:
        raise ValueError(f"{path} has no <!-- {name} --> … <!-- /{name} -->")
    path.write_text(f"{match[1]}{text}\n{match[2]}", encoding="utf-8")
