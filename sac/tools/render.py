"""Progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROGRESS_AFTER_S = 2.0  # what finishes sooner shows nothing


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function for ``compare(progress=)`` that writes what runs now: at most one line in two seconds.

    A terminal shows one line, which changes with each call after the first two seconds.
    """
    written, is_terminal, shown = time.monotonic(), sys.stderr.isatty(), False

    def write(done: int, total: int, label: str) -> None:
        nonlocal written, shown
        if time.monotonic() - written <= PROGRESS_AFTER_S and not shown:
            return
        line = f"{label}: {done} of {total}" if total else label
        print(f"\r\033[2K{line}" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)
        written, shown = time.monotonic(), is_terminal

    try:
        yield write
    finally:
        if shown:
            print("\r\033[2K", end="", file=sys.stderr, flush=True)
