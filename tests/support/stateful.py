"""Programs whose forward and backward run in different surroundings, with regions and without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.full import FullConfig
from tests.support.blocks import FULL, FunctionBlock, Stack, install, policy, save, selective, square
from tests.support.training import built

Surrounding = Callable[[], AbstractContextManager[Any]]
Way = Callable[[Stack], Stack]


class Called(Stack):
    """A stack whose blocks are regions by `sac.checkpoint`."""

    options: dict[str, Any]

    def _call(self, index: int, block: nn.Module, *values: Tensor) -> Any:
        return sac.checkpoint(block, *values, **self.options)


def by_function(model: Stack, config: FullConfig | None = None, **options: Any) -> Stack:
    """Let each block be a region by `sac.checkpoint`."""
    model.__class__ = Called
    model.options = {"config": config, **options}
    return model


MATMULS = selective(policy(save("matmul")))
WAYS: dict[str, Way] = {
    "function": by_function,
    "reentrant": lambda model: by_function(model, use_reentrant=True),
    "full": lambda model: install(model, FULL),
    "rerun": lambda model: install(model, {**MATMULS, "engine": "rerun"}),
    "replay": lambda model: install(model, {**MATMULS, "engine": "replay"}),
    "context_fn": lambda model: install(model, MATMULS, "context_fn with module"),
}
ON_EACH_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def as_it_is(model: Stack) -> Stack:
    """No regions: the oracle."""
    return model


def stack_of(body: Callable[..., Any], count: int = 2) -> Callable[[], Stack]:
    """Return what builds a stack of blocks with this body; see `FunctionBlock`."""
    return lambda: Stack(*(FunctionBlock(body) for _ in range(count)))


class Scaled(nn.Module):
    """The value depends on a counter bound anew and on one changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("bound", torch.zeros(()))
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.bound = self.bound + 1
        with torch.no_grad():
            self.counted += 1
        return (self.linear(x) * self.bound + self.counted).sin()


def stack(*kinds: Callable[[], nn.Module]) -> Callable[[], Stack]:
    """Return what builds a stack of blocks of these classes."""
    return lambda: Stack(*(kind() for kind in kinds))


def stepped(
    build: Callable[[], Stack],
    way: Way,
    *,
    forward: Surrounding = nullcontext,
    backward: Surrounding = nullcontext,
    steps: int = 3,
) -> dict[str, Tensor]:
    """Run some steps (the first is the one in which a region learns); return outputs, gradients and buffers by name."""
    model = way(built(build))
    seen: dict[str, Tensor] = {}
    torch.manual_seed(3)
    for step in range(steps):
        (x,) = square()
        x.requires_grad_()
        with forward():
            out = model(x)
        with backward():
            out.float().square().sum().backward()
        seen |= {f"{step} output": out.detach().clone(), f"{step} gradient of input": x.grad}
        for name, parameter in model.named_parameters():
            seen[f"{step} gradient of {name}"] = parameter.grad.clone()
        for name, buffer in model.named_buffers():
            seen[f"{step} buffer {name}"] = buffer.clone()
    return seen


class Counter:
    """Counts its forwards, and lets the count go into the value."""

    def __init__(self) -> None:
        self.count = 0

    def snapshot(self) -> int:
        return self.count

    def restore(self, state: int) -> None:
        self.count = state


class StateOf:
    """A state provider for a generator of torch that the region does not hold."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def snapshot(self) -> Tensor:
        return self.generator.get_state()

    def restore(self, state: Tensor) -> None:
        self.generator.set_state(state)
