"""`sac plan`: from a model and a memory budget to a policy file, next to the usual choices."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sac.config_keys import LEGAL_BUDGET
from sac.errors import PlanError, Problem
from sac.planner.devices import Device, device_at_hand, device_named
from sac.planner.fakes import Build, fake_build, fake_inputs, fake_mode
from sac.planner.planning import Plan, best_size, budget_of, make_plan
from sac.planner.rehearsal import optimizer_bytes
from sac.policy.read import bytes_text
from sac.tables import Table, screen_width, seconds_text, wrapped_text
from sac.tools.comparison import loss_of
from sac.tools.models import BuiltModel, Inputs

_USABLE = 0.9  # of a device's memory: the context, the allocator's fragments and libraries take the rest


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the model, inputs and command that it was made from. ``sizes``: the batches that were tried."""

    plan: Plan
    model: str
    inputs: str
    made_by: str
    sizes: dict[int, tuple[Plan | None, int]]
    best: int | None = None

    def policy_text(self) -> str:
        """Return the policy file."""
        return self.plan.text({"model": self.model, "inputs": self.inputs, "made by": self.made_by})

    def to_dict(self) -> dict[str, Any]:
        """Return all figures of the plan, as JSON holds them."""
        found = {"model": self.model, "inputs": self.inputs, "made_by": self.made_by} | self.plan.to_dict()
        rows = [
            {"batch": size, "peak_bytes": peak, "fits": made is not None, "best": size == self.best}
            | ({} if made is None else {"step_s": made.step_s + made.rows[0].seconds})
            for size, (made, peak) in self.sizes.items()
        ]
        return found | ({"sizes": rows} if rows else {}) | {"policy": self.policy_text()}


def plan_model(arguments: argparse.Namespace, load: Callable[[Build], BuiltModel]) -> Planned:
    """Return the plan that the arguments of `sac plan` ask for; ``load`` builds their model."""
    device, batch = _figures(arguments.device), arguments.batch
    budget = _budget(arguments.budget, device)
    built: dict[int, BuiltModel] = {}
    plans: dict[int, Plan] = {}

    def plan_of(size: int) -> Plan:
        arguments.batch, mode = size, fake_mode()
        built[size] = load(fake_build(mode))
        plans[size] = make_plan(
            built[size].model,
            fake_inputs(built[size].inputs_of_step(0), mode),
            budget,
            loss_fn=loss_of,
            device=arguments.device,
            optimizer=arguments.optimizer,
            fsdp=arguments.fsdp,
            explains=arguments.explain,
        )
        return plans[size]

    tried: dict[int, tuple[Plan | None, int]] = {}
    best = None
    if isinstance(batch, int):
        made = plan_of(batch)
    else:
        best, tried = best_size(range(batch[0], batch[1] + 1), plan_of)
        made = plans[best] if best is not None else plan_of(batch[0])  # the latter raises what the least peak is
        arguments.batch = best or batch[0]
    of_best = built[arguments.batch]
    return Planned(made, of_best.name, inputs_text(of_best.inputs_of_step(0)), arguments.typed, tried, best)


def smallest_batch(batch: int | tuple[int, int]) -> int:
    """Return a batch size, of a range the smallest."""
    return batch if isinstance(batch, int) else batch[0]


def check_wish(arguments: argparse.Namespace) -> None:
    """Raise ``PlanError`` for what is wrong in the arguments that do not depend on the model."""
    _budget(arguments.budget, _figures(arguments.device))
    budget_of(arguments.budget or 1)
    optimizer_bytes(arguments.optimizer, ())
    _check_sizes(arguments)


def _check_sizes(arguments: argparse.Namespace) -> None:
    if arguments.fsdp is not None and arguments.fsdp < 2:
        raise PlanError(Problem("ranks", f"{arguments.fsdp!r} ranks to shard over", "2, 3, 4, …"))
    if not isinstance(arguments.batch, int) and budget_of(arguments.budget or 1).bytes is None:
        found = f'"{arguments.budget}" is a share of a range of peaks, but each size has its own range'
        raise PlanError(Problem("budget", found, 'bytes, such as "72GiB"'))


def _figures(name: str) -> Device:
    if name.partition(":")[0] != "cuda":
        return device_named(name)
    if not torch.cuda.is_available():
        raise PlanError(Problem("--device", "torch sees no CUDA device here", fix="name the GPU: --device h100"))
    return device_at_hand(torch.device(name))


def _budget(written: str | None, device: Device) -> str | int:
    if written is not None:
        return written
    if device.name == "cpu":
        found = "it is missing, and the memory of a CPU is not known"
        raise PlanError(Problem("--budget", found, LEGAL_BUDGET))
    return int(device.memory_bytes * _USABLE)


def save_policy(text: str, path: str) -> None:
    """Write a policy file; raises ``PlanError`` if it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(Problem(os.fspath(path), f"the file cannot be written: {error.strerror}")) from error


def print_plan(found: Planned) -> None:
    """Print the plan next to the usual choices; before it the sizes that were tried."""
    made, width = found.plan, screen_width()
    print(f"{found.model}, {found.inputs}")
    print(wrapped_text(made.heading(), width))
    if found.sizes:
        print(_table_of_sizes(found).text(width))
        print(f"the plan for batch {found.best}:")
    print(made.table().text(width))
    print("peak: of one step, with parameters and gradients; time: predicted, with the recording of ops")
    if made.explanation is not None:
        print("\n".join(made.explanation.lines()))
    for note in made.notes:
        print(wrapped_text([f"note: {note}"], width))


def _table_of_sizes(found: Planned) -> Table:
    rows = []
    for size, (made, peak) in found.sizes.items():
        step = 0.0 if made is None else made.step_s + made.rows[0].seconds
        times = (seconds_text(step), seconds_text(step / size)) if made is not None else ("–", "–")
        fits = "no: its least peak" if made is None else "yes, best" if size == found.best else "yes"
        rows.append((str(size), bytes_text(peak), *times, fits))
    return Table(("batch", "peak", "step", "per row", "fits"), tuple(rows), right=("batch", "peak", "step", "per row"))


def inputs_text(inputs: Inputs) -> str:
    """Return the inputs of a model as a short text: names, dtypes and shapes."""
    pairs = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    return ", ".join(f"{name if isinstance(name, str) else f'argument {name}'} {_kind(value)}" for name, value in pairs)


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
