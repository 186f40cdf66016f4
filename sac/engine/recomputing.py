"""Whether the current thread runs the Python of a region again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def is_recomputing() -> bool:
    """Return whether a region's Python, or an autograd Function of a replay, runs again for backward in this thread.

    For code that keeps logs or counters of its own, which would otherwise count a layer twice. Under ``torch.compile``
    no Python runs again, so it is False there.
    """
    return _depth.value > 0


@contextmanager
def recomputing() -> Iterator[None]:
    """Run the body as a recomputation."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1
