"""FP8 training as TransformerEngine does it: scales and histories are bit for bit those of its own checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.compat import megatron
from sac.compat import transformer_engine as te
from sac.engine.fp8 import REASON
from sac.errors import ConfigError, RegionError, SacWarning
from tests.support.blocks import FULL, Stack, install, policy, save, selective
from tests.support.fp8_modules import MODULE, Block, FP8GlobalStateManager, Recipe, autocast, own_checkpoint, state_of
from tests.support.fp8_modules import fp8_library as fp8_library
from tests.support.training import assert_same, built

pytestmark = [pytest.mark.usefixtures("fp8_library"), pytest.mark.filterwarnings("error")]

WIDTH = 8
MATMULS = selective(policy(save("matmul")))
ONE_LAYER = selective(policy({"module": "first", "do": "save"}))


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
    "a saved layer": lambda model: install(model, ONE_LAYER),
    "context_fn": lambda model: install(model, MATMULS, "context_fn with module"),
}
ON_EACH_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def trained(way: Any, program: Any, blocks: Callable[[], Stack], *, steps: int) -> dict[str, Tensor]:
    """Train; return losses, gradients, weights, scales and histories of each step."""
    FP8GlobalStateManager.reset()
    model = way(built(blocks))
    torch.manual_seed(5)
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        losses = program(model, step)
        seen |= {f"{step} loss {index}": loss.detach() for index, loss in enumerate(losses)}
        seen |= {f"{step} {name}": value for name, value in state_of(model).items()}
        for name, parameter in model.named_parameters():
            seen[f"{step} gradient of {name}"] = parameter.grad.clone()
            with torch.no_grad():
                parameter -= 0.05 * parameter.grad
            parameter.grad = None
    return seen


def loss_of(model: nn.Module, step: int, batch: int = 0) -> Tensor:
    x = torch.randn(4, WIDTH) * (1 + 3 * torch.rand(())) + step % 3 + batch
    return model(x.requires_grad_()).square().mean()


def one_autocast(model: nn.Module, step: int, recipe: Recipe | None = None) -> list[Tensor]:
    with autocast(recipe=recipe):
        loss = loss_of(model, step)
    loss.backward()
    return [loss]


def no_autocast(model: nn.Module, step: int) -> list[Tensor]:
    loss = loss_of(model, step)
    loss.backward()
    return [loss]


def in_order(order: str) -> Callable[[nn.Module, int], list[Tensor]]:
    """Return a step with micro-batches in this order: `0` is the forward of the first one, `a` its backward."""

    def step(model: nn.Module, number: int) -> list[Tensor]:
        losses = {}
        for letter in order:
            if letter.isdigit():
                with autocast():
                    losses[int(letter)] = loss_of(model, number, int(letter))
            else:
                losses[ord(letter) - ord("a")].backward()
        return [*losses.values()]

    return step


def stack(count: int = 2, **options: Any) -> Callable[[], Stack]:
    return lambda: Stack(*(Block(WIDTH, **options) for _ in range(count)))


def shared() -> Stack:
    """One block in two regions, another between them."""
    block = Block(WIDTH)
    return Stack(block, Block(WIDTH), block)


pipeline = in_order("01a2b3cd")
PROGRAMS: dict[str, tuple[Any, Callable[[], Stack]]] = {
    "one autocast": (one_autocast, stack()),
    "updates by ops": (lambda model, step: one_autocast(model, step, Recipe(seen=True)), stack()),
    "autocasts inside": (no_autocast, stack(inner=True)),
    "first in, first out": (in_order("012abc"), stack()),
    "pipeline": (pipeline, stack()),
    "shared": (one_autocast, shared),
}


@ON_EACH_WAY
@pytest.mark.parametrize(("program", "blocks"), PROGRAMS.values(), ids=PROGRAMS.keys())
def test_twenty_steps_are_those_of_the_librarys_checkpoint(way: Any, program: Any, blocks: Callable[[], Stack]) -> None:
    steps = 20 if program is one_autocast else 8 if program is pipeline else 5
    assert_same(trained(by(own_checkpoint), program, blocks, steps=steps), trained(way, program, blocks, steps=steps))


@pytest.mark.parametrize("value", [FULL, MATMULS], ids=["full", "selective"])
def test_another_order_is_an_error(value: dict[str, Any]) -> None:
    """The library takes its copies of scales in the order of the forwards."""
    with pytest.raises(RegionError, match="in recomputation"):
        trained(lambda model: install(model, {**value, "verify": "always"}), in_order("012cba"), stack(), steps=5)


# Engine, early stop, versions


def reported(value: Any, *, fp8: bool) -> Any:
    model = install(built(stack()), value)
    with autocast(enabled=fp8):
        loss = loss_of(model, 0)
    loss.backward()
    return sac.report(model)


def test_such_regions_run_again_as_python_and_the_report_says_why() -> None:
    (kind,) = reported(MATMULS, fp8=True).kinds
    assert (kind.engine, kind.no_replay) == ("rerun", REASON)
    assert f"  run again as Python, not replayed: {REASON}" in str(reported(FULL, fp8=True)).splitlines()
    with pytest.warns(SacWarning) as caught:
        reported({**MATMULS, "engine": "replay"}, fp8=True)
    assert [str(one.message) for one in caught] == [
        f"blocks.0: replay cannot be used here: {REASON}\n"
        "    fix: none is needed, the region runs again as Python; `engine: rerun` asks for that from the start"
    ]


class Unknown:
    """A version of which nothing else is known."""

    is_fp8_enabled = staticmethod(lambda: True)


def load(monkeypatch: pytest.MonkeyPatch, manager: Any) -> None:
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", SimpleNamespace(FP8GlobalStateManager=manager))


def test_a_version_whose_state_cannot_be_restored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, Unknown)
    x, block = torch.ones(2, WIDTH, requires_grad=True), Block(WIDTH)
    with pytest.raises(ConfigError) as error:
        sac.checkpoint(block, x)
    assert str(error.value) == (
        "Block: FP8 is on around the region, and its scales and histories are not put back for recomputation: this "
        "version of TransformerEngine is not known (1.6 to 2.20 are)\n"
        "    fix: run this region without FP8, or call TransformerEngine's own checkpoint for it"
    )
    monkeypatch.setattr(Unknown, "is_fp8_enabled", staticmethod(lambda: False))
    sac.checkpoint(nn.Linear(WIDTH, WIDTH), x).sum().backward()


@pytest.mark.parametrize("way", ["compat reentrant", "full reentrant"])
def test_they_are_never_reentrant(way: str) -> None:
    model, x = WAYS[way](built(stack())), torch.randn(4, WIDTH, requires_grad=True)
    with autocast():
        loss = model(x).sum()
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.shape == x.shape
    assert not any(FP8GlobalStateManager.quantization_state.fp8_tensors_recompute_buffer)
