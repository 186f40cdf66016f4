"""A budget in the config under the Trainer of transformers and that of Lightning: met from the second step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sac.memory_timeline import StepMemory
from sac.planner.controller import Controller
from tests.support.model_zoo import tiny
from tests.unit.planner.small_training import Y, built, bytes_of, controller_of, within

STEPS = 4


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


# -- transformers


def hugging_face(folder: Path, value: Any, **options: Any) -> tuple[list[float], list[Tensor], list[int], nn.Module]:
    """Train a tiny Llama with the Trainer; return its losses and weights, the peaks, and the model."""
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
    given = arguments(folder, max_steps=STEPS, per_device_train_batch_size=2, **options)
    trainer = Trainer(model=model, args=given, train_dataset=data, callbacks=callbacks)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [*model.state_dict().values()], peaks.found, model


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulation"])
def test_trainer_of_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    (low, high) = (max(hugging_face(tmp_path, mode, **options)[2]) for mode in ("full", None))
    budget = int(low + 0.6 * (high - low))
    losses, weights, peaks, model = hugging_face(tmp_path, within(budget), **options)
    plain, plain_weights, _, _ = hugging_face(tmp_path, None, **options)
    assert losses == plain
    assert all(torch.equal(one, other) for one, other in zip(weights, plain_weights, strict=True))
    controller = controller_of(model)
    assert isinstance(controller, Controller)
    assert controller.fitted is not None
    assert low + 0.8 * (budget - low) <= max(peaks) <= budget


# -- Lightning


def lightning_training(value: Any, **options: Any) -> tuple[list[Tensor], list[int], nn.Module]:
    """Train the model of the small training with Lightning; return its weights, the peaks, and the module."""
    lightning = pytest.importorskip("lightning", reason="lightning is in the extra `stacks`")
    from sac.compat.lightning import SacCallback
    from tests.stacks.lightning_module import QUIET
    from tests.unit.planner.small_training import X

    peaks = Peaks()

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = built()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch).flatten(0, 1), Y.flatten())

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
    trainer = lightning.Trainer(max_steps=STEPS, enable_checkpointing=False, callbacks=callbacks, **QUIET, **options)
    trainer.fit(module, data)
    return [*module.state_dict().values()], peaks.found, module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulation"])
def test_trainer_of_lightning(options: dict[str, Any]) -> None:
    (low, high) = (max(lightning_training(mode, **options)[1]) for mode in ("full", None))
    budget = int(low + 0.6 * (high - low))
    weights, peaks, module = lightning_training(within(budget), **options)
    plain, _, _ = lightning_training(None, **options)
    assert all(torch.equal(one, other) for one, other in zip(weights, plain, strict=True))
    assert controller_of(module).fitted is not None
    assert low + 0.8 * (budget - low) <= max(peaks) <= budget
