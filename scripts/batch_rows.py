"""The rows of `batch_table.py`: one case measured under every mode, and what the numbers say in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from batch_search import Fit, largest_batch
from batch_trials import Case, Trials, interleaved

from sac.errors import ConfigError, Problem
from sac.policy.read import bytes_text
from sac.tools.comparison import NONE

COMPARED_BATCH = 2  # whose gradients are compared


@dataclass(frozen=True, slots=True)
class Row:
    """One mode. `peak_bytes` and `step_s` are at the batch that all modes ran; ratios are medians of single rounds.

    `largest_batch` is 0 where not even a batch of 1 fits; then nothing was run at it. `next_peak_bytes` is the peak of
    the batch after it, which was run too.
    """

    mode: str
    gradients_equal: bool
    peak_bytes: int
    freed_percent: float
    step_s: float
    step_to_none: float
    largest_batch: int
    largest_peak_bytes: int
    next_peak_bytes: int
    tokens_per_s: float
    tokens_to_none: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """One batch of one mode that was run; `tokens_per_s` is None where only memory was measured."""

    mode: str
    batch: int
    peak_bytes: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """All rows of one case; `batch` is the one that all modes ran, the largest of `none`."""

    case: str
    label: str
    parameters: int
    held_bytes: int
    gradient_bytes: int
    batch: int
    rows: tuple[Row, ...]
    points: tuple[Point, ...]


def steps_of(modes: list[str], rounds: int) -> int:
    """How often `measure` calls `advance`."""
    return 2 * len(modes) + 3 * rounds


def measure(
    case: Case, modes: list[str], budget_bytes: int, rounds: int, device: str, advance: Callable[[str], None]
) -> Result:
    """Find every mode's largest batch in the budget, then time all modes at one batch and each at its own.

    Raises `ConfigError` when no mode fits a batch of 1.
    """
    trials = Trials(case, modes, device)
    _refuse_below(trials.held_bytes + trials.gradient_bytes, case, budget_bytes)
    fits = {}
    for mode in trials.models:
        advance(f"{case.key}: largest batch of {mode}")
        fits[mode] = largest_batch(partial(trials.peak_bytes, mode), budget_bytes)
    _refuse_if_nothing_fits(fits, case, budget_bytes)
    reference = trials.gradients(NONE, COMPARED_BATCH)
    equal = {}
    batch = max(1, fits[NONE].batch)  # what the budget holds without checkpointing
    for mode, fit in fits.items():
        advance(f"{case.key}: {mode} at batch {batch}")
        equal[mode] = all(map(_same, trials.gradients(mode, COMPARED_BATCH), reference))
        fit.peaks.setdefault(batch, 0)
        fit.peaks[batch] = fit.peaks[batch] or trials.peak_bytes(mode, batch)

    def timed(batches: dict[str, int]) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {mode: [] for mode in batches}
        for found in interleaved(trials, batches, rounds):
            advance(f"{case.key}: time")
            for mode, second in found.items():
                seconds[mode].append(second)
        return seconds

    one, common = timed(dict.fromkeys(fits, 1)), timed(dict.fromkeys(fits, batch))
    ends = timed({mode: fit.batch for mode, fit in fits.items() if fit.batch})
    rows = tuple(_row(mode, fits, batch, equal[mode], common, ends, case.seq) for mode in fits)
    points = []
    for mode, fit in fits.items():
        speeds = {size: _tokens_per_s(size, case.seq, seconds[mode]) for size, seconds in ((1, one), (batch, common))}
        if mode in ends:
            speeds[fit.batch] = _tokens_per_s(fit.batch, case.seq, ends[mode])
        points += [Point(mode, size, peak, speeds.get(size)) for size, peak in sorted(fit.peaks.items())]
    parameters = sum(parameter.numel() for parameter in trials.parameters)
    held, gradients = trials.held_bytes, trials.gradient_bytes
    return Result(case.key, case.label, parameters, held, gradients, batch, rows, tuple(points))


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


def _refuse_below(minimum: int, case: Case, budget_bytes: int) -> None:
    if budget_bytes < minimum:
        found = f"{bytes_text(budget_bytes)} is less than weights, gradients and optimizer state of {case.key} take"
        raise ConfigError(Problem("--memory", found, f"more than {bytes_text(minimum)}"))


def _refuse_if_nothing_fits(fits: dict[str, Fit], case: Case, budget_bytes: int) -> None:
    if not any(fit.batch for fit in fits.values()):
        least = min(fits, key=lambda mode: fits[mode].peaks[1])
        found = f"{bytes_text(budget_bytes)} holds no batch of 1 of {case.key} in any mode"
        needed = f"at least {bytes_text(fits[least].peaks[1])}, which is what {least} takes"
        raise ConfigError(Problem("--memory", found, needed))


def _row(
    mode: str,
    fits: dict[str, Fit],
    batch: int,
    gradients_equal: bool,
    common: dict[str, list[float]],
    ends: dict[str, list[float]],
    seq: int,
) -> Row:
    fit, plain = fits[mode], fits[NONE]
    tokens = [fit.batch * seq / second for second in ends.get(mode, ())]
    tokens_of_none = [plain.batch * seq / second for second in ends.get(NONE, ())]
    return Row(
        mode,
        gradients_equal,
        peak_bytes=fit.peaks[batch],
        freed_percent=100 * (1 - fit.peaks[batch] / plain.peaks[batch]),
        step_s=median(common[mode]),
        step_to_none=_ratio(common[mode], common[NONE]),
        largest_batch=fit.batch,
        largest_peak_bytes=fit.peaks.get(fit.batch, 0),
        next_peak_bytes=fit.peaks[fit.batch + 1],
        tokens_per_s=median(tokens) if tokens else 0.0,
        tokens_to_none=_ratio(tokens, tokens_of_none) if tokens and tokens_of_none else None,
    )


def _ratio(left: list[float], right: list[float]) -> float:
    return median(mine / theirs for mine, theirs in zip(left, right, strict=True))


def _tokens_per_s(batch: int, seq: int, seconds: list[float]) -> float:
    return batch * seq / median(seconds)


def speed_at(result: Result, mode: str, batch: int) -> float | None:
    """Tokens per second of one mode at one batch; None where it was not timed."""
    found = (point.tokens_per_s for point in result.points if (point.mode, point.batch) == (mode, batch))
    return next(found, None)
