"""Text that scripts put into pages, between two comments: ``<!-- NAME -->`` and ``<!-- /NAME -->``."""

from __future__ import annotations

import re
from pathlib import Path


def text_between(path: Path, name: str) -> str:
    """Return the text between the comments of this name. Raises ``ValueError`` if there are none."""
    return _between(path, name)[2].removesuffix("\n")


def write_between(path: Path, name: str, text: str) -> None:
    """Put ``text``, on lines of its own, between the comments of this name. Raises ``ValueError`` if there are none."""
    before, start, _, after = _between(path, name)
    path.write_text(f"{before}{start}{text}\n{after}", encoding="utf-8")


def _between(path: Path, name: str) -> tuple[str, str, str, str]:
    """Return a page in parts: before the first comment, that comment, the text, and the rest."""
    found = re.fullmatch(f"(.*?)(<!-- {name} -->\n)(.*?)(<!-- /{name} -->.*)", path.read_text("utf-8"), re.DOTALL)
    if found is None:
        raise ValueError(f"{path} has no <!-- {name} --> … <!-- /{name} -->")
    return found[1], found[2], found[3], found[4]
