"""What every test of a policy's errors does: write the file, load it, and compare all that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from sac.errors import PolicyError
from sac.policy.load import load_policy


def assert_whole_text(text: str, lines: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading `text` from p.yaml fails with `lines`; those that do not begin with the place stand indented."""
    monkeypatch.chdir(folder)
    Path("p.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(PolicyError) as caught:
        load_policy("p.yaml")
    whole = "\n".join(line if line.startswith("p.yaml") else f"    {line}" for line in lines)
    assert str(caught.value) == whole
