"""`sac.plan`: compute a policy for a budget."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.applying import refuse_second
from sac.blocks.install import remove
from sac.blocks.other_checkpointing import refuse_existing_checkpointing
from sac.config_keys import StepBudget, read_budget
from sac.errors import ModelError, PlanError, Problem, listing
from sac.planner.cost import MEMORY, PRIORS
from sac.planner.devices import Device, figures_of
from sac.planner.explain import Explanation
from sac.planner.fakes import Inputs, arguments_of
from sac.planner.gpu_ops import lowered_to
from sac.planner.predict import TooSmallError
from sac.planner.rehearsal import Rehearsal
from sac.planner.rules import policy_of
from sac.planner.sharding import fake_ranks, fsdp_over
from sac.policy.model import Policy, dump_policy
from sac.policy.syntax import all_problems, node_of
from sac.tables import LEGAL_BYTES, Table, bytes_text, flops_text, seconds_text
from sac.tensors import tensor_parts

# -- A plan and its figures


@dataclass(frozen=True, slots=True)
class Row:
    """One way to checkpoint the model: its peak in bytes, and what it recomputes in FLOPs and seconds.

    ``is_checked``: a step was run with it; otherwise the peak is predicted, as an upper bound.
    """

    label: str
    peak: int
    flops: int
    seconds: float
    is_checked: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan, its figures, and those of the usual ways. ``rows``: the plan first.

    ``once_s``: the predicted seconds of a step with its optimizer, without what is recomputed.
    """

    policy: Policy
    rows: tuple[Row, ...]
    device: Device
    budget: int
    least: int
    most: int
    static: int
    extra: int
    forward_s: float
    once_s: float
    notes: tuple[str, ...] = ()
    explanation: Explanation | None = None

    @property
    def step_s(self) -> float:
        """The predicted seconds of a step with its optimizer."""
        return self.once_s + self.rows[0].seconds

    def heading(self) -> tuple[str, ...]:
        """Return the lines above the table: device, budget and peaks."""
        return (
            f"for {self.device.name} ({self.device.title}), torch {torch.__version__}",
            f"budget {bytes_text(self.budget)}; least peak {bytes_text(self.least)}, without checkpointing "
            f"{bytes_text(self.most)}; of it {bytes_text(self.static)} parameters, buffers and inputs"
            + (f", {bytes_text(self.extra)} state of the optimizer" if self.extra else ""),
        )

    def table(self) -> Table:
        """Return a row for the plan and for each of the usual ways."""
        columns = ("", "peak", "recomputed", "time", "of forward", "fits", "")
        return Table(columns, tuple(map(self._cells, self.rows)), right=columns[1:5])

    def _cells(self, row: Row) -> tuple[str, ...]:
        share = f"{row.seconds / self.forward_s:.1%}" if self.forward_s else "–"
        fits = "yes" if row.peak <= self.budget else "no"
        how = "checked" if row.is_checked else "predicted"
        return row.label, bytes_text(row.peak), flops_text(row.flops), seconds_text(row.seconds), share, fits, how

    def text(self, about: Mapping[str, str] | None = None) -> str:
        """Return the policy as YAML with the figures in comments. ``about``: further lines of the header by title."""
        row = self.rows[0]
        head = [
            f"Planned by sac with torch {torch.__version__}.",
            *(f"{name}: {value}" for name, value in (about or {}).items()),
            f"device: {self.device.name} ({self.device.title})",
            f"budget: {self.budget} bytes ({bytes_text(self.budget)})",
            f"peak: {row.peak} bytes ({bytes_text(row.peak)}), {'checked' if row.is_checked else 'predicted'}",
            f"recomputed: {flops_text(row.flops)} in {seconds_text(row.seconds)} per step (predicted)",
            *(f"note: {note}" for note in self.notes),
        ]
        shown = ("".join(letter if letter.isprintable() else " " for letter in line) for line in head)
        lines = [f"# {part}" for line in shown for part in textwrap.wrap(line, 98, subsequent_indent="  ")]
        return "\n".join([*lines, dump_policy(self.policy)])

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        names = ("budget", "least", "most", "static", "extra")
        found: dict[str, Any] = {f"{name}_bytes": getattr(self, name) for name in names}
        rows = [
            {"label": one.label, "peak_bytes": one.peak, "fits": one.peak <= self.budget, "recompute_flops": one.flops,
             "recompute_s": one.seconds, "checked": one.is_checked}
            for one in self.rows
        ]  # fmt: skip
        found |= {"device": self.device.name, "torch": torch.__version__, "forward_s": self.forward_s}
        explained = None if self.explanation is None else self.explanation.to_dict()
        return found | {"step_s": self.step_s, "rows": rows, "notes": [*self.notes], "explained": explained}


