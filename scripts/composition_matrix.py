#!/usr/bin/env python3
"""Every training stack under every mode: are the gradients those without checkpointing, and what does a step cost.

    .venv/bin/python scripts/composition_matrix.py                  every stack
    .venv/bin/python scripts/composition_matrix.py --stack "FSDP2" --stack plain

Each stack trains a small model on CPU, in as many processes as it says, first without sac and then in each mode. A row
whose package is not installed says so. The script ends with 1 if a gradient differs, a stack raises, or a mode
does nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_overhead import counting, environment, print_table, progress_lines

from tests.stacks.matrix import DIFFER, Cell, Line, line_of
from tests.stacks.registry import EVERY_MODE, STACKS

COLUMNS = ("stack", "processes", *EVERY_MODE)


def cells(line: Line) -> list[str]:
    by_mode = {cell.mode: cell for cell in line.cells}
    return [line.stack, str(line.world), *(text_of(by_mode[mode]) if mode in by_mode else "–" for mode in EVERY_MODE)]


def text_of(cell: Cell) -> str:
    """Gradients, FLOPs, kept bytes, collectives."""
    if cell.missing or cell.error:
        return "cannot run here" if cell.missing else "ERROR"
    ratios = [f"{ratio:.2f}" if ratio is not None else "  – " for ratio in (cell.flops, cell.kept, cell.sent)]
    return "  ".join([cell.gradients, *ratios])


def notes_of(line: Line) -> list[str]:
    """Why a cell has no numbers, or what is wrong with those it has."""
    notes = []
    for cell in line.cells:
        why = cell.missing or cell.error
        if cell.gradients == DIFFER:
            why = f"{len(cell.different)} differ: {', '.join(cell.different[:3])}"
        elif cell.idle:
            why = "nothing is recomputed and nothing freed"
        if why:
            notes.append(f"{line.stack}, {cell.mode}: {why}")
    return notes


def print_lines(lines: list[Line], seen: dict[str, Any]) -> None:
    print(f"$ {seen['command']}")
    print_table(COLUMNS, [cells(line) for line in lines])
    print(*(note for line in lines for note in notes_of(line)), sep="\n")
    print(
        "Per mode: gradients compared with those of the same stack without sac; then FLOPs of a step, bytes that it\n"
        "keeps for backward and collectives that it sends, each divided by that. equal: every bit of every gradient\n"
        "and loss, on every process. close: up to rounding, where the stack adds in another order. – : nothing is\n"
        "sent, or the mode does not apply. scattered: full, with the inputs of regions cut over the processes.\n"
        f"torch {seen['torch']}, Python {seen['python']}, {seen['cores']} cores of {seen['cpu']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {stack.name: stack for stack in STACKS}
    parser.add_argument("--stack", action="append", choices=known, help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args()
    stacks = [known[name] for name in given.stack or known]
    torch.set_num_threads(1)
    with progress_lines() as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other packages' own; what sac finds wrong here is an error or a difference
        advance = counting(progress, sum(1 + len(stack.modes) for stack in stacks))
        lines = [line_of(stack, advance) for stack in stacks]
    seen = environment("composition_matrix.py")
    if given.json:
        print(json.dumps({**seen, "stacks": [asdict(line) for line in lines]}, indent=2))
    else:
        print_lines(lines, seen)
    return 1 if any(line.failed for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
