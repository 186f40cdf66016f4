"""docs/troubleshooting.md: each message on it is one of ours, and each of ours that a training can meet is on it."""

from __future__ import annotations

import re

from tests.docs.messages import every_text, problem_texts
from tests.docs.pages import text_of

PAGE = "docs/troubleshooting.md"
NOT_MET = {  # about arguments, with what is legal
    "… is not a torch.nn.Module",
    "… is not known",
    "model is a …",
    # parts of others
    "recompute_granularity=… is in the config of …",
    "… and in recomputation with …",
    "… in … …: …",
    "…: …",
}


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
    assert len(messages()) > 60
    assert len(set(messages())) == len(messages())


def test_every_message_is_one_of_ours() -> None:
    texts = every_text()
    assert [message for message in messages() if not any(is_in(message, text) for text in texts)] == []


def test_every_message_that_a_training_can_meet_is_on_the_page() -> None:
    told = [message for message in messages() if parts(message)[0] != "output "]
    missing = [text for text in problem_texts() - NOT_MET if not any(is_in(message, text) for message in told)]
    assert sorted(missing) == []
