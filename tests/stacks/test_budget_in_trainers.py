"""A budget in the config under torch.compile and the Trainers of transformers and Lightning: met from step two on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.memory_timeline import StepMemory
from tests.support.model_zoo import tiny
from tests.unit.planner.small_training import X, Y, built, bytes_of, controller_of, within

STEPS = 4
Trained = tuple[list[Tensor], list[int], nn.Module]


class Peaks:
    """The peak of each step after the first, from its begin to the step of the optimizer."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._memory: StepMemory | None = None
        self._there = 0

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        self._there = bytes_of(model, optimizer)
        self._memory = StepMemory()

    def end(self) -> None:
        if self._memory is not None:
            self._memory.mark()
            self.found.append(self._there + self._memory.stop()[0][0])
            self._memory = None


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), Y.flatten())


def compiled(value: Any) -> Trained:
    """Blocks that are compiled each run in eager, within the budget."""
    peaks, model = Peaks(), built()
    if value is not None:
        sac.apply(model, value)
    for block in model.body.blocks:
        block.compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        if step:
            peaks.begin(model, optimizer)
        loss_of(model, X).backward()
        peaks.end()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.state_dict().values()], peaks.found, model


def hugging_face(value: Any) -> Trained:
    """Train a tiny Llama with the Trainer."""
    pytest.importorskip("transformers", reason="tests/stacks needs transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    from transformers import Trainer, TrainerCallback

    from sac.blocks.kv_cache import turn_off_cache
    from sac.compat.huggingface import SacCallback
    from tests.stacks.hf_training import arguments

    peaks = Peaks()

    class Measuring(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:
                peaks.begin(kwargs["model"], kwargs["optimizer"].optimizer)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            peaks.end()

    model, batch = tiny("llama", num_hidden_layers=6)
    turn_off_cache(model)
    tokens = batch["input_ids"][0].repeat(16)[:64]
    data = [{"input_ids": tokens.roll(shift), "labels": tokens.roll(shift)} for shift in range(16)]
    callbacks = [Measuring(), *([SacCallback(value)] if value is not None else [])]
    with tempfile.TemporaryDirectory() as folder:
        given = arguments(Path(folder), max_steps=STEPS, gradient_accumulation_steps=2)
        Trainer(model=model, args=given, train_dataset=data, callbacks=callbacks).train()
    return [*model.state_dict().values()], peaks.found, model


def lightning(value: Any) -> Trained:
    """Train the model of the small training with Lightning."""
    package = pytest.importorskip("lightning", reason="lightning is in the extra `stacks`")
    from sac.compat.lightning import SacCallback
    from tests.stacks.lightning_module import QUIET

    peaks = Peaks()

    class Module(package.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = built()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_train_batch_start(self, batch: Tensor, index: int) -> None:
            if self.global_step:
                peaks.begin(self, self.optimizers().optimizer)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            peaks.end()

        def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
            peaks.end()

    module = Module()
    data = torch.utils.data.DataLoader([X] * 16, batch_size=None)  # type: ignore[arg-type]
    callbacks = [SacCallback(value)] if value is not None else []
    options = {**QUIET, "enable_checkpointing": False, "accumulate_grad_batches": 2}
    package.Trainer(max_steps=STEPS, callbacks=callbacks, **options).fit(module, data)
    return [*module.state_dict().values()], peaks.found, module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("train", [compiled, hugging_face, lightning])
def test_a_budget_is_met(train: Callable[[Any], Trained]) -> None:
    low, high = (max(train(mode)[1]) for mode in ("full", None))
    budget = int(low + 0.6 * (high - low))
    weights, peaks, model = train(within(budget))
    plain, _, _ = train(None)
    assert all(torch.equal(one, other) for one, other in zip(weights, plain, strict=True))
    assert controller_of(model).fitted is not None
    assert low + 0.8 * (budget - low) <= max(peaks) <= budget
