"""A small training whose loss and optimizer are outside of the model, with the allocator's peak of each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import sac
from sac.blocks.install import regions_of
from sac.memory_timeline import measure_memory
from sac.planner.controller import Controller
from tests.support.blocks import llama_stack

LAYERS, DIM, VOCABULARY = 4, 64, 64
X = torch.arange(4 * 64).reshape(4, 64) * 7 % VOCABULARY
Y = X.roll(1, 1)


class Language(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.body = llama_stack(LAYERS, DIM, 4)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, x_BT: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x_BT)))


def built() -> Language:
    torch.manual_seed(1)
    return Language()


def within(budget: Any, **more: Any) -> dict[str, Any]:
    """Return the config of a budget, without a file."""
    return {"mode": "selective", "budget": budget, **more}


@dataclass
class Trained:
    """What a training has left: the model, the losses, and the peak in bytes of each pass after the first step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[Tensor] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def state(self) -> Iterator[Tensor]:
        yield from self.losses
        yield from self.model.state_dict().values()
        yield from (leaf for leaf in tree_leaves(self.optimizer.state_dict()) if isinstance(leaf, Tensor))

    def is_equal(self, other: Trained) -> bool:
        return all(torch.equal(one, two) for one, two in zip(self.state(), other.state(), strict=True))


def bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Any) -> int:
    """Return the bytes of what is there before a pass: parameters, gradients, state and inputs."""
    gradients = [parameter.grad for parameter in model.parameters()]
    known = [*model.parameters(), *model.buffers(), *gradients, *tree_leaves((dict(optimizer.state), inputs))]
    storages = [one.untyped_storage() for one in known if isinstance(one, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def trained(
    value: Any,
    *,
    steps: int = 3,
    unmeasured: int = 1,
    passes: int = 1,
    set_to_none: bool = True,
    model: nn.Module | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    resume: Trained | None = None,
    batch: Callable[[int], tuple[Tensor, Tensor]] = lambda step: (X, Y),
) -> Trained:
    """Train for some steps of some passes each; with ``resume``, from the state of that training.

    While a step is measured, sac cannot measure it: ``unmeasured`` steps come before.
    """
    model = model or built()
    found = Trained(model, optimizer(model.parameters(), lr=1e-2))
    if resume is not None:
        model.load_state_dict(resume.model.state_dict())
        found.optimizer.load_state_dict(copy.deepcopy(resume.optimizer.state_dict()))  # torch takes the tensors over
    if value is not None:
        sac.apply(model, value)
    for step in range(steps):
        x, y = batch(step)

        def run(x: Tensor = x, y: Tensor = y) -> None:
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            found.losses.append(loss.detach())

        for _ in range(passes):
            if step < unmeasured:
                run()
            else:
                there = bytes_of(model, found.optimizer, x)
                found.peaks.append(there + measure_memory(run).peak_bytes)
        found.optimizer.step()
        found.optimizer.zero_grad(set_to_none=set_to_none)
    return found


@dataclass
class Scheduled:
    """What some steps of micro-batches have left: the model, and the peak in bytes of each step after the first."""

    model: nn.Module
    losses: list[Tensor] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def is_equal(self, other: Scheduled) -> bool:
        mine, theirs = ([*one.losses, *one.model.state_dict().values()] for one in (self, other))
        return all(torch.equal(one, two) for one, two in zip(mine, theirs, strict=True))


def scheduled(order: str, value: Any, steps: int = 3) -> Scheduled:
    """Train with a forward (F) and backward (B) of each micro-batch, in this order in each step."""
    found = Scheduled(built())
    if value is not None:
        sac.apply(found.model, value)
    optimizer = torch.optim.AdamW(found.model.parameters(), lr=1e-2)

    def run() -> None:
        losses: dict[str, Tensor] = {}
        for what, number in order.split():
            if what == "F":
                x = X.roll(int(number), 1)
                losses[number] = nn.functional.cross_entropy(found.model(x).flatten(0, 1), Y.flatten())
            else:
                losses[number].backward()
                found.losses.append(losses.pop(number).detach())

    for step in range(steps):
        if step:
            found.peaks.append(bytes_of(found.model, optimizer) + measure_memory(run).peak_bytes)
        else:
            run()
        optimizer.step()
        optimizer.zero_grad()
    return found


@cache
def ends(passes: int = 1) -> tuple[int, int]:
    """Return the peak of a step under full recomputation, and without checkpointing."""
    return max(trained("full", passes=passes).peaks), max(trained(None, passes=passes).peaks)


def share(part: float, passes: int = 1) -> int:
    """Return a budget between the two ends."""
    low, high = ends(passes)
    return int(low + part * (high - low))


def controller_of(model: nn.Module) -> Controller:
    found = next(regions_of(model)).applied.fitting
    assert isinstance(found, Controller)
    return found
