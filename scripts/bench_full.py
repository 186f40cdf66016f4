#!/usr/bin/env python3
"""The overhead of full recomputation over the recomputation itself: each way on the same layers, in one run.

    .venv/bin/python scripts/bench_full.py            both cases, about two minutes
    .venv/bin/python scripts/bench_full.py --quick    a few rounds of small cases: that it works, not how fast it is
    .venv/bin/python scripts/bench_full.py --ranks 2  in two processes, with the input scattered as one more way

The ways take turns, one step each, and begin with another one in every round. All numbers are medians of CPU time on
one thread, which other programs do not disturb; a ratio is the median of the ratios in single rounds, to the way of
torch's that does the same: non-reentrant or reentrant. Before anything is timed, each way's gradients are compared with
those of the plain layers, bit for bit, and the FLOPs of its matrix products are counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_terminal import Progress, environment, print_table, shown_progress
from full_ways import SCATTERED, WAYS, Case, Row, measure

from tests.support.ranks import run_ranks

SMALL = Case("small", layers=8, d=32, heads=4, batch=2, seq=8, rounds=200, warm_up=10)
LAYER = Case("layer", layers=1, d=1024, heads=16, batch=2, seq=256, rounds=10, warm_up=2)
FULL_RUN = (SMALL, LAYER)
QUICK_RUN = (replace(SMALL, rounds=5, warm_up=2), replace(LAYER, d=128, heads=4, seq=64, rounds=2))
RANKS_LIMIT_SECONDS = 1800.0

COLUMNS = ("way", "forward", "quartiles", "− none", "÷ torch", "step", "÷ torch", "recomputed", "gradients equal")


def measure_all(cases: list[Case], ranks: int, progress: Progress) -> list[tuple[Case, list[Row]]]:
    """Every case in turn; with several ranks the figures are those of the first."""
    ways = [way for way in WAYS if way != SCATTERED or ranks > 1]
    total = sum(len(ways) + case.rounds for case in cases)
    done = 0

    def advance(label: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, label)

    if ranks > 1:
        return [(case, run_ranks(ranks, measure, case, ways, timeout=RANKS_LIMIT_SECONDS)[0]) for case in cases]
    return [(case, measure(case, ways, advance)) for case in cases]


def cells(row: Row) -> list[str]:
    low, high = row.forward_quartiles_us
    return [
        row.way,
        f"{row.forward_us:.0f} us",
        f"{low:.0f}–{high:.0f}",
        f"{row.region_us:.0f} us",
        f"{row.forward_to_torch:.2f}",
        f"{row.step_us:.0f} us",
        f"{row.step_to_torch:.2f}",
        f"{row.recomputed_percent:.1f} %",
        "yes" if row.gradients_equal else "NO",
    ]


def print_results(results: list[tuple[Case, list[Row]]], ranks: int, seen: dict[str, Any]) -> None:
    print(f"$ {seen['command']}")
    for case, rows in results:
        where = f", {ranks} ranks over gloo" if ranks > 1 else ""
        print(f"\n{case.key}: {case.label}, one thread, CPU time, {case.rounds} rounds{where}")
        print_table(COLUMNS, [cells(row) for row in rows])
    print(
        "\nforward, step: of one layer, medians. − none: what the forward costs more for being a region. ÷ torch: the\n"
        "way of torch's in the same mode, median of the ratios in single rounds. recomputed: FLOPs of matrix products\n"
        "that a step runs more than without checkpointing, in percent of a forward's.\n"
        f"torch {seen['torch']}, Python {seen['python']}, {seen['cores']} cores of {seen['cpu']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds of small cases")
    parser.add_argument("--case", choices=[case.key for case in FULL_RUN], help="only this case")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--ranks", type=int, default=1, help="processes; from 2 on inputs are scattered over them too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args()
    for option in ("rounds", "ranks"):
        number = getattr(given, option)
        if number is not None and number < 1:
            parser.error(f"--{option} is {number}; at least 1 is needed")
    chosen = QUICK_RUN if given.quick else FULL_RUN
    cases = [replace(case, rounds=given.rounds or case.rounds) for case in chosen if given.case in (None, case.key)]
    with shown_progress(quiet=given.json) as progress:
        results = measure_all(cases, given.ranks, progress)
    seen = {**environment("bench_full.py"), "ranks": given.ranks}
    if given.json:
        found = [
            {"case": case.key, "label": case.label, "rows": [asdict(row) for row in rows]} for case, rows in results
        ]
        print(json.dumps({**seen, "cases": found}, indent=2))
    else:
        print_results(results, given.ranks, seen)
    return 0 if all(row.gradients_equal for _, rows in results for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
