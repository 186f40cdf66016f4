"""`sac plan`: from a model and a memory budget to a policy file, with baselines and the trade-off curve."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sac.errors import PlanError, Problem, SacError
from sac.planner.budget import LEGAL_BUDGET, optimizer_bytes, read_budget
from sac.planner.cost import unpriced_ops
from sac.planner.devices import Device, device_at_hand, device_named
from sac.planner.fakes import Build, fake_build, fake_inputs, fake_mode
from sac.planner.plan_file import Plan, explained, make_plan, with_step_seconds
from sac.planner.plan_view import heading_of, heading_of_sizes, notes_of, table_of
from sac.planner.planner import Point, Progress
from sac.planner.planning import needs_lowering, planned
from sac.planner.prepare import prepare
from sac.planner.sharding import fake_ranks, fsdp_over
from sac.planner.sizes import PlannedSizes, notes_of_sizes, plan_sizes, refuse_share, table_of_sizes
from sac.planner.write_policy import forward_seconds, with_alternatives, write_policy
from sac.policy.read import bytes_text
from sac.tables import screen_width, wrapped_text
from sac.tools.comparison import inputs_on, loss_of
from sac.tools.models import BuiltModel, Inputs
from sac.tools.peak_table import print_explained

MARGIN = "10%"  # of a device's memory: the context, the allocator's fragments, libraries


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes to choose among: those of ``name`` (batch, seq) from ``low`` to ``high``."""

    name: str
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The user's request to the planner, as written; ``budget`` None means the device's memory minus ``margin``."""

    device: str = "cpu"
    budget: str | None = None
    margin: str | None = None
    optimizer: str | None = None
    engine: str = "auto"
    same_layers: bool = False
    real: bool = False
    fsdp: int | None = None
    explain: str | None = None  # None: do not; otherwise where to save a picture, or empty
    sizes: Sizes | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the model, inputs and command that it was made from."""

    plan: Plan
    model: str
    inputs: str
    made_by: str

    def policy_text(self) -> str:
        """Return the policy file."""
        return write_policy(self.plan, {"model": self.model, "inputs": self.inputs, "made by": self.made_by})

    def to_dict(self) -> dict[str, Any]:
        """Return all figures of the plan, as JSON holds them."""
        made = self.plan
        forward = forward_seconds(made)
        return {
            "model": self.model,
            "inputs": self.inputs,
            "made_by": self.made_by,
            "device": made.pricing.device.name,
            "engine": made.pricing.engine,
            "torch": torch.__version__,
            "budget_bytes": made.budget,
            "least_peak_bytes": made.least,
            "most_peak_bytes": made.most,
            "static_bytes": made.static,
            "optimizer_bytes": made.extra,
            "forward_s": forward,
            "plan": _point_dict(made.point, made),
            "baselines": [_point_dict(point, made) for point in made.baselines],
            "curve": [_point_dict(point, made) for point in made.curve],
            "notes": [*made.notes],
            "explained": [one.to_dict() for one in made.explained],
            "policy": self.policy_text(),
        }


def plan_model(
    load: Callable[[Build | None], BuiltModel], request: PlanRequest, made_by: str, progress: Progress | None = None
) -> Planned:
    """Return the plan for the model that ``load`` returns: with data if it is given None, else as `fake_build` does.

    Raises ``PlanError`` for a request that cannot be met, and what ``prepare`` and ``make_plan`` raise.
    """
    device = _figures(request.device)
    budget = _budget(request, device)
    mode = fake_mode()
    built = load(None if request.real else fake_build(mode))
    model, inputs = built.model, built.inputs_of_step(0)
    shapes = inputs_text(inputs)
    if not request.real:
        inputs = fake_inputs(inputs, mode)
    elif request.device.startswith("cuda"):
        model, inputs = model.to(request.device), inputs_on(request.device, inputs)

    def make(progress: Progress) -> Plan:
        return _made(model, inputs, request, budget, built.name, progress)

    made = planned(model, request.device, make, progress, real=request.real)
    if request.real and needs_lowering(model, device):
        note = f"with --real the ops are those that the CPU runs; plan without --real for those that {device.name} runs"
        made = replace(made, notes=(*made.notes, note))
    return Planned(made, built.name, shapes, made_by)


@dataclass(frozen=True, slots=True)
class SizesPlanned:
    """The plans for several sizes, and the best of them with its model, inputs and command."""

    found: PlannedSizes
    best: Planned

    def to_dict(self) -> dict[str, Any]:
        """Return all figures of the best plan, and a row per size, as JSON holds them."""
        rows = [
            {
                self.found.name: row.size,
                "peak_bytes": row.peak,
                "fits": row.plan is not None,
                "step_s": row.plan.step_s if row.plan is not None else None,
                "recompute_s": row.plan.point.seconds if row.plan is not None else None,
                f"{self.found.best.unit}_per_s": row.per_second,
                "best": row is self.found.best,
            }
            for row in self.found.rows
        ]
        return {**self.best.to_dict(), "sizes": rows}


def plan_model_sizes(
    load: Callable[[int, Build | None], BuiltModel], request: PlanRequest, made_by: str, progress: Progress
) -> SizesPlanned:
    """Return the plans for some of the sizes of a request; ``load`` also gets the size. Raises as ``plan_model``."""
    sizes = request.sizes
    assert sizes is not None
    of_size: dict[int, Planned] = {}

    def plan_of(size: int, progress: Progress) -> tuple[Plan, Any]:
        built: list[BuiltModel] = []

        def loaded(build: Build | None) -> BuiltModel:
            built.append(load(size, build))
            return built[0]

        of_size[size] = plan_model(loaded, request, made_by, progress)
        return of_size[size].plan, built[0].inputs_of_step(0)

    budget = _budget(request, _figures(request.device))
    found = plan_sizes(sizes.name, range(sizes.low, sizes.high + 1), plan_of, budget, progress)
    return SizesPlanned(found, of_size[found.best.size])


