"""A few steps of a Hugging Face Trainer on a tiny model, and what they gave."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.blocks.kv_cache import turn_off_cache
from tests.stacks.composition import Outcome, unwrapped
from tests.stacks.composition import train as stepped
from tests.support.model_zoo import tiny

STEPS = 3
Prepare = Callable[[nn.Module], nn.Module]


def arguments(folder: Path, kind: type | None = None, **changes: Any) -> Any:
    """Training arguments for a few steps on the CPU that write nothing and tell each loss."""
    from transformers import TrainingArguments

    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return (kind or TrainingArguments)(**(given | changes))


def rows(batch: dict[str, Tensor], copies: int = 4) -> list[dict[str, Tensor]]:
    """A data set of the rows of a batch, some of them with their tokens turned around."""
    single = [{name: value[row] for name, value in batch.items()} for row in range(len(batch["input_ids"]))]
    return [{name: value.roll(shift) for name, value in row.items()} for shift in range(copies) for row in single]


def train(
    folder: Path,
    prepare: Prepare,
    *,
    callbacks: list[Any] | None = None,
    model_init: bool = False,
    resume: str | None = None,
    **changes: Any,
) -> Outcome:
    """Train a tiny Llama that `prepare` has been called on, or that it makes in `model_init`."""
    from transformers import Trainer

    _, batch = tiny("llama")
    made = {"model_init": lambda: llama(prepare)} if model_init else {"model": llama(prepare)}
    data = rows(batch, 1) if "eval_strategy" in changes else None
    trainer = Trainer(
        args=arguments(folder, **changes), train_dataset=rows(batch), eval_dataset=data, callbacks=callbacks, **made
    )
    trainer.train(resume_from_checkpoint=resume)
    return told(trainer, batch)


def llama(prepare: Prepare) -> nn.Module:
    """A tiny Llama with dropout, prepared."""
    model, _ = tiny("llama", dropout=0.1)
    turn_off_cache(model)
    return prepare(model)


def told(trainer: Any, batch: dict[str, Tensor]) -> Outcome:
    """The losses and the weights of a trainer that has trained, and a step of its model on `batch`, measured."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses
    weights = {unwrapped(name): value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return replace(measured(trainer.model, batch), losses=losses, state=weights)


def measured(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> Outcome:
    """Forward and backward of a model in training."""
    return stepped(model.train(), lambda model: model(**batch, **options).loss, steps=1)


def applied(value: Any) -> Prepare:
    return lambda model: sac.apply(model, value)


def untouched(model: nn.Module) -> nn.Module:
    """Prepare nothing."""
    torch.manual_seed(0)
    return model


def trainer(mode: Any, **options: Any) -> Outcome:
    """One row of the matrix of stacks."""
    pytest.importorskip("transformers")
    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder), applied(mode), **options)
