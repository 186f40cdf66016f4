"""FP8 training as TransformerEngine does it: scales and histories are bit for bit those of its own checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.compat import megatron
from sac.compat import transformer_engine as te
from sac.engine.fp8 import REASON
from sac.errors import RegionError, SacWarning
from tests.support.blocks import FULL, Stack, install, policy, save, selective
from tests.support.fp8_modules import (
    Block,
    FP8GlobalStateManager,
    GlobalState,
    Recipe,
    ScalingState,
    autocast,
    own_checkpoint,
)
from tests.support.fp8_modules import fp8_library as fp8_library
from tests.support.training import assert_same, built

pytestmark = [pytest.mark.usefixtures("fp8_library"), pytest.mark.filterwarnings("error")]

MATMULS = selective(policy(save("matmul")))


class Called(Stack):
    """A stack whose blocks are called by a function of the library's form."""

    call: Any

    def _call(self, index: int, block: nn.Module, *values: Tensor) -> Any:
        return self.call(block, *values)


def by(call: Callable[..., Any]) -> Callable[[Stack], Stack]:
    def put(model: Stack) -> Stack:
        model.__class__, model.call = Called, call
        return model

    return put


WAYS: dict[str, Callable[[Stack], Stack]] = {
    "compat": by(partial(te.checkpoint, use_reentrant=False)),
    "compat reentrant": by(te.checkpoint),
    "megatron": by(lambda block, *values: megatron.checkpoint(block, False, *values)),
    "function": by(sac.checkpoint),
    "full": lambda model: install(model, FULL),
    "full reentrant": lambda model: install(model, {**FULL, "use_reentrant": True}),
    "rerun": lambda model: install(model, {**MATMULS, "engine": "rerun"}),
    "auto": lambda model: install(model, MATMULS),
    "a saved layer": lambda model: install(model, selective(policy({"module": "first", "do": "save"}))),
    "context_fn": lambda model: install(model, MATMULS, "context_fn with module"),
}


def trained(way: Any, program: Any, blocks: Callable[[], Stack], *, steps: int) -> dict[str, Tensor]:
    """Train; return losses, gradients, weights, scales and histories of each step."""
    FP8GlobalStateManager.state = GlobalState()
    model = way(built(blocks))
    torch.manual_seed(5)
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        losses = program(model, step)
        seen |= {f"{step} loss {index}": loss.detach() for index, loss in enumerate(losses)}
        for name, module in model.named_modules():
            scales = [one for one in getattr(module, "fp8_meta", {}).values() if isinstance(one, ScalingState)]
            seen |= {f"{step} {name} {i} {j}": x for i, one in enumerate(scales) for j, x in enumerate(one.copied())}
        for name, parameter in model.named_parameters():
            seen[f"{step} gradient of {name}"] = parameter.grad.clone()
            with torch.no_grad():
                parameter -= 0.05 * parameter.grad
            parameter.grad = None
    return seen


def loss_of(model: nn.Module, step: int, batch: int = 0) -> Tensor:
    x = torch.randn(4, 8) * (1 + 3 * torch.rand(())) + step % 3 + batch
    return model(x.requires_grad_()).square().mean()


def in_order(order: str, recipe: Recipe | None = None) -> Callable[[nn.Module, int], list[Tensor]]:
    """Return a step with micro-batches in this order: `0` is the forward of the first one, `a` its backward."""

    def step(model: nn.Module, number: int) -> list[Tensor]:
        losses = {}
        for letter in order:
            if letter.isdigit():
                with autocast(recipe=recipe):
                    losses[int(letter)] = loss_of(model, number, int(letter))
            else:
                losses[ord(letter) - ord("a")].backward()
        return [*losses.values()]

    return step


def no_autocast(model: nn.Module, step: int) -> list[Tensor]:
    loss = loss_of(model, step)
    loss.backward()
    return [loss]


def stack(**options: Any) -> Callable[[], Stack]:
    return lambda: Stack(Block(**options), Block(**options))


def shared() -> Stack:
    """One block in two regions, another between them."""
    block = Block()
    return Stack(block, Block(), block)


PROGRAMS: dict[str, tuple[Any, Callable[[], Stack], int]] = {
    "one autocast": (in_order("0a"), stack(), 5),
    "updates by ops": (in_order("0a", Recipe(seen=True)), stack(), 5),
    "autocasts inside": (no_autocast, stack(inner=True), 5),
    "first in, first out": (in_order("012abc"), stack(), 4),
    "pipeline": (in_order("01a2b3cd"), stack(), 4),
    "shared": (in_order("0a"), shared, 5),
}


@functools.cache
def by_the_library(program: str) -> dict[str, Tensor]:
    step, blocks, steps = PROGRAMS[program]
    return trained(by(own_checkpoint), step, blocks, steps=steps)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_steps_are_those_of_the_librarys_checkpoint(way: str, program: str) -> None:
    step, blocks, steps = PROGRAMS[program]
    assert_same(by_the_library(program), trained(WAYS[way], step, blocks, steps=steps))


@pytest.mark.parametrize("value", [FULL, MATMULS], ids=["full", "selective"])
def test_another_order_is_an_error(value: dict[str, Any]) -> None:
    """The library takes its copies of scales in the order of the forwards."""
    with pytest.raises(RegionError, match="in recomputation"):
        trained(lambda model: install(model, {**value, "verify": "always"}), in_order("012cba"), stack(), steps=5)


def test_such_regions_run_again_as_python_and_the_report_says_why() -> None:
    def reported(value: Any) -> Any:
        model = install(built(stack()), value)
        in_order("0a")(model, 0)
        return sac.report(model)

    (kind,) = reported(MATMULS).kinds
    assert (kind.engine, kind.no_replay) == ("rerun", REASON)
    assert f"  run again as Python, not replayed: {REASON}" in str(reported(FULL)).splitlines()
    with pytest.warns(SacWarning, match="blocks.0: replay cannot be used here: its modules keep FP8 state"):
        reported({**MATMULS, "engine": "replay"})


@pytest.mark.parametrize("way", ["compat reentrant", "full reentrant"])
def test_they_are_never_reentrant(way: str) -> None:
    model, x = WAYS[way](built(stack())), torch.randn(4, 8, requires_grad=True)
    with autocast():
        loss = model(x).sum()
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.shape == x.shape
    assert not any(block.first.fp8_meta["queue"] for block in model.blocks)  # each copy has been taken
