"""What the numbers of `batch_table.py` say in words, held against what is said of checkpointing everywhere."""

from __future__ import annotations

from batch_rows import Result, Row, speed_at

from sac.measuring.mode_run import NONE

FREED_PERCENT, MORE_TIME_PERCENT, THROUGHPUT = 33, 25, 2  # the weakest reading of each part of the claim
CLAIM = "The classic claim is 33-38 % of memory freed for 20-25 % of time, and 2-3x throughput from the larger batch."


def verdict(results: list[Result]) -> str:
    """The claim, what is true of each of its parts, and how far a larger batch alone brings the device."""
    lines = [CLAIM]
    for mode in dict.fromkeys(row.mode for result in results for row in result.rows if row.mode != NONE):
        rows = [(result.case, row) for result in results for row in result.rows if row.mode == mode]
        freed = _each((case, f"{row.freed_percent:.0f} %") for case, row in rows)
        time = _each((case, f"{100 * (row.step_to_none - 1):+.0f} %") for case, row in rows)
        speed = _each((case, _times(row)) for case, row in rows)
        lines.append(f"{mode}: memory freed {freed}; time {time}; throughput at the largest batch {speed}.")
        lines.append(f"    Of the claim, {_holds([row for _, row in rows])}.")
    lines += [_of_a_larger_batch(result) for result in results if result.batch > 1]
    return "\n".join(lines)


def _each(pairs: object) -> str:
    return ", ".join(f"{case} {text}" for case, text in pairs)  # type: ignore[attr-defined]


def _times(row: Row) -> str:
    return "unknown" if row.tokens_to_none is None else f"{row.tokens_to_none:.2f}x"


def _holds(rows: list[Row]) -> str:
    """Which parts of the claim are true of every row."""
    parts = {
        "the memory": all(row.freed_percent >= FREED_PERCENT for row in rows),
        "the time": all(100 * (row.step_to_none - 1) <= MORE_TIME_PERCENT for row in rows),
        "the throughput": all((row.tokens_to_none or 0) >= THROUGHPUT for row in rows),
    }
    return ", ".join(f"{part} {'holds' if holds else 'does not hold'}" for part, holds in parts.items())


def _of_a_larger_batch(result: Result) -> str:
    one, most = speed_at(result, NONE, 1), speed_at(result, NONE, result.batch)
    assert one is not None, "a batch of 1 is always timed"
    assert most is not None, "so is the one that all modes run"
    return (
        f"A larger batch alone, {result.case} without checkpointing: {one:.0f} tokens/s at batch 1, {most:.0f} at "
        f"{result.batch} ({most / one:.2f}x)."
    )
