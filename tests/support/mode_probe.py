"""Notes from inside a region whether a dispatch mode is on there.

In a file of its own: a list that grows, held by a region's own file, would make the region another one each time.
"""

from __future__ import annotations

from torch.utils._python_dispatch import _get_current_dispatch_mode

SEEN: list[bool] = []


def note_mode() -> None:
    """Add to `SEEN` whether a dispatch mode is on."""
    SEEN.append(_get_current_dispatch_mode() is not None)
