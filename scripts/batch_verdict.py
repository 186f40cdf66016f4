"""What the numbers of `batch_table.py` say in words, held against what is said of checkpointing everywhere."""

from __future__ import annotations

from batch_rows import Result, Row, speed_at

from sac.tools.comparison import NONE

FREED_PERCENT, MORE_TIME_PERCENT, THROUGHPUT = 33, 25, 2.0  # the weakest reading of each part of the claim
CLAIM = "The classic claim is 33-38 % of memory freed for 20-25 % of time, and 2-3x throughput from the larger batch."


def verdict(results: list[Result]) -> str:
    """The claim, what is true of it for each mode and model, and what a larger batch brings by itself."""
    lines = [CLAIM]
    for result in results:
        lines += [_of_a_mode(result, row) for row in result.rows if row.mode != NONE]
    lines += [_of_a_larger_batch(result) for result in results if result.batch > 1]
    return "\n".join(lines)


def _of_a_mode(result: Result, row: Row) -> str:
    freed, more_time = round(row.freed_percent), round(100 * (row.step_to_none - 1))
    holds = {"memory": freed >= FREED_PERCENT, "time": more_time <= MORE_TIME_PERCENT}
    throughput = ""
    if row.tokens_to_none is not None:
        larger = row.largest_batch / result.batch
        throughput = f"; {larger:.1f}x the batch, {row.tokens_to_none:.2f}x the throughput"
        holds["throughput"] = round(row.tokens_to_none, 2) >= THROUGHPUT
    said = ", ".join(f"{part} {'yes' if true else 'no'}" for part, true in holds.items())
    cost = f"{result.case}, {row.mode}: {freed} % of memory freed for {more_time} % more time"
    return f"{cost}{throughput}. The claim: {said}."


def _of_a_larger_batch(result: Result) -> str:
    one, most = speed_at(result, NONE, 1), speed_at(result, NONE, result.batch)
    assert one is not None, "a batch of 1 is always timed"
    assert most is not None, "so is the one that all modes run"
    gains = [f"none {most / one:.2f}x from 1 to {result.batch}"]
    for row in result.rows:
        before, after = speed_at(result, row.mode, result.batch), speed_at(result, row.mode, row.largest_batch)
        if before and after and row.largest_batch > result.batch:
            gains.append(f"{row.mode} {after / before:.2f}x from {result.batch} to {row.largest_batch}")
    return f"Throughput that a larger batch brings by itself, {result.case}: {', '.join(gains)}."