def budget_of(value: Any, device: Device) -> StepBudget:
    """Return the parsed budget; raises ``PlanError`` if ``value`` is not a budget for ``device``."""
    with all_problems(PlanError) as attempt:
        budget: StepBudget = attempt(read_budget, node_of(value, "", "budget"))
    if budget.of_device is not None and device.name == "cpu":
        found = "a share of the device's memory, but the memory of a CPU is not known"
        raise PlanError(Problem("budget", found, LEGAL_BYTES, fix="give bytes, or name a GPU"))
    return budget


def make_plan(
    model: nn.Module,
    inputs: Any,
    budget: Any,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    optimizer: Any = None,
    parallelize: Callable[[nn.Module], Any] | None = None,
    fsdp: int | None = None,
    explains: bool = False,
) -> Plan:
    """Return the plan of ``sac.plan`` with its figures. ``fsdp``: the number of ranks that shard the model by FSDP2."""
    if not isinstance(model, nn.Module):
        raise ModelError(Problem("model", f"a {type(model).__name__} is not a torch.nn.Module"))
    refuse_second(model)
    refuse_existing_checkpointing(model)
    arguments = arguments_of(inputs, PlanError)
    figures = _figures_of(model, device)
    wanted = budget_of(budget, figures)
    is_there = "cuda" in {parameter.device.type for parameter in model.parameters()}
    shards = parallelize if fsdp is None else fsdp_over(fsdp)
    with ExitStack() as scopes:
        scopes.enter_context(torch.random.fork_rng(devices=()))
        scopes.enter_context(lowered_to("cpu" if is_there else figures.name))
        scopes.enter_context(fake_ranks(fsdp) if fsdp is not None else nullcontext())
        steps = Rehearsal(model, arguments, figures, loss_fn=loss_fn, optimizer=optimizer, parallelize=shards)
        scopes.callback(remove, steps.model)  # so that the copy can be freed
        return _planned(steps, wanted, explains=explains)


def _planned(steps: Rehearsal, budget: StepBudget, *, explains: bool) -> Plan:
    prediction, device = steps.prediction, steps.device
    least, most = prediction.least(), prediction.peak_of(prediction.fastest)
    if budget.share is not None:
        most = max(least, steps.run(prediction.fastest).peak + steps.extra)
    allowed = budget.within(least, most, device.memory_bytes)
    chosen, peak = steps.choose(allowed)
    unplanned = [(path, profile.reason) for profile in prediction.profiles for path in profile.paths if profile.reason]
    notes = [f"{path} is recomputed in full: {reason}" for path, reason in unplanned]
    if chosen == prediction.fastest:
        notes.append("no checkpointing is needed")
    choices = {"plan": chosen, "none": prediction.fastest, "full": prediction.full, "selective": prediction.shipped}
    rows = []
    for label, choice in choices.items():
        flops = sum(region.option.flops for region in prediction.regions(choice))
        shown = peak if label == "plan" else prediction.peak_of(choice)
        rows.append(Row(label, shown, flops, prediction.time_of(choice), label == "plan"))
    trained = (part for one in steps.model.parameters() if one.requires_grad for part in tensor_parts(one))
    moved = 3 * sum(part.numel() * part.element_size() for part in trained) + 2 * steps.extra
    return Plan(
        policy_of(prediction.regions(chosen), "planned"),
        tuple(rows),
        device,
        allowed,
        prediction.least(),
        most,
        prediction.record.static,
        steps.extra,
        prediction.forward_s,
        steps.step_s + moved / (device.bytes_per_s * PRIORS[MEMORY]),
        tuple(notes),
        steps.explain(chosen, peak) if explains else None,
    )


