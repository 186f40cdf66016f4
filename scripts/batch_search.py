"""The largest batch whose measured peak memory stays within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

GROWTH = 4  # a batch is at most this many times one that was seen to fit


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest batch that fits, 0 if none does; `peaks` has the bytes of every batch that was run, both ends too."""

    batch: int
    peaks: dict[int, int]


def largest_batch(peak_bytes: Callable[[int], int], budget_bytes: int) -> Fit:
    """Run batches until one is seen to fit and the next one is seen not to.

    Peak memory is the largest of several straight lines in the batch (forward, backward, optimizer): a chord lies above
    it and its continuation below. So a guess between two batches that were run fits, and one beyond them may not.
    `peak_bytes` must grow with the batch at some point.
    """
    peaks = {1: peak_bytes(1)}
    if peaks[1] > budget_bytes:
        return Fit(0, peaks)
    while True:
        fits = max(batch for batch, peak in peaks.items() if peak <= budget_bytes)
        over = min((batch for batch, peak in peaks.items() if peak > budget_bytes), default=None)
        if over == fits + 1:
            return Fit(fits, dict(sorted(peaks.items())))
        guess = _guess(peaks, fits, over, budget_bytes)
        peaks[guess] = peak_bytes(guess)


def _guess(peaks: dict[int, int], fits: int, over: int | None, budget_bytes: int) -> int:
    """The batch to run next: where a line through two that were run meets the budget, and always a new one."""
    below = max((batch for batch in peaks if batch < fits), default=None)
    other = over if over is not None else below
    highest = fits * GROWTH if over is None else over - 1
    if other is None:
        return fits + 1
    slope = (peaks[fits] - peaks[other]) / (fits - other)
    if slope <= 0:
        return highest
    return max(fits + 1, min(highest, fits + int((budget_bytes - peaks[fits]) / slope)))
