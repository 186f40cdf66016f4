"""A LightningModule around a stack of Llama-like blocks, and a Trainer that trains it for a step or more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import sac
from tests.stacks.composition import Outcome, forward_done, outcome
from tests.support.blocks import llama_stack

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(lightning.LightningModule):
    """Blocks that are built at once, or `late`: in `configure_model`, with `value` put on there, and `shards` sharded.

    `rate` is the learning rate.
    """

    def __init__(self, value: Any = None, *, late: bool = True, shards: bool = False, rate: float = 0.0) -> None:
        super().__init__()
        self.value, self.shards, self.rate = value, shards, rate
        self.net: Any = None if late else llama_stack()

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        self.net = llama_stack()
        if self.value is not None:
            sac.apply(self, self.value)
        for part in (*self.net.blocks, self.net) if self.shards else ():
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.net(batch).square().mean()
        forward_done()
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


def batches(count: int = 2) -> torch.utils.data.DataLoader:
    """`count` batches, [2, 8, 32] each; those of each rank differ where a sampler divides them."""
    data = torch.randn(count, 2, 8, 32, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(data, batch_size=None)


def fit(module: lightning.LightningModule, steps: int = 1, ckpt_path: str | None = None, **options: Any) -> Any:
    """Fit for `steps` optimizer steps and return the Trainer."""
    given = {"enable_checkpointing": False, **QUIET, **options}
    if callable(strategy := given.get("strategy")):
        given["strategy"] = strategy()  # a strategy object serves one Trainer
    per_step = given.get("accumulate_grad_batches", 1)
    trainer = lightning.Trainer(max_steps=steps, **given)
    trainer.fit(module, batches(4 * per_step), ckpt_path=ckpt_path)
    return trainer


def measured_fit(build: Callable[[], lightning.LightningModule], *, anew: bool = False, **options: Any) -> Outcome:
    """What fitting for one step gives; with a rate of 0 each is the same.

    `anew`: a module for each step, where the strategy cannot set up a module twice.
    """
    holder = nn.Module()
    holder.module = build()

    def step() -> None:
        if anew:
            holder.module = build()
        fit(holder.module, **options)

    step()  # configure_model
    return outcome(step, holder)


MODULES: dict[str, Callable[[Any], lightning.LightningModule]] = {
    "configure_model": lambda value: Module(value),
    "apply": lambda value: sac.apply(Module(late=False), value),
    "callback": lambda value: Module(late=False),
    "callback and configure_model": lambda value: Module(),
    "callback and fully_shard": lambda value: Module(shards=True),
}
"""The ways to apply it; the last three also need a callback."""


def callbacks(way: str, value: Any) -> list[Any]:
    """The callbacks that a way to put it on needs."""
    from sac.compat.lightning import SacCallback

    return [SacCallback(value)] if way.startswith("callback") else []
