"""Rules on whole modules."""

from __future__ import annotations

from typing import Any


def whole(module: str, do: str = "save", **matchers: Any) -> dict[str, Any]:
    """A rule on whole modules."""
    return {"module": module, **matchers, "do": do}
