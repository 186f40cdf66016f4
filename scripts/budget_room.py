#!/usr/bin/env python3
"""How much of its room does a step under a budget use, and does the next faster plan fit?

    .venv/bin/python scripts/budget_room.py          two, four and eight layers, and accumulation: a minute

The room lies between the peak of full recomputation and the budget. Predicted and measured are the peak of the plan,
and next is the measured peak of the plan for the smallest budget that has a faster one, all in parts of the room. If
next is above 100 %, the size of the decisions leaves room unused, and not the prediction. The exit code is 1 if a
measured peak is above its budget.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sac.fitting import controller
from sac.fitting.fit import Fitting
from sac.tools.render import print_rows
from tests.support.blocks import llama_stack
from tests.unit.fitting.small_training import DIM, Language, Trained, built, controller_of, trained, within

MODELS = (("2 layers", 2, 1), ("4 layers", 4, 1), ("8 layers", 8, 1), ("4 layers, 3 passes", 4, 3))
PARTS = (0.2, 0.4, 0.6, 0.8)
made: list[Fitting] = []


class _Noted(Fitting):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        made.append(self)


def next_budget(fitting: Fitting, budget: int) -> int:
    """Return the least budget in bytes above ``budget`` with a faster plan, or that of no checkpointing."""

    def seconds(allowed: int) -> float:
        return fitting._time(fitting._assign(allowed))

    now, low = seconds(budget), budget
    high = max(budget + 1, fitting.peak_of([len(fitting.choices[group]) - 1 for group in fitting.groups]))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if seconds(middle) < now else (middle, high)
    return high


def main() -> int:
    """Print the table."""
    controller.Fitting = _Noted  # type: ignore[misc]
    rows, is_met = [], True
    for name, layers, passes in MODELS:

        def run(value: Any, layers: int = layers, passes: int = passes) -> Trained:
            model: Language = built()
            model.body = llama_stack(layers, DIM, 4)
            return trained(value, model=model, passes=passes)

        low, high = (max(run(mode).peaks) for mode in ("full", None))
        for part in PARTS:
            budget = int(low + part * (high - low))
            found = run(within(budget))
            fitted = controller_of(found.model).fitted
            assert fitted is not None
            peaks = fitted.peak, max(found.peaks), max(run(within(next_budget(made[-1], budget))).peaks)
            is_met = is_met and peaks[1] <= budget
            rows.append((name, f"{part:.0%}", *(f"{(peak - low) / (budget - low):.1%}" for peak in peaks)))
    print_rows(("model", "budget", "predicted", "measured", "next"), rows)
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
