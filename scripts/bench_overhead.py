#!/usr/bin/env python3
"""What checkpointing itself costs: step time (forward + backward) of one block, in one run, for each way to do it.

    .venv/bin/python scripts/bench_overhead.py            all cases, about three minutes
    .venv/bin/python scripts/bench_overhead.py --quick    few rounds: that it works, not how fast it is

The ways take turns, one step each, and begin with another one in every round. A ratio is the median of the ratios in
single rounds. With one thread the clock is the process's CPU time, which other programs do not disturb; with several
it is the wall's. Before anything is timed, each way's gradients are compared with those of the plain block, bit for
bit, in its first step and after it is warm, and the matrix products that one step runs are counted: that is how much
it recomputes. scripts/bench_gpu.py does the same on blocks of a real model, on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_blocks import Case, build
from bench_rounds import (
    CPU_TIME,
    WALL_TIME,
    Counted,
    Times,
    quartiles,
    ratio,
    shared_runner,
    threads,
    time_rounds,
    warmed_up,
)
from bench_terminal import Progress, counting, environment, print_skipped, print_table, shown_progress
from overhead_ways import BASELINE, EMPTY, STOCK, TORCH_FULL, WAYS, cannot_run

SMALL = Case("small", d=32, heads=4, hidden=64, batch=2, seq=8, rounds=400, warm_up=20, threads=1)
MIXTURE = replace(SMALL, key="moe", experts=4, rounds=200)
LAYER = Case("layer", d=1024, heads=16, hidden=4096, batch=2, seq=256, rounds=10, warm_up=1)
FULL_RUN = (SMALL, MIXTURE, LAYER)
QUICK_RUN = (
    replace(SMALL, rounds=5, warm_up=2),
    replace(MIXTURE, rounds=3, warm_up=2),
    replace(LAYER, d=128, heads=4, hidden=512, seq=64, rounds=2),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One way in one case. `step_ms` is the median; ratios are medians of those in single rounds."""

    mode: str
    step_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_none: float
    ratio_to_torch_full: float
    ratio_to_stock: float
    matmuls: int
    gradients_equal: bool


@dataclass(frozen=True, slots=True)
class Result:
    """All rows of one case; `ops` are those that one plain forward dispatches."""

    case: str
    label: str
    ops: int
    threads: int
    clock: str
    rounds: int
    rows: tuple[Row, ...]


def measure(case: Case, modes: list[str], advance: Callable[[str], None]) -> Result:
    """Verify, count, warm up and time every way of one case."""
    alone = torch.get_num_threads() == 1
    blocks, x, weights = build(case)
    runners = {mode: shared_runner(mode, blocks, x, weights, CPU_TIME if alone else WALL_TIME) for mode in modes}
    counted: dict[str, Counted] = {}
    equal = {}
    reference = None
    for mode, runner in runners.items():
        advance(f"{case.key}: {mode}")
        counted[mode], gradients, equal[mode] = warmed_up(runner, case.warm_up, reference)
        reference = reference or gradients
    times = time_rounds(case, runners, advance)
    return Result(
        case=case.key,
        label=case.label,
        ops=counted[BASELINE].forward_ops,
        threads=torch.get_num_threads(),
        clock="CPU time" if alone else "wall time",
        rounds=case.rounds,
        rows=tuple(row(mode, times, counted[mode].matmuls, equal[mode]) for mode in modes),
    )


def row(mode: str, times: dict[str, list[Times]], matmuls: int, gradients_equal: bool) -> Row:
    steps_ms = [1000 * each.step for each in times[mode]]
    return Row(
        mode,
        median(steps_ms),
        quartiles(steps_ms),
        ratio(times[mode], times[BASELINE]),
        ratio(times[mode], times[TORCH_FULL]),
        ratio(times[mode], times[STOCK]),
        matmuls,
        gradients_equal,
    )


def measure_all(cases: list[Case], modes: list[str], progress: Progress) -> list[Result]:
    """Every case in turn."""
    advance = counting(progress, sum(len(modes) + case.rounds for case in cases))
    results = []
    for case in cases:
        with threads(case.threads):
            results.append(measure(case, modes, advance))
    return results


COLUMNS = ("way", "step", "quartiles", "÷ none", "÷ full", "÷ stock", "matmuls", "equal")


def cells(row: Row) -> list[str]:
    low, high = row.quartiles_ms
    ratios = [f"{each:.2f}" for each in (row.ratio_to_none, row.ratio_to_torch_full, row.ratio_to_stock)]
    equal = "yes" if row.gradients_equal else "NO"
    return [row.mode, f"{row.step_ms:.2f} ms", f"{low:.2f}–{high:.2f}", *ratios, str(row.matmuls), equal]


def print_results(results: list[Result], skipped: dict[str, str], seen: dict[str, Any]) -> None:
    print(f"$ {seen['command']}")
    for result in results:
        how = f"{result.threads} thread(s), {result.clock}, {result.rounds} rounds"
        print(f"\n{result.case}: {result.label}\n{result.ops} ops in forward; {how}")
        print_table(COLUMNS, [cells(row) for row in result.rows])
    print()
    print_skipped(skipped)
    print(
        "step: median. ÷: median of the ratios in single rounds, to no checkpointing, torch full and stock SAC.\n"
        "matmuls: matrix products that a step runs. equal: gradients, to those without checkpointing, in each bit.\n"
        "stock SAC, sac rerun, sac replay and sac.context_fn hold attention and every 2nd matmul; torch_remat and\n"
        f"sac whole module the attention module; {EMPTY}: an empty dispatch mode in both passes, nothing recomputed.\n"
        f"torch {seen['torch']}, Python {seen['python']}, {seen['cores']} cores of {seen['cpu']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds of small cases")
    parser.add_argument("--case", choices=[case.key for case in FULL_RUN], help="only this case")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args()
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}; at least 1 is needed")
    chosen = QUICK_RUN if given.quick else FULL_RUN
    cases = [replace(case, rounds=given.rounds or case.rounds) for case in chosen if given.case in (None, case.key)]
    skipped = cannot_run()
    seen = environment("bench_overhead.py")
    with shown_progress(quiet=given.json) as progress:
        results = measure_all(cases, [mode for mode in WAYS if mode not in skipped], progress)
    if given.json:
        print(json.dumps({**seen, "skipped": skipped, "cases": [asdict(result) for result in results]}, indent=2))
    else:
        print_results(results, skipped, seen)
    return 0 if all(row.gradients_equal for result in results for row in result.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
