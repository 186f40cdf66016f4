"""A LightningModule around a stack of Llama-like blocks, and a Trainer that trains it for a step or more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import sac
from tests.stacks.composition import Outcome, forward_done, outcome
from tests.support.blocks import llama_stack

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Plain(lightning.LightningModule):
    """A module that is complete when it is built; `rate` is the learning rate."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate
        self.net: nn.Module | None = llama_stack()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.net(batch).square().mean()
        forward_done()
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


class Configured(Plain):
    """A module that is built in `configure_model`, with `value` put on in the same place; None: not there."""

    def __init__(self, value: Any = None, rate: float = 0.0) -> None:
        super().__init__(rate)
        self.net, self.value = None, value

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        self.net = llama_stack()
        if self.value is not None:
            sac.apply(self, self.value)


class Sharded(Configured):
    """A module whose `configure_model` shards its blocks over the mesh of the strategy."""

    def configure_model(self) -> None:
        if self.net is not None:
            return
        super().configure_model()
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


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


def elastic() -> TorchElasticEnvironment:
    """The environment of processes that were started by somebody else, with a process group."""
    return TorchElasticEnvironment()


MODULES: dict[str, Callable[[Any], lightning.LightningModule]] = {
    "configure_model": lambda value: Configured(value),
    "apply": lambda value: _applied(Plain(), value),
    "callback": lambda value: Plain(),
    "callback and configure_model": lambda value: Configured(),
    "callback and fully_shard": lambda value: Sharded(),
}
"""The ways to apply it; the last three also need a callback."""


def _applied(module: Plain, value: Any) -> Plain:
    return sac.apply(module, value)


def callbacks(way: str, value: Any) -> list[Any]:
    """The callbacks that a way to put it on needs."""
    from sac.compat.lightning import SacCallback

    return [SacCallback(value)] if way.startswith("callback") else []