def _figures_of(model: nn.Module, device: str | torch.device | None) -> Device:
    """Return the figures of the named device, or by default of the device of the parameters."""
    types = sorted({parameter.device.type for parameter in model.parameters()})
    if others := [name for name in types if name not in ("cpu", "cuda", "meta")]:
        found = f"its parameters are on {listing(others)}"
        fix = 'plan it on the CPU or on the meta device and name the GPU: device="h100"'
        raise PlanError(Problem(type(model).__name__, found, "cpu, cuda, meta", fix=fix))
    if not isinstance(device, str | torch.device | None):
        raise PlanError(Problem("device", f"{device!r} names no device", "a name such as h100, or a torch.device"))
    if device is None and "meta" in types:
        raise PlanError(Problem("device", "the model is on the meta device", fix='name the device: device="h100"'))
    if device is None:
        device = next((parameter.device for parameter in model.parameters()), "cpu")
    return figures_of(device)


def plan(
    model: nn.Module,
    inputs: Inputs,
    budget: Any,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    optimizer: Any = None,
    parallelize: Callable[[nn.Module], Any] | None = None,
) -> Policy:
    """Return the policy that fits one training step of ``model`` into ``budget`` with little recomputation.

    ``inputs``: the arguments of the model, as a tuple or a dict.
    ``budget``: the peak of allocated bytes over forward and backward of one step, including parameters, gradients, and
    the state of ``optimizer`` (a name or an optimizer) if one is given. It is an int (bytes), a text such as
    ``"40GiB"``, a share of the way from the least peak to the peak without checkpointing, such as ``"50%"``, or one
    of the device's memory: ``"auto"`` or ``{"device": "90%"}``.
    ``loss_fn``: the loss is ``loss_fn(output)``, else ``output.loss``, else a scalar output.
    ``device``: the device whose figures price the ops (``"h100"``, …; default: the device of the parameters). For a
    model on the CPU or on the meta device, the ops that this device would run are planned; until then, no other thread
    may run a model on the CPU.
    ``parallelize``: a function that shards the copy in place (``fully_shard``, ``parallelize_module``), over a process
    group that sends nothing; the budget is then that of one rank.
    No data is read, and the model and torch's random state are not changed. The policy's ``table()`` shows the plan
    next to the usual choices, and ``save(path)`` writes it with its figures in comments.

    Raises ``PlanError`` for a budget below the least peak, an unknown loss or device, inputs that are neither a tuple
    nor a dict, or a forward that needs data; ``ModelError`` for a model that sac is already on or that has no blocks.
    """
    options: Any = {"loss_fn": loss_fn, "device": device, "optimizer": optimizer, "parallelize": parallelize}
    made = make_plan(model, inputs, budget, **options)
    return replace(made.policy, figures=made)


# -- The best of several sizes


def best_size(
    sizes: Sequence[int], plan_of: Callable[[int], Plan]
) -> tuple[int | None, dict[int, tuple[Plan | None, int]]]:
    """Return the size with the most throughput, and for each one that was tried its plan (or None) and its peak.

    The powers of two and both ends are tried, up to the first that does not fit; then the gap above the largest that
    fits is halved twice.
    """
    tried: dict[int, tuple[Plan | None, int]] = {}

    def fits(size: int) -> bool:
        try:
            made = plan_of(size)
            tried[size] = made, made.rows[0].peak
        except TooSmallError as error:
            tried[size] = None, error.least
        return tried[size][0] is not None

    low, high = 0, 0
    for size in sizes:
        if size in (sizes[0], sizes[-1]) or not size & (size - 1):
            if not fits(size):
                high = size
                break
            low = size
    for _ in range(2):
        middle = (low + high) // 2
        if 0 < low < middle < high:
            low, high = (middle, high) if fits(middle) else (low, middle)
    speeds = {size: size / made.step_s for size, (made, _) in tried.items() if made is not None}
    return max(speeds, key=speeds.__getitem__, default=None), dict(sorted(tried.items()))
