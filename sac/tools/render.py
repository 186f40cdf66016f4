"""What commands print: tables of rows, and progress on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sac.tables import Table, screen_width

PROGRESS_AFTER_S = 2.0  # what finishes sooner needs no bar
_REDRAW_S = 0.2
_BAR = 30  # characters


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows of text under ``columns``; the columns named in ``right`` are right-aligned."""
    print(Table(tuple(columns), tuple(map(tuple, rows)), tuple(right)).text(screen_width()))


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function for ``compare(progress=)``; on a terminal, a bar is drawn on stderr from two seconds on.

    If stderr is not a terminal, a line is written instead, at most one in ``PROGRESS_AFTER_S``.
    """
    shown: list[tuple[int, int, str]] = [(0, 0, "")]
    written = time.monotonic()

    def advance(done: int, total: int, label: str) -> None:
        shown[0] = (done, total, label)

    def write(done: int, total: int, label: str) -> None:
        nonlocal written
        if time.monotonic() - written > PROGRESS_AFTER_S:
            print(f"{label}: {done} of {total}" if total else label, file=sys.stderr, flush=True)
            written = time.monotonic()

    if not sys.stderr.isatty():
        yield write
        return
    ended = threading.Event()
    drawing = threading.Thread(target=_draw, args=(shown, ended), daemon=True)
    drawing.start()
    try:
        yield advance
    finally:
        ended.set()
        drawing.join()


def _draw(shown: Sequence[tuple[int, int, str]], ended: threading.Event) -> None:
    started = time.monotonic()
    if ended.wait(PROGRESS_AFTER_S):
        return
    while True:
        done, total, label = shown[0]
        passed = int(time.monotonic() - started)
        full = _BAR * done // total if total else 0
        counted = f" {done}/{total}" if total else ""
        line = f"{label[:30]:30} {'━' * full}{'─' * (_BAR - full)}{counted} {passed // 60}:{passed % 60:02}"
        print(f"\r\033[2K{line}", end="", file=sys.stderr, flush=True)
        if ended.wait(_REDRAW_S):
            print("\r\033[2K", end="", file=sys.stderr, flush=True)
            return
