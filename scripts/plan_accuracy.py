#!/usr/bin/env python3
"""Is the planner right? The memory that it predicts for a step, next to what the allocator gave out in a real one.

    .venv/bin/python scripts/plan_accuracy.py                 all models, some minutes on two free cores
    .venv/bin/python scripts/plan_accuracy.py --model Llama T5  these
    .venv/bin/python scripts/plan_accuracy.py --device cuda   on a GPU, where the workspace of kernels is not predicted

Predicted: by a step of the model on tensors without data. Measured: by the profiler's memory events in the second step
of the same model with data, so that all first calls are over. Kept is what lives between forward and backward, peak the
most that lives at a time; both without parameters, buffers and inputs, which no policy changes. The two planned
policies are those that `sac.plan` makes for these shares of the range. The exit code is 1 if a step takes more at its
peak than was predicted; on a GPU, a twentieth more.

The second table is about the prediction before the check: the planner adds up what it has seen of each layer in steps
with other choices, solves with that, and then runs a step with the solution. Here it is asked of random choices.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_terminal import shown_progress

from sac.planner.plan_file import make_plan
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from sac.tools.render import print_rows
from tests.unit.planner.truth import (
    CONFIGS,
    FURTHER,
    MODELS,
    SHARES,
    Bytes,
    measured,
    model_named,
    predicted,
    put_on,
)

COLUMNS = ("model", "policy", "kept, predicted", "measured", "difference", "peak, predicted", "measured", "difference")
COMPOSED_COLUMNS = ("model", "random choices", "exact", "most below", "most above", "range of peaks")
ALL = [*MODELS, *FURTHER]


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one model."""

    model: str
    policy: str
    predicted: Bytes
    measured: Bytes

    def fits(self, device: str) -> bool:
        """Whether the peak is at most the predicted one; on a GPU, a twentieth above it."""
        return self.measured.peak <= self.predicted.peak * (1.05 if device == "cuda" else 1)

    def cells(self) -> list[str]:
        found = [self.model, self.policy]
        for said, seen in ((self.predicted.kept, self.measured.kept), (self.predicted.peak, self.measured.peak)):
            found += [f"{said:,}", f"{seen:,}", f"{said - seen:,}"]
        return found


@dataclass(frozen=True, slots=True)
class Composed:
    """Peaks of random choices as composed of other steps, less those of a step with the choice; all in bytes."""

    model: str
    differences: tuple[int, ...]
    range_bytes: int

    def cells(self) -> list[str]:
        exact = sum(one == 0 for one in self.differences)
        low, high = min(0, *self.differences), max(0, *self.differences)
        return [self.model, str(len(self.differences)), str(exact), f"{low:,}", f"{high:,}", f"{self.range_bytes:,}"]


def rows_of(name: str, layers: int, device: str, told: Callable[[str], None]) -> Iterator[Row | Composed]:
    """Yield a row for each policy on the model, and the composed predictions at the end."""
    model, inputs = model_named(name, layers)
    model, inputs = model.to(device), {key: value.to(device) for key, value in inputs.items()}
    for policy, config in CONFIGS.items():
        told(f"{name}, {policy}")
        said = predicted(model, inputs, config)
        yield Row(name, policy, said, measured(model, inputs, config))
    told(f"{name}, planning")
    planner = prepare(model, inputs)
    for share in SHARES:
        made = make_plan(planner, share)
        record = planner.run(made.point.choice)
        said = Bytes(record.kept - record.static, record.peak - record.static)
        yield Row(name, f"planned, {share}", said, measured(model, inputs, put_on(made.policy)))
    told(f"{name}, random choices")
    yield composed(name, planner, count=20)


def composed(name: str, planner: Planner, count: int) -> Composed:
    """Ask for the peak of random choices before and after a step with them."""
    random = Random(0)
    differences = []
    for _ in range(count):
        choice = tuple(random.randrange(len(planner.choices[kind])) for kind in planner.groups)
        if choice in planner.records:
            continue
        before = planner.point("composed", choice).peak
        planner.run(choice)
        differences.append(before - planner.point("checked", choice).peak)
    most = planner.point("none", planner.everywhere(lambda kind: len(planner.choices[kind]) - 1))
    return Composed(name, tuple(differences), most.peak - planner.least().peak)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", metavar="NAME", choices=ALL, default=ALL, help="only these")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where steps are run (cpu)")
    parser.add_argument("--layers", type=int, default=4, help="layers in each stack (4)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args()
    found: list[Row | Composed] = []
    with shown_progress(quiet=given.json) as progress:
        for done, name in enumerate(given.model):
            told = partial(progress, done, len(given.model))
            found += rows_of(name, given.layers, given.device, told)
    rows = [row for row in found if isinstance(row, Row)]
    composed_rows = [row for row in found if isinstance(row, Composed)]
    if given.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "composed": [asdict(row) for row in composed_rows]}))
    else:
        print_rows(COLUMNS, [row.cells() for row in rows], right=COLUMNS[2:])
        print_rows(COMPOSED_COLUMNS, [row.cells() for row in composed_rows], right=COMPOSED_COLUMNS[1:])
    return 0 if all(row.fits(given.device) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
