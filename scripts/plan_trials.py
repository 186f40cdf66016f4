#!/usr/bin/env python3
"""Do plans keep their budget? Random models and budgets: a real step of each plan next to what was promised.

    .venv/bin/python scripts/plan_trials.py --count 1000           an hour or so on two free cores
    .venv/bin/python scripts/plan_trials.py --count 20 --seed 7

A trial is one of the models of scripts/plan_accuracy.py with two to four layers and a budget between its least peak and
its peak without checkpointing. It is violated if the allocator's peak in a real step with the policy is above the
budget, or if the plan takes longer, as predicted, than full in every layer, in every second, third or fourth one,
`selective`, or attention and products, where that fits into the budget too. Ends with 1 if a trial is.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_terminal import shown_progress
from pareto_models import every_nth

from sac.planner.plan_file import make_plan
from sac.planner.planner import Planner, Point
from sac.planner.prepare import prepare
from sac.planner.write_policy import baselines, plain_baselines
from tests.unit.planner.truth import FURTHER, MODELS, measured, model_named, put_on

SLACK = 1 + 1e-9  # seconds are sums of floating-point numbers, in another order on either side


@dataclass
class Subject:
    """A model that is planned for many budgets."""

    name: str
    layers: int

    def __post_init__(self) -> None:
        self.model, self.inputs = model_named(self.name, self.layers)
        self.planner: Planner = prepare(self.model, self.inputs)
        for way in plain_baselines(self.planner):
            self.planner.run(way.choice)  # its peak is then a measured one
        self.ways: list[Point] = [*baselines(self.planner), *every_nth(self.planner)]
        low, high = self.planner.least(), self.planner.without_checkpointing
        self.range = max(self.planner.step.peak_of(self.planner.run(low.choice)), 1), self.planner.point("", high).peak

    def trial(self, budget: int) -> tuple[list[str], bool]:
        """Return what is wrong with the plan for this budget, and whether its peak is the predicted one."""
        made = make_plan(self.planner, budget)
        peak = self.planner.step.static + measured(self.model, self.inputs, put_on(made.policy)).peak
        wrong = [f"a peak of {peak} bytes"] if peak > budget else []
        wrong += [
            f"{made.point.seconds} s, and {way.label} takes {way.seconds} s at {way.peak} bytes"
            for way in self.ways
            if way.peak <= budget and made.point.seconds > way.seconds * SLACK
        ]
        return wrong, peak == made.point.peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="of trials (100)")
    parser.add_argument("--seed", type=int, default=0, help="of models and budgets (0)")
    parser.add_argument("--model", nargs="+", choices=[*MODELS, *FURTHER], default=[*MODELS, *FURTHER])
    given = parser.parse_args()
    random = Random(given.seed)
    subjects: dict[tuple[str, int], Subject] = {}
    violated = exact = 0
    with shown_progress(quiet=False) as progress:
        for number in range(given.count):
            key = random.choice(given.model), random.randint(2, 4)
            progress(number, given.count, f"{key[0]}, {key[1]} layers")
            if key not in subjects:
                subjects[key] = Subject(*key)
            budget = random.randint(*subjects[key].range)
            wrong, is_exact = subjects[key].trial(budget)
            exact += is_exact
            violated += bool(wrong)
            for one in wrong:
                print(f"{key[0]}, {key[1]} layers, {budget} bytes: {one}", flush=True)
            if (number + 1) % 100 == 0:
                print(f"{number + 1} trials: {violated} violated, {exact} exact", flush=True)
    print(f"{given.count} trials on {len(subjects)} models: {violated} violated, {exact} peaks exact to the byte")
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
