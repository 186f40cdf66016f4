#!/usr/bin/env python3
"""Are plans good? At equal memory a plan is never slower than what people choose by hand, and how much faster it is.

    .venv/bin/python scripts/plan_pareto.py                          all models and the 70B block, some minutes
    .venv/bin/python scripts/plan_pareto.py --model Llama T5         these models
    .venv/bin/python scripts/plan_pareto.py --quick                  a small model and a small block: that it works
    .venv/bin/python scripts/plan_pareto.py --write docs/planning-numbers.md
    .venv/bin/python scripts/plan_pareto.py --time llama70b          how long planning takes (or deepseek_v2)

First table: for each way to checkpoint a whole model, the plan for a budget that is this way's peak. Times are
predicted (the roofline of the device), of what runs again in all layers; the peak of both is that of a step without
data. Ways that save some ops are priced as replay runs them, without the dead ops that torch's engine would run.

Second table: one block of a 70B model as an H100 runs it. Baselines are priced as torch's engine runs them: every op
that is not saved, up to the last that backward needs. Bytes are those beyond the region's input, of 128 MiB.

Third table: what the partitioner of torch.compile saves of that block under `activation_memory_budget`, and the fastest
save option in as many bytes.

The script ends with 1 where a plan is slower than what it is compared with, or goes above its budget.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_terminal import environment, shown_progress
from pages import write_between
from pareto_block import MIB, Met, Sizes, anchors, baselines, profiled
from pareto_models import Pair, pairs_of
from pareto_partitioner import BUDGETS, Partition, partitions
from pareto_time import CASES, timed

from sac.planner.pareto import SaveOption, pareto
from sac.tools.render import print_rows
from tests.unit.planner.truth import MODELS

SLACK = 1 + 1e-9  # seconds are sums of floating-point numbers, in another order on either side
QUICK_SIZES = Sizes(hidden=512, ffn=1792, heads=8, kv_heads=2, sequence=256)
ROPES = {"real": "rotary positions in real numbers of 32 bit", "complex": "rotary positions in complex numbers"}


@dataclass
class Block:
    """What was found of the 70B block with one kind of rotary positions."""

    rope: str
    front: list[SaveOption]
    baselines: list[Any]
    anchors: list[Met]
    partitions: list[tuple[Partition, SaveOption]] = field(default_factory=list)
    skipped: str = ""


@dataclass
class Report:
    pairs: list[Pair]
    blocks: list[Block]

    @property
    def violations(self) -> list[str]:
        found = [f"{pair.model}: {pair.way}" for pair in self.pairs if pair.is_violation(SLACK)]
        for block in self.blocks:
            for one in block.baselines:
                best = within(block.front, one.bytes)
                if best.seconds > one.seconds * SLACK:
                    found.append(f"70B block, {block.rope}: {one.label}")
            for theirs, ours in block.partitions:
                if ours.seconds > theirs.seconds * SLACK:
                    found.append(f"70B block, {block.rope}: partitioner at {theirs.budget}")
        return found


def within(front: Sequence[SaveOption], size: int) -> SaveOption:
    """The fastest save option of so many bytes."""
    return [one for one in front if one.bytes <= size][-1]


def block_of(rope: str, sizes: Sizes) -> Block:
    profile, times = profiled(sizes, as_complex=rope == "complex")
    front = list(pareto(profile, times))
    input_bytes = 2 * sizes.sequence * sizes.hidden
    met = anchors(profile, times, input_bytes) if sizes == Sizes() else []
    block = Block(rope, front, baselines(profile, times), met)
    budgets = BUDGETS if sizes == Sizes() else BUDGETS[1::3]
    try:
        found = partitions(sizes, budgets, as_complex=rope == "complex")
        block.partitions = [(one, within(front, one.bytes)) for one in found]
    except Exception as error:
        block.skipped = f"the partitioner does not run here: {type(error).__name__}: {error}".splitlines()[0]
    return block


def model_rows(pairs: Sequence[Pair]) -> list[list[str]]:
    return [
        [
            pair.model if place == 0 or pairs[place - 1].model != pair.model else "",
            pair.way,
            f"{pair.peak:,}",
            f"{pair.seconds * 1e6:,.1f}",
            f"{pair.plan_peak:,}",
            f"{pair.plan_seconds * 1e6:,.1f}",
            f"{pair.plan_seconds / pair.seconds:.2f}" if pair.seconds else "–",
        ]
        for place, pair in enumerate(pairs)
    ]


MODEL_COLUMNS = ("model", "way", "peak, bytes", "again, µs", "plan's peak", "again, µs", "ratio")
BLOCK_COLUMNS = ("70B block", "MiB", "again, ms", "replayed, ms", "plan's MiB", "again, ms", "ratio")
ANCHOR_COLUMNS = ("at MiB a layer", "with the input", "plan's MiB", "again, ms", "other", "ratio", "at most", "holds")
PARTITION_COLUMNS = ("budget", "partitioner's MiB", "again, ms", "plan's MiB", "again, ms", "ratio")


def baseline_rows(block: Block) -> list[list[str]]:
    found = []
    for one in block.baselines:
        best = within(block.front, one.bytes)
        found.append([one.label, mib(one.bytes), ms(one.seconds), ms(one.replayed), mib(best.bytes), ms(best.seconds),
                      f"{best.seconds / one.seconds:.3f}"])  # fmt: skip
    return found


def anchor_rows(block: Block) -> list[list[str]]:
    return [
        [str(met.mib), "yes" if met.counts_input else "no", mib(met.keep.bytes), ms(met.keep.seconds),
         met.baseline.label, f"{met.ratio:.3f}", f"{met.limit:.2f}", "yes" if met.holds else "NO"]
        for met in block.anchors
    ]  # fmt: skip


def partition_rows(block: Block) -> list[list[str]]:
    return [
        [f"{theirs.budget}", mib(theirs.bytes), ms(theirs.seconds), mib(ours.bytes), ms(ours.seconds),
         f"{ours.seconds / theirs.seconds:.3f}" if theirs.seconds else "–"]
        for theirs, ours in block.partitions
    ]  # fmt: skip


def mib(size: int) -> str:
    return f"{size / MIB:,.1f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def tables(report: Report) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    found = [("Whole models", MODEL_COLUMNS, model_rows(report.pairs))] if report.pairs else []
    for block in report.blocks:
        found.append((f"One block, {ROPES[block.rope]}", BLOCK_COLUMNS, baseline_rows(block)))
        if block.anchors:
            found.append((f"The same block at given bytes, {ROPES[block.rope]}", ANCHOR_COLUMNS, anchor_rows(block)))
        if block.partitions:
            title = f"`activation_memory_budget`, {ROPES[block.rope]}"
            found.append((title, PARTITION_COLUMNS, partition_rows(block)))
    return found


def footer(report: Report) -> str:
    where = environment("plan_pareto.py")
    skipped = "".join(f"\n{block.skipped}" for block in report.blocks if block.skipped)
    return f"torch {where['torch']}, {where['cpu']}, {datetime.date.today()}{skipped}"


def markdown(report: Report) -> str:
    parts = []
    for title, columns, rows in tables(report):
        lines = [f"### {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        parts.append("\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]))
    verdict = f"{len(report.violations)} violations."
    return "\n\n".join([*parts, verdict, footer(report)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--time", choices=[*CASES])
    given = parser.parse_args(arguments)
    if given.time:
        return timed(given.time, as_json=given.json)
    names, layers = (["Llama"], 4) if given.quick else (given.model, given.layers)
    ropes = [*ROPES][:1] if given.quick else [*ROPES]
    pairs: list[Pair] = []
    with shown_progress(quiet=given.json) as progress:
        for place, name in enumerate(names):
            progress(place, len(names) + len(ropes), name)
            pairs += pairs_of(name, layers)
        blocks = []
        for place, rope in enumerate(ropes):
            progress(len(names) + place, len(names) + len(ropes), "the 70B block")
            blocks.append(block_of(rope, QUICK_SIZES if given.quick else Sizes()))
    report = Report(pairs, blocks)
    if given.json:
        print(json.dumps(as_dict(report), indent=2))
    else:
        for title, columns, rows in tables(report):
            print(f"\n{title}")
            print_rows(columns, rows, right=columns[1:])
        print(footer(report))
    for violation in report.violations:
        print(f"slower than what it is compared with: {violation}", file=sys.stderr)
    if given.write:
        write_between(given.write, "plan-pareto", f"\n{markdown(report)}\n")
    return 1 if report.violations else 0


def as_dict(report: Report) -> dict[str, Any]:
    return {
        **environment("plan_pareto.py"),
        "models": [asdict(pair) for pair in report.pairs],
        "blocks": [
            {
                "rope": block.rope,
                "front": [{"bytes": one.bytes, "seconds": one.seconds} for one in block.front],
                "baselines": [asdict(one) for one in block.baselines],
                "anchors": [
                    {"mib": met.mib, "counts_input": met.counts_input, "ratio": met.ratio, "at_most": met.limit}
                    for met in block.anchors
                ],
                "partitions": [asdict(theirs) for theirs, _ in block.partitions],
                "skipped": block.skipped,
            }
            for block in report.blocks
        ],
        "violations": report.violations,
    }


if __name__ == "__main__":
    sys.exit(main())
