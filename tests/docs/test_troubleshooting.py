"""docs/troubleshooting.md: each message on it is one of ours."""

from __future__ import annotations

import re

from tests.docs.messages import every_text
from tests.docs.pages import text_of

PAGE = "docs/troubleshooting.md"


def messages() -> list[str]:
    """The texts in headings and in the first cells of tables, in code."""
    text = text_of(PAGE)
    found = re.findall(r"^### `(.+)`$", text, flags=re.MULTILINE)
    cells = re.findall(r"^\| (?:`` (.+?) ``|`([^`]+)`) \|", text, flags=re.MULTILINE)
    return found + [double or single for double, single in cells]


def parts(message: str) -> list[str]:
    return [part for part in message.split("…") if part.strip()]


def is_in(message: str, text: str) -> bool:
    """Whether the parts of a message between … stand in a text, in order."""
    return re.search(".*".join(map(re.escape, parts(message))), text, flags=re.DOTALL) is not None


def test_there_are_messages() -> None:
    assert len(messages()) > 30
    assert len(set(messages())) == len(messages())


def test_every_message_is_one_of_ours() -> None:
    texts = every_text()
    assert [message for message in messages() if not any(is_in(message, text) for text in texts)] == []
