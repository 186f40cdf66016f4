#!/usr/bin/env python3
"""Memory, step time and the largest batch that fits a given memory, under each mode, on a T5 and a Llama.

    .venv/bin/python scripts/batch_table.py                      both models, about five minutes
    .venv/bin/python scripts/batch_table.py --memory 2GiB --layers 6 --case llama
    .venv/bin/python scripts/batch_table.py --modes full,selective,mine.yaml
    .venv/bin/python scripts/batch_table.py --quick              fewer layers and tokens: that it works

Memory is all of a training step with AdamW in float32: weights, gradients, the optimizer's state and activations, from
the profiler's memory events. The largest batch is run, and so is the one after it, which does not fit. Steps are
interleaved, one of each mode in turn; ratios are medians of the ratios in single rounds. With one thread time is CPU
time, which other programs do not disturb. Every mode's gradients are compared with those without checkpointing, bit for
bit; the script ends with 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from batch_rows import Result, measure, steps_of
from batch_trials import Case
from batch_verdict import verdict
from bench_rounds import threads
from bench_terminal import environment, print_table, shown_progress

from sac.errors import ConfigError, Problem, SacError
from sac.policy.read import LEGAL_BYTES, bytes_text, parse_bytes
from sac.tables import parameters_text
from sac.tools.comparison import NONE

CASES = (Case("T5", "t5-small.json", layers=2, seq=128), Case("Llama", "smollm2-135m.json", layers=4, seq=128))
MEMORY = "512MiB"
QUICK_CASES = (replace(CASES[0], layers=1, seq=64), replace(CASES[1], layers=2, seq=64))
QUICK_MEMORY = "136MiB"
MODES = f"{NONE},full,selective"


def measure_all(given: argparse.Namespace, budget_bytes: int, progress: Any) -> list[Result]:
    """Every case that was asked for, in turn."""
    cases = [replace(case, layers=given.layers or case.layers) for case in (QUICK_CASES if given.quick else CASES)]
    cases = [case for case in cases if given.case in (None, case.key.lower())]
    modes = [NONE, *dict.fromkeys(mode for mode in given.modes.split(",") if mode != NONE)]
    total = len(cases) * steps_of(modes, given.rounds)
    done = 0

    def advance(label: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, label)

    return [measure(case, modes, budget_bytes, given.rounds, given.device, advance) for case in cases]


def budget_of(text: str) -> int:
    """The bytes of --memory; raises `ConfigError` for what is no size, or more than this machine has."""
    try:
        budget = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(Problem("--memory", f'"{text}": {error}', LEGAL_BYTES)) from None
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if budget > installed:
        found = f"{bytes_text(budget)} is more than this machine has"
        raise ConfigError(Problem("--memory", found, f"at most {bytes_text(installed)}"))
    return budget


def cells(result: Result) -> list[list[str]]:
    found = []
    for row in result.rows:
        at_largest = ["–", f"{bytes_text(row.next_peak_bytes)} at 1", "–", "–"]
        if row.largest_batch:
            ratio = "–" if row.tokens_to_none is None else f"{row.tokens_to_none:.2f}"
            peak = bytes_text(row.largest_peak_bytes)
            at_largest = [str(row.largest_batch), peak, f"{row.tokens_per_s:.0f}", ratio]
        same_batch = [bytes_text(row.peak_bytes), f"{row.freed_percent:.0f} %"]
        same_batch += [f"{row.step_s:.2f} s", f"{row.step_to_none:.2f}"]
        found.append([row.mode, *same_batch, *at_largest, "yes" if row.gradients_equal else "NO"])
    return found


def columns(result: Result) -> tuple[str, ...]:
    return (
        *("mode", f"peak at {result.batch}", "freed", f"step at {result.batch}", "÷ none"),
        *("largest", "its peak", "tokens/s", "÷ none ", "gradients equal"),
    )


def print_results(results: list[Result], budget_bytes: int, given: argparse.Namespace, seen: dict[str, Any]) -> None:
    print(f"$ {seen['command']}")
    for result in results:
        held = f"weights and optimizer state {bytes_text(result.held_bytes)}, gradients"
        print(f"\n{result.case}: {result.label}, {parameters_text(result.parameters)} parameters, ", end="")
        print(f"{held} {bytes_text(result.gradient_bytes)}")
        print_table(columns(result), cells(result))
    clock = "CPU time of one thread" if seen["threads"] == 1 else f"wall time of {seen['threads']} threads"
    print(
        f"\n{verdict(results)}\n\n"
        f"peak: of a whole training step, weights, gradients and optimizer state counted. at N: in batches of N, the\n"
        f"largest without checkpointing. largest: the largest batch in {bytes_text(budget_bytes)}; it was run, and the "
        f"next one too.\n"
        f"{given.rounds} interleaved rounds, {clock}. torch {seen['torch']}, Python {seen['python']}, "
        f"{seen['cores']} cores of {seen['cpu']}, on {given.device}"
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", help=f"the budget, such as 2GiB (default {MEMORY})")
    parser.add_argument("--modes", default=MODES, help=f"config values, or files, with commas (default {MODES})")
    parser.add_argument("--case", choices=[case.key.lower() for case in CASES], help="only this model")
    parser.add_argument("--layers", type=int, help="layers of each stack")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are timed")
    parser.add_argument("--threads", type=int, default=1, help="of torch; from 2 on time is the wall's")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw memory and tokens/s against the batch")
    parser.add_argument("--quick", action="store_true", help=f"fewer layers and tokens, {QUICK_MEMORY}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args()
    for option in ("layers", "rounds", "threads"):
        number = getattr(given, option)
        if number is not None and number < 1:
            parser.error(f"--{option} is {number}; at least 1 is needed")
    given.memory = given.memory or (QUICK_MEMORY if given.quick else MEMORY)
    return given


def main() -> int:
    given = parsed()
    try:
        budget_bytes = budget_of(given.memory)
        with threads(given.threads), shown_progress(quiet=False) as progress:
            results = measure_all(given, budget_bytes, progress)
        if given.picture:
            from batch_picture import save_picture

            save_picture(results, budget_bytes, given.picture)
    except SacError as error:
        print(f"batch_table.py: {error}", file=sys.stderr)
        return 2
    seen = {**environment("batch_table.py"), "threads": given.threads, "device": given.device}
    if given.json:
        found = {**seen, "memory_bytes": budget_bytes, "cases": [asdict(result) for result in results]}
        print(json.dumps({**found, "verdict": verdict(results)}, indent=2))
    else:
        print_results(results, budget_bytes, given, seen)
    return 0 if all(row.gradients_equal for result in results for row in result.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
