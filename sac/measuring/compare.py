"""Trains copies of one model, one per mode, side by side, and measures what each costs.

Every mode starts from the same weights and sees the same batches and seeds, so losses and gradients must be equal.
Steps are interleaved, one of each mode in turn, so that a machine that slows down slows all modes. Memory and FLOPs are
measured in two further passes after the training steps, in which nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor

from sac.measuring.built_model import BuiltModel
from sac.measuring.comparison import Comparison
from sac.measuring.mode_run import NONE, ModeRun, Training

Progress = Callable[[int, int, str], None]


def compare(
    build: Callable[[], BuiltModel],
    modes: Sequence[str],
    training: Training | None = None,
    *,
    progress: Progress | None = None,
) -> Comparison:
    """Measure each of ``modes`` (config values: none, full, selective, a policy's name or file) on one model.

    ``none`` is always the first row: the others are measured against it, and it never goes through sac. A mode that sac
    refuses keeps its row, with the error. ``progress`` is told (passes done, passes in all, what runs now).
    """
    training = training or Training()
    built = build()
    model = built.model.to(training.device)
    labels = [NONE, *dict.fromkeys(mode for mode in modes if mode != NONE)]
    copies = [model, *(deepcopy(model) for _ in labels[1:])]
    runs = [ModeRun(label, copy, built.inputs_of_step, training) for label, copy in zip(labels, copies, strict=True)]
    del copies
    advance = _counted(progress, len(runs) * (training.steps + 2))
    for run in runs[1:]:
        run.attempt(run.apply)
    _train(runs, training.steps, advance)
    for run in runs:
        advance(f"{run.mode}: FLOPs")
        run.attempt(run.count_flops)
        advance(f"{run.mode}: memory")
        run.attempt(run.measure_memory)
    baseline_flops = None if runs[0].error else runs[0].step_flops
    rows = tuple(run.result(baseline_flops) for run in runs)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    device = torch.cuda.get_device_name(training.device) if training.device.startswith("cuda") else "cpu"
    return Comparison(built.name, parameters, device, torch.__version__, training.steps, rows)


def _counted(progress: Progress | None, total: int) -> Callable[[str], None]:
    done = iter(range(total + 1))

    def advance(label: str) -> None:
        if progress is not None:
            progress(next(done), total, label)

    return advance


def _train(runs: list[ModeRun], steps: int, advance: Callable[[str], None]) -> None:
    for step in range(steps):
        reference: dict[str, Tensor] = {}
        turn = step % len(runs)  # another mode begins each round; `none` begins the first, whose gradients count
        for run in runs[turn:] + runs[:turn]:
            advance(f"{run.mode}: step {step + 1}")
            run.attempt(partial(run.train_step, step, reference if step == 0 else None))