def _made(
    model: nn.Module,
    inputs: Inputs,
    request: PlanRequest,
    budget: str | int,
    title: str,
    progress: Progress,
) -> Plan:
    with fake_ranks(request.fsdp) if request.fsdp is not None else nullcontext():
        planner = prepare(
            model,
            inputs,  # type: ignore[arg-type]
            loss_fn=loss_of,
            device=request.device,
            engine=request.engine,
            optimizer=request.optimizer,
            real=request.real,
            parallelize=None if request.fsdp is None else fsdp_over(request.fsdp),
            progress=progress,
        )
        made = make_plan(planner, budget, title=title, same_layers=request.same_layers)
        if request.sizes is not None:
            return with_step_seconds(planner, made)
        if request.explain is not None:
            made = explained(planner, made)
        made = with_alternatives(planner, made, same_layers=request.same_layers)
    unpriced = dict.fromkeys(op for profile in planner.profiles for op in unpriced_ops(profile))
    if not unpriced:
        return made
    note = f"no FLOPs formula is known for {', '.join(unpriced)}: priced by the bytes they move, which is too low"
    return replace(made, notes=(*made.notes, note))


def check_wish(request: PlanRequest) -> None:
    """Raise ``PlanError`` with all problems of a request that do not depend on the model."""
    checks: list[Callable[[], object]] = [
        lambda: _figures(request.device),
        lambda: _check_budget(request),
        lambda: optimizer_bytes(request.optimizer, ()),
        lambda: _check_ranks(request),
        lambda: _check_sizes(request),
    ]
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except SacError as error:
            problems += [one for one in error.problems if one not in problems]
    if problems:
        raise PlanError(problems)


def _check_budget(request: PlanRequest) -> None:
    if request.budget is None:
        _budget(request, _figures(request.device))
    else:
        _budget(request, device_named("cpu"))
        read_budget(request.budget)


def _check_sizes(request: PlanRequest) -> None:
    if request.sizes is None:
        return
    problems = []
    if request.explain is not None:
        found = "it explains the peak of one plan, and each size has its own"
        problems.append(Problem("--explain", found, fix=f"plan with the best --{request.sizes.name}"))
    if request.budget is not None:
        refuse_share(request.budget)
    if problems:
        raise PlanError(problems)


def _check_ranks(request: PlanRequest) -> None:
    problems = []
    if request.fsdp is not None and request.fsdp < 2:
        problems.append(Problem("ranks", f"{request.fsdp!r} ranks to shard over", "2, 3, 4, …"))
    if request.fsdp is not None and request.real:
        problems.append(Problem("--fsdp", "ranks that do not exist cannot send data", fix="leave --real out"))
    if problems:
        raise PlanError(problems)


def _figures(name: str) -> Device:
    if name.partition(":")[0] != "cuda":
        return device_named(name)
    if not torch.cuda.is_available():
        raise PlanError(Problem("--device", "torch sees no CUDA device here", fix="name the GPU: --device h100"))
    return device_at_hand(torch.device(name))


def _budget(request: PlanRequest, device: Device) -> str | int:
    if request.budget is not None:
        if request.margin is not None:
            found = "a margin is left free of a device's memory, but --budget already gives the memory to use"
            raise PlanError(Problem("--margin", found, fix="give one of them"))
        return request.budget
    if device.name == "cpu":
        found = "it is missing, and the memory of a CPU is not known"
        raise PlanError(Problem("--budget", found, LEGAL_BUDGET))
    return int(device.memory_bytes * (1 - _share(request.margin or MARGIN)))


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not (text.endswith("%") and 0 <= share < 1):
        raise PlanError(
            Problem("--margin", f'"{text}" is not a margin', 'a share of the device\'s memory: "0%" to "99%"')
        )
    return share


def save_policy(text: str, path: str) -> None:
    """Write a policy file; raises ``PlanError`` if it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(Problem(os.fspath(path), f"the file cannot be written: {error.strerror}")) from error


def print_plan(found: Planned) -> None:
    """Print the plan next to the usual manual choices, and the curve that it is on."""
    made = found.plan
    print(f"{found.model}, {found.inputs}")
    width = screen_width()
    print(wrapped_text(heading_of(made), width))
    print(table_of(made).text(width))
    print(wrapped_text(notes_of(made), width))
    if made.explained:
        least = made.explained[-1]
        print_explained(
            made.explained[:1],
            made.explained,
            f"Whatever these blocks save, the peak is at least {bytes_text(least.peak_bytes)}. What lowers it:",
        )


def print_sizes(found: SizesPlanned) -> None:
    """Print the plans for the tried sizes."""
    width = screen_width()
    print(f"{found.best.model}, best: {found.best.inputs}")
    print(wrapped_text(heading_of_sizes(found.found), width))
    print(table_of_sizes(found.found).text(width))
    print(wrapped_text(notes_of_sizes(found.found), width))


def _point_dict(point: Point, made: Plan) -> dict[str, Any]:
    forward = forward_seconds(made)
    return {
        "label": point.label,
        "peak_bytes": point.peak,
        "kept_bytes": point.kept,
        "recomputed_flops": point.flops,
        "recompute_s": point.seconds,
        "of_forward": point.seconds / forward if forward else None,
        "fits": point.peak <= made.budget,
        "is_checked": point.is_checked,
    }


def inputs_text(inputs: Inputs) -> str:
    """Return the inputs of a model as a short text: names, dtypes and shapes."""
    pairs = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    return ", ".join(f"{name if isinstance(name, str) else f'argument {name}'} {_kind(value)}" for name, value in pairs)


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
