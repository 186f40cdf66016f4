"""One training run for each mode, and the table that compares them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from itertools import count
from statistics import median
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sac.checkpointing import apply
from sac.errors import ConfigError, Problem, SacError, nearest
from sac.memory_timeline import MemoryTimeline, mark, measure_memory
from sac.ops.flops import ADDED_FORMULAS
from sac.planner.fakes import Inputs
from sac.reporting import Report, report
from sac.tables import (
    Table,
    bytes_text,
    flops_text,
    parameters_text,
    percent_text,
    screen_width,
    seconds_text,
    wrapped_text,
)
from sac.tools.models import BuiltModel
from sac.torch_private import tree_map_only

# -- The result of a comparison of modes: numbers only, for a table, a picture or JSON


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode's row. A mode that failed has an ``error`` and no numbers."""

    mode: str
    error: str = ""
    step_ms: tuple[float, ...] = ()  # without the first step, which warms up
    losses: tuple[float, ...] = ()  # one per step
    memory: MemoryTimeline | None = None
    kept_bytes: int = 0  # live at the end of forward, by the profiler
    step_flops: int = 0
    recompute_flops: int | None = None  # this mode's step minus that of `none`
    max_gradient_difference: float | None = None  # from `none`, after the first step's backward, over all parameters
    report: Report | None = None  # what sac itself reports as kept

    @property
    def peak_bytes(self) -> int:
        """The maximum of live bytes during one forward and backward, relative to its start."""
        return self.memory.peak_bytes if self.memory else 0

    @property
    def median_step_ms(self) -> float:
        """The median step time."""
        return median(self.step_ms) if self.step_ms else 0.0

    def curve(self) -> list[tuple[float, float]]:
        """Return live bytes over the step: forward from 0 to 1, backward from 1 to 2, so that modes line up."""
        assert self.memory is not None
        forward_ms, total_ms = self.memory.marks["forward"][-1][0], self.memory.times_ms[-1]
        return [
            (ms / forward_ms if ms <= forward_ms else 1 + (ms - forward_ms) / (total_ms - forward_ms), live)
            for ms, live in zip(self.memory.times_ms, self.memory.live_bytes, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the row's numbers for JSON."""
        if self.error:
            return {"mode": self.mode, "error": self.error}
        names = [each.name for each in fields(self) if each.name not in ("error", "memory")]
        numbers = {name: getattr(self, name) for name in (*names, "peak_bytes", "median_step_ms")}
        return numbers | {"report": None if self.report is None else self.report.to_dict()}


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """The rows of all modes, ``none`` first, and the model and machine they were measured on."""

    model: str
    parameters: int
    device: str
    torch: str
    steps: int
    rows: tuple[ModeResult, ...]

    @property
    def failed(self) -> bool:
        """True when a mode could not be run."""
        return any(row.error for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON, without the curves of the picture."""
        names = ("model", "parameters", "device", "torch", "steps")
        return {name: getattr(self, name) for name in names} | {"modes": [row.to_dict() for row in self.rows]}

    def table(self) -> Table:
        """Return a row per mode."""
        baseline = next((row for row in self.rows if not row.error), self.rows[0])
        rows = [(row.mode, *(("failed", *[""] * 4) if row.error else _cells(row, baseline))) for row in self.rows]
        return Table(("mode", *_NUMBERS), tuple(rows), right=_NUMBERS)

    def __str__(self) -> str:
        footnote = (
            f"{self.model}, {parameters_text(self.parameters)} parameters",
            f"on {self.device}, torch {self.torch}, without weights and gradients, from",
            "the profiler's memory events" + ("" if self.device == "cpu" else " and the allocator"),
            "kept: alive at the end of forward; peak: of forward and backward",
            f"step: median of {self.steps - 1} interleaved steps; grads: gradients, compared with none",
        )
        errors = [f"\n\n{row.mode}: {row.error}" for row in self.rows if row.error]
        return f"{self.table().text(screen_width())}\n{wrapped_text(footnote, screen_width())}{''.join(errors)}"

    def __repr__(self) -> str:
        peaks = [f"{row.mode} {'failed' if row.error else bytes_text(row.peak_bytes)}" for row in self.rows]
        return f"<Comparison of {self.model}: peaks {', '.join(peaks)}; print() shows all>"


_NUMBERS = ("kept", "peak", "recomputed", "step", "grads")


def _cells(row: ModeResult, baseline: ModeResult) -> tuple[str, ...]:
    difference = row.max_gradient_difference
    return (
        f"{bytes_text(row.kept_bytes)} {percent_text(row.kept_bytes, baseline.kept_bytes)}",
        bytes_text(row.peak_bytes),
        "?" if row.recompute_flops is None else flops_text(row.recompute_flops),
        f"{seconds_text(row.median_step_ms / 1e3)} ×{row.median_step_ms / baseline.median_step_ms:.2f}",
        "?" if difference is None else f"off {difference:.0e}" if difference else "equal",
    )


# -- Floating-point operations of one call, counted by torch's dispatcher, not by sac


def count_flops(fn: Callable[[], object]) -> int:
    """Run ``fn`` once and return the FLOPs of its matmuls, convolutions and attentions (one multiply-add is two).

    The counter is active during the whole call, so it also counts what backward recomputes.
    """
    counter = FlopCounterMode(display=False, custom_mapping=dict(ADDED_FORMULAS))
    counter.mod_tracker = modules = nullcontext()  # type: ignore[assignment]
    modules.parents = {"Global"}  # type: ignore[attr-defined]  # its tracker's hooks refuse `torch.autograd.grad`
    with counter:
        fn()
    return int(counter.get_total_flops())


# -- One mode's copy of a model: trained, then measured

Progress = Callable[[int, int, str], None]  # receives passes done, total passes, and the current pass
NONE = "none"
OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@dataclass(frozen=True, slots=True)
class Training:
    """How each copy is trained: ``steps`` of ``optimizer`` at ``learning_rate``, seeded with ``seed``."""

    steps: int = 5
    optimizer: str = "sgd"
    learning_rate: float = 1e-2
    seed: int = 0
    device: str = "cpu"
    loss_fn: Callable[[Any], Tensor] | None = None  # None: see `loss_of`

    def __post_init__(self) -> None:
        """Refuse settings that cannot run; raises ``ConfigError``."""
        if self.steps < 2:
            raise ConfigError(Problem("--steps", f"{self.steps} is too few: the first step warms up", "2, 3, 4, …"))
        if self.optimizer not in OPTIMIZERS:
            found, legal = f"unknown optimizer '{self.optimizer}'", ", ".join(OPTIMIZERS)
            raise ConfigError(Problem("--optimizer", found, legal, nearest(self.optimizer, OPTIMIZERS)))
        check_device(self.device)


def check_device(device: str) -> None:
    """Raise ``ConfigError`` if models cannot run on ``device`` here."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(Problem("--device", f"'{device}' cannot be measured", "cpu, cuda, cuda:0, …"))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(Problem("--device", "torch sees no CUDA device here", "cpu", fix="--device cpu"))


def inputs_on(device: str, inputs: Inputs) -> Inputs:
    """Return ``inputs`` with every tensor on ``device``."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)  # type: ignore[no-any-return]


def forward_backward(model: nn.Module, inputs: Inputs, loss_fn: Callable[[Any], Tensor] | None = None) -> float:
    """Run the model forward and backward, with ``mark("forward")`` between them, and return the loss.

    The loss is ``loss_fn`` of the output, else as in ``loss_of``.
    """
    loss = (loss_fn or loss_of)(model(**inputs) if isinstance(inputs, Mapping) else model(*inputs))
    mark("forward")  # the output is freed by now: what lives is what backward needs, and the loss
    torch.autograd.backward(loss)
    return loss.item()


def loss_of(output: Any) -> Tensor:
    """Return the scalar to train on: ``output.loss`` if it exists, else the mean square of the first tensor."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    if isinstance(output, Mapping):
        output = tuple(output.values())
    while isinstance(output, (tuple, list)):
        output = next(part for part in output if part is not None)
    return output if output.dim() == 0 else output.float().square().mean()  # type: ignore[no-any-return]


@final
class ModeRun:
    """One mode's copy of the model under measurement; ``error`` is set when sac refuses, and ends its part."""

    def __init__(
        self, mode: str, value: Any, model: nn.Module, inputs_of_step: Callable[[int], Inputs], training: Training
    ) -> None:
        self.mode, self.error, self.model = mode, "", model
        self._inputs_of_step, self._training = inputs_of_step, training
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer: torch.optim.Optimizer = OPTIMIZERS[training.optimizer](trained, lr=training.learning_rate)
        self._step_ms: list[float] = []
        self._losses: list[float] = []
        self._figures: dict[str, Any] = {}  # fields of ModeResult
        if mode != NONE:
            self.attempt(partial(apply, model, value))

    def attempt(self, part: Callable[[], object]) -> None:
        """Run a part of the measurement unless an earlier part failed; an error of sac becomes the row's text."""
        if self.error:
            return
        try:
            part()
        except (SacError, torch.OutOfMemoryError) as error:
            self.error = str(error)
            self.model = nn.Module()  # frees the copy
            self._optimizer.param_groups.clear()

    def train_step(self, step: int, reference: dict[str, Tensor] | None) -> None:
        """Train one step; with ``reference``, compare the gradients to it, or fill it if it is empty."""
        run = self._step(step)
        started = self._now()
        self._losses.append(run())
        backward_s = self._now() - started
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        if reference is not None and self.mode == NONE:
            reference.update(gradients)
        if reference:  # empty when `none` itself did not fit into memory
            self._figures["max_gradient_difference"] = largest_difference(reference, gradients)
        del gradients
        started = self._now()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if step > 0:
            self._step_ms.append((backward_s + self._now() - started) * 1e3)

    def count_flops(self) -> None:
        """Count one forward and backward; its gradients stay for ``measure_memory``."""
        self._figures["step_flops"] = count_flops(self._step(self._training.steps))

    def measure_memory(self) -> None:
        """Measure one forward and backward with the profiler.

        It adds to existing gradients, as with gradient accumulation: on a model cut to a few layers, gradients that
        backward allocates would hide the activations.
        """
        memory = measure_memory(self._step(self._training.steps), self._training.device)
        self._figures |= {"memory": memory, "kept_bytes": memory.at("forward")}
        self._optimizer.zero_grad(set_to_none=True)

    def result(self, baseline_flops: int | None) -> ModeResult:
        """Return the finished row."""
        if self.error:
            return ModeResult(self.mode, error=self.error)
        figures = {**self._figures, "step_ms": tuple(self._step_ms), "losses": tuple(self._losses)}
        if baseline_flops is not None:
            figures["recompute_flops"] = figures["step_flops"] - baseline_flops
        return ModeResult(self.mode, report=None if self.mode == NONE else report(self.model), **figures)

    def _step(self, step: int) -> Callable[[], float]:
        torch.manual_seed(self._training.seed + step)  # dropout draws the same numbers in every mode
        inputs = inputs_on(self._training.device, self._inputs_of_step(step))
        return partial(forward_backward, self.model, inputs, self._training.loss_fn)

    def _now(self) -> float:
        if self._training.device.startswith("cuda"):
            torch.cuda.synchronize(self._training.device)
        return time.perf_counter()


def largest_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference over all tensors; infinite if the names differ."""
    if expected.keys() != found.keys():
        return float("inf")
    unequal = [name for name in expected if not torch.equal(expected[name], found[name])]
    differences = [(expected[name].double() - found[name].double()).abs().max() for name in unequal]
    return torch.stack(differences).max().item() if differences else 0.0  # which is NaN if a difference is


# -- Training copies of one model side by side, one per mode, and measuring what each costs

# Every mode starts from the same weights and sees the same batches and seeds, so losses and gradients must be equal.
# Steps are interleaved, one of each mode in turn, so a machine that slows down slows all modes. Memory and FLOPs are
# measured in two extra passes after the training steps, in which nothing is timed.


def compare(built: BuiltModel, modes: Mapping[str, Any], training: Training, progress: Progress | None) -> Comparison:
    """Measure each of ``modes``, config values by the label of their row.

    ``none`` is always the first row: the others are measured against it, and it never goes through sac. A mode that sac
    refuses keeps its row, with the error. ``progress``: see ``Progress``.
    """
    model = built.model.to(training.device)
    runs = [
        ModeRun(label, value, deepcopy(model) if label != NONE else model, built.inputs_of_step, training)
        for label, value in {NONE: NONE, **modes}.items()
    ]
    total, done = len(runs) * (training.steps + 2), count()

    def attempt(run: ModeRun, label: str, part: Callable[[], None]) -> None:
        if progress is not None:
            progress(next(done), total, f"{run.mode}: {label}")
        run.attempt(part)

    reference: dict[str, Tensor] = {}
    for step in range(training.steps):
        turn = step % len(runs)  # each round starts with another mode; the first, whose gradients count, with `none`
        for run in runs[turn:] + runs[:turn]:
            attempt(run, f"step {step + 1}", partial(run.train_step, step, None if step else reference))
        reference = {}
    for run in runs:
        attempt(run, "FLOPs", run.count_flops)
        attempt(run, "memory", run.measure_memory)
    first = runs[0].result(None)
    rows = tuple(run.result(None if first.error else first.step_flops) for run in runs)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    device = torch.cuda.get_device_name(training.device) if training.device.startswith("cuda") else "cpu"
    return Comparison(built.name, parameters, device, torch.__version__, training.steps, rows)
