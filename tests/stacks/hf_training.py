"""A few steps of a Hugging Face Trainer on a tiny model, and what they gave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.kv_cache import turn_off_cache
from tests.stacks.composition import WRAPPED_NAMES, Outcome, forward_done, outcome
from tests.support.model_zoo import tiny
from tests.support.training import same_bits

STEPS = 3


@dataclass(frozen=True)
class Trained:
    """Logged losses and final weights of a training, and one step of the model that came out, measured."""

    losses: list[float]
    weights: dict[str, Tensor]
    step: Outcome

    def differs(self, other: Trained) -> list[str]:
        """Names of the weights that differ in any bit; `losses` where those differ."""
        assert len(self.losses) == len(other.losses) > 0
        names = sorted(set(self.weights) | set(other.weights))
        both = set(self.weights) & set(other.weights)
        wrong = [n for n in names if n not in both or not same_bits(self.weights[n], other.weights[n])]
        return (["losses"] if self.losses != other.losses else []) + wrong


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
    prepare: Callable[[nn.Module], nn.Module],
    *,
    callbacks: list[Any] | None = None,
    model_init: bool = False,
    resume: str | None = None,
    **changes: Any,
) -> Trained:
    """Train a tiny Llama that `prepare` has been called on, or that it makes in `model_init`."""
    from transformers import Trainer

    _, batch = tiny("llama")

    def build() -> nn.Module:
        model, _ = tiny("llama", dropout=0.1)
        turn_off_cache(model)
        return prepare(model)

    made = {"model_init": build} if model_init else {"model": build()}
    changes = {"eval_dataset": rows(batch, 1)} | changes if "eval_strategy" in changes else changes
    data = changes.pop("eval_dataset", None)
    trainer = Trainer(
        args=arguments(folder, **changes), train_dataset=rows(batch), eval_dataset=data, callbacks=callbacks, **made
    )
    trainer.train(resume_from_checkpoint=resume)
    return told(trainer, batch)


def told(trainer: Any, batch: dict[str, Tensor]) -> Trained:
    """What a trainer that has trained tells, and a step of its model on `batch`."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    model = trainer.model
    weights = {}
    for name, value in model.state_dict().items():
        for wrapped in WRAPPED_NAMES:
            name = name.replace(wrapped, "")
        weights[name] = value.detach().clone()
    return Trained(losses, weights, measured(model, batch))


def measured(model: nn.Module, batch: dict[str, Tensor]) -> Outcome:
    """Forward and backward of a model in training."""
    model.train()

    def step() -> Tensor:
        loss: Tensor = model(**batch).loss
        forward_done()
        loss.backward()
        return loss

    return outcome(step, model, steps=1)


def saved_memory(ours: Trained, reference: Trained) -> bool:
    """Whether checkpointing was on: something was run again, and less was kept."""
    return ours.step.flops > reference.step.flops and ours.step.kept_bytes < reference.step.kept_bytes


def untouched(model: nn.Module) -> nn.Module:
    """Prepare nothing."""
    torch.manual_seed(0)
    return model
