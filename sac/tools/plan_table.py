"""`sac plan`: from a model and a memory budget to a policy file, next to the usual choices."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sac.config_keys import StepBudget
from sac.errors import PlanError, Problem
from sac.planner.cost import figures_of
from sac.planner.fakes import Build, Inputs, build_on_meta
from sac.planner.planning import best_size, budget_of, host_memory_of, make_plan, optimizer_bytes
from sac.planner.predict import Plan
from sac.tables import Table, bytes_text, screen_width, seconds_text, wrapped_text
from sac.tensors import describe
from sac.tools.comparison import loss_of
from sac.tools.models import BuiltModel


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it was made from. ``sizes``: the batches that were tried, each with its plan (or None) and peak.

    ``batch`` is the planned one.
    """

    plan: Plan
    about: dict[str, str]  # model, inputs and command
    batch: int
    sizes: dict[int, tuple[Plan | None, int]]

    def policy_text(self) -> str:
        """Return the policy file."""
        return self.plan.text({name.replace("_", " "): value for name, value in self.about.items()})

    def size_rows(self) -> list[dict[str, Any]]:
        """Return what was predicted for each batch that was tried; ``step_s`` is None where it does not fit."""
        return [
            {"batch": size, "peak_bytes": peak, "fits": plan is not None, "best": size == self.batch,
             "step_s": None if plan is None else plan.step_s}
            for size, (plan, peak) in self.sizes.items()
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return all figures of the plan, as JSON holds them."""
        sizes = {"sizes": self.size_rows()} if self.sizes else {}
        return {**self.about, **self.plan.to_dict(), **sizes, "policy": self.policy_text()}


def plan_model(arguments: argparse.Namespace, budget: StepBudget, load: Callable[[Build], BuiltModel]) -> Planned:
    """Return the plan that the arguments of `sac plan` ask for; ``load`` builds their model."""
    batch = arguments.batch
    built: dict[int, BuiltModel] = {}

    def plan_of(size: int) -> Plan:
        arguments.batch = size
        built[size] = load(build_on_meta)
        return make_plan(
            built[size].model,
            built[size].inputs_of_step(0),
            budget,
            loss_fn=loss_of,
            device=arguments.device,
            optimizer=arguments.optimizer,
            host_memory=arguments.host_memory,
            fsdp=arguments.fsdp,
            explains=arguments.explain,
        )

    sizes: dict[int, tuple[Plan | None, int]] = {}
    if not isinstance(batch, int):
        best, sizes = best_size(range(batch[0], batch[1] + 1), plan_of)
        batch = best or batch[0]
    plan = sizes.get(batch, (None, 0))[0] or plan_of(batch)  # if no size fits, this raises what the least peak is
    inputs = inputs_text(built[batch].inputs_of_step(0))
    return Planned(plan, {"model": built[batch].name, "inputs": inputs, "made_by": arguments.typed}, batch, sizes)


def check_wish(arguments: argparse.Namespace) -> StepBudget:
    """Return the budget; raise ``PlanError`` for what is wrong in the arguments that do not depend on the model."""
    figures = figures_of(arguments.device)
    budget = budget_of("auto" if arguments.budget is None else arguments.budget, figures)
    host_memory_of(arguments.host_memory, figures)
    optimizer_bytes(arguments.optimizer, ())
    if arguments.fsdp is not None and arguments.fsdp < 2:
        raise PlanError(Problem("ranks", f"{arguments.fsdp!r} ranks to shard over", "2, 3, 4, …"))
    if not isinstance(arguments.batch, int) and budget.share is not None:
        found = f'"{arguments.budget}" is a share of a range of peaks, but each size has its own range'
        raise PlanError(Problem("budget", found, 'bytes, such as "72GiB"'))
    return budget


def print_plan(planned: Planned) -> None:
    """Print the plan next to the usual choices; before it the sizes that were tried."""
    plan, width = planned.plan, screen_width()
    print(f"{planned.about['model']}, {planned.about['inputs']}")
    print(wrapped_text(plan.heading(), width))
    if planned.sizes:
        columns = ("batch", "peak", "step", "per row", "fits")
        print(Table(columns, tuple(map(_size_cells, planned.size_rows())), right=columns[:4]).text(width))
        print(f"the plan for batch {planned.batch}:")
    print(plan.table().text(width))
    print("peak: of one step, with parameters and gradients; time: predicted, with the recording of ops")
    if plan.explanation is not None:
        print("\n".join(plan.explanation.lines()))
    for note in plan.notes:
        print(wrapped_text([f"note: {note}"], width))


def _size_cells(row: dict[str, Any]) -> tuple[str, ...]:
    times = [seconds_text(row["step_s"] / rows) for rows in (1, row["batch"])] if row["fits"] else ["–", "–"]
    fits = "yes, best" if row["best"] else "yes"
    return str(row["batch"]), bytes_text(row["peak_bytes"]), *times, fits if row["fits"] else "no: its least peak"


def inputs_text(inputs: Inputs) -> str:
    """Return the inputs of a model as a short text: names, dtypes and shapes."""
    pairs = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    texts = ((name, describe(value) if isinstance(value, Tensor) else type(value).__name__) for name, value in pairs)
    return ", ".join(f"{name if isinstance(name, str) else f'argument {name}'} {text}" for name, text in texts)
