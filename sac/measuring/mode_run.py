"""One mode's copy of a model: trained, then measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import sac
from sac.blocks.stacks import find_stacks
from sac.errors import ConfigError, Problem, SacError, nearest
from sac.measuring.built_model import Inputs
from sac.measuring.comparison import ModeResult
from sac.measuring.step_flops import count_flops
from sac.memory_timeline import MemoryTimeline, mark, measure_memory

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

    def __post_init__(self) -> None:
        """Refuse what cannot be run; raises ``ConfigError``."""
        problems = []
        if self.steps < 2:
            found = f"{self.steps} steps cannot be timed: the first one warms up"
            problems.append(Problem("--steps", found, "2, 3, 4, …"))
        if self.optimizer not in OPTIMIZERS:
            found = f"unknown optimizer '{self.optimizer}'"
            problems.append(Problem("--optimizer", found, ", ".join(OPTIMIZERS), nearest(self.optimizer, OPTIMIZERS)))
        try:
            check_device(self.device)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)


def check_device(device: str) -> None:
    """Raise ``ConfigError`` if models cannot run on ``device`` here."""
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(Problem("--device", f"'{device}' cannot be measured", "cpu, cuda"))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(Problem("--device", "torch sees no CUDA device here", "cpu", fix="--device cpu"))
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ConfigError(Problem("--device", f"'{device}' is no device of torch", "cpu, cuda, cuda:0, …")) from error


def inputs_on(device: str, inputs: Inputs) -> Inputs:
    """Return ``inputs`` with every tensor on ``device``."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)  # type: ignore[no-any-return]


def forward_backward(model: nn.Module, inputs: Inputs) -> float:
    """Run the model forward and backward and return the loss; ``mark("forward")`` stands between them."""
    loss = loss_of(model(**inputs) if isinstance(inputs, Mapping) else model(*inputs))
    mark("forward")  # the output is dropped by now: what lives is what backward needs, and the loss
    torch.autograd.backward(loss)
    return loss.item()


def loss_of(output: Any) -> Tensor:
    """Return the scalar to train on: ``output.loss`` where there is one, else the mean square of its first tensor."""
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
    """One mode's copy of the model while it is measured; ``error`` is set once sac has refused, and ends its part."""

    def __init__(
        self, mode: str, model: nn.Module, inputs_of_step: Callable[[int], Inputs], training: Training
    ) -> None:
        self.mode = mode
        self.error = ""
        self.step_flops = 0
        self._model: nn.Module | None = model
        self._inputs_of_step = inputs_of_step
        self._training = training
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer: torch.optim.Optimizer = OPTIMIZERS[training.optimizer](trained, lr=training.learning_rate)
        self._step_ms: list[float] = []
        self._losses: list[float] = []
        self._max_difference: float | None = None
        self._memory: MemoryTimeline | None = None
        self._region_kept_bytes: dict[str, int] = {}

    def attempt(self, part: Callable[[], None]) -> None:
        """Run a part of the measuring unless an earlier one failed; an error of sac's becomes the row's text."""
        if self.error:
            return
        try:
            part()
        except (SacError, torch.OutOfMemoryError) as error:
            self.error = str(error)
            self._model = None  # frees the copy
            self._optimizer.param_groups.clear()

    def apply(self) -> None:
        """Put the mode on the model."""
        sac.apply(self._live_model, self.mode)

    def train_step(self, step: int, reference: dict[str, Tensor] | None) -> None:
        """Train one step; with ``reference`` compare the gradients to it, or fill it where it is empty."""
        inputs = self._inputs(step)
        self._synchronize()
        started = time.perf_counter()
        loss = forward_backward(self._live_model, inputs)
        self._synchronize()
        backward_s = time.perf_counter() - started
        if reference is not None:
            self._compare_gradients(reference)
        started = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._synchronize()
        if step > 0:
            self._step_ms.append((backward_s + time.perf_counter() - started) * 1e3)
        self._losses.append(loss)

    def count_flops(self) -> None:
        """Count one forward and backward; its gradients stay, for ``measure_memory``."""
        inputs = self._inputs(self._training.steps)
        self.step_flops = count_flops(partial(forward_backward, self._live_model, inputs))

    def measure_memory(self) -> None:
        """Measure one forward and backward by the profiler, with marks around each block.

        It adds to the gradients that are there, as with gradient accumulation: on a model that is cut to a few layers,
        gradients that backward allocates would hide the activations.
        """
        inputs = self._inputs(self._training.steps)
        blocks = blocks_of(self._live_model)
        with ExitStack() as hooks:
            for path, block in blocks.items():
                hooks.callback(block.register_forward_pre_hook(partial(_mark_entry, path)).remove)
                hooks.callback(block.register_forward_hook(partial(_mark_exit, path)).remove)
            self._memory = measure_memory(partial(forward_backward, self._live_model, inputs), self._training.device)
        marks = self._memory.marks
        for path in blocks:
            entries, exits = marks.get(f"in {path}", ()), marks.get(f"out {path}", ())
            self._region_kept_bytes[path] = sum(
                after - before for (_, before), (_, after) in zip(entries, exits, strict=True)
            )
        self._optimizer.zero_grad(set_to_none=True)

    def result(self, baseline_flops: int | None) -> ModeResult:
        """Return the finished row."""
        if self.error or self._memory is None:
            return ModeResult(self.mode, error=self.error)
        return ModeResult(
            mode=self.mode,
            memory=self._memory,
            kept_bytes=self._memory.at("forward"),
            region_kept_bytes=self._region_kept_bytes,
            step_flops=self.step_flops,
            recompute_flops=None if baseline_flops is None else self.step_flops - baseline_flops,
            step_ms=tuple(self._step_ms),
            losses=tuple(self._losses),
            max_gradient_difference=self._max_difference,
            report=None if self.mode == NONE else sac.report(self._live_model).to_dict(),
        )

    @property
    def _live_model(self) -> nn.Module:
        assert self._model is not None, "a failed mode is not run again"
        return self._model

    def _inputs(self, step: int) -> Inputs:
        torch.manual_seed(self._training.seed + step)  # dropout draws the same numbers in every mode
        return inputs_on(self._training.device, self._inputs_of_step(step))

    def _compare_gradients(self, reference: dict[str, Tensor]) -> None:
        gradients = {name: p.grad for name, p in self._live_model.named_parameters() if p.grad is not None}
        if self.mode == NONE:
            reference.update(gradients)
            self._max_difference = 0.0
        elif reference:  # empty when `none` itself did not fit into memory
            self._max_difference = largest_difference(reference, gradients)

    def _synchronize(self) -> None:
        if self._training.device.startswith("cuda"):
            torch.cuda.synchronize(self._training.device)


def largest_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference over all tensors; infinite when the names differ."""
    if expected.keys() != found.keys():
        return float("inf")
    unequal = [name for name in expected if not torch.equal(expected[name], found[name])]
    differences = [(expected[name].double() - found[name].double()).abs().max().item() for name in unequal]
    return float("nan") if any(map(isnan, differences)) else max(differences, default=0.0)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks around which kept bytes are measured: the same for all modes, whatever their regions are."""
    return {node.path: node.module for stack in find_stacks(model) for node in stack.nodes}


def _mark_entry(path: str, *_: object) -> None:
    mark(f"in {path}")


def _mark_exit(path: str, *_: object) -> None:
    mark(f"out {path}")
