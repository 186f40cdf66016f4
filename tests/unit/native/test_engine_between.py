"""What happens between forward and backward to tensors that a replay starts from: the same with the library."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.blocks import FunctionBlock, Stack
from tests.support.native_engine import needs_library, recorded, with_library
from tests.support.replay_programs import ON_EACH, applied, gradients, replay

pytestmark = needs_library


def body(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout((x @ block.a).sin(), 0.2) * block.frozen
    return ((h * block.outside).cos() @ block.frozen).tanh() * block.scale @ block.b


def build() -> Stack:
    model = Stack(FunctionBlock(body))
    block = model.blocks[0]
    block.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    block.register_buffer("scale", torch.randn(8))
    block.outside = torch.randn(8, 8)
    return model


def written(block: FunctionBlock) -> None:
    block.frozen.add_(1)


def written_without_notice(block: FunctionBlock) -> None:
    block.frozen.data.add_(1)


def weight_written(block: FunctionBlock) -> None:
    with torch.no_grad():
        block.a.mul_(2)


def data_exchanged(block: FunctionBlock) -> None:
    block.frozen.data = torch.ones(8, 8)


def data_of_another_shape(block: FunctionBlock) -> None:
    block.frozen.data = torch.ones(3, 3)


def freed_and_filled_again(block: FunctionBlock) -> None:
    held = block.frozen.detach().clone()
    block.frozen.untyped_storage().resize_(0)
    block.frozen.untyped_storage().resize_(held.untyped_storage().nbytes())
    block.frozen.data.copy_(held)


def exchanged(block: FunctionBlock) -> None:
    block.frozen = nn.Parameter(torch.ones(8, 8), requires_grad=False)
    gc.collect()


def all_exchanged(block: FunctionBlock) -> None:
    block.a, block.b = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
    block.frozen, block.outside = nn.Parameter(torch.ones(8, 8), requires_grad=False), torch.ones(8, 8)
    block.scale = torch.ones(8)
    gc.collect()


def deleted(block: FunctionBlock) -> None:
    del block.frozen
    gc.collect()


def outside_written(block: FunctionBlock) -> None:
    block.outside.add_(1)


def outside_gone(block: FunctionBlock) -> None:
    block.outside = None


def buffer_written(block: FunctionBlock) -> None:
    block.scale.mul_(3)


def requires_grad_now(block: FunctionBlock) -> None:
    block.frozen.requires_grad_()


def moved(block: FunctionBlock) -> None:
    block.double()


@ON_EACH
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        written,
        written_without_notice,
        weight_written,
        data_exchanged,
        data_of_another_shape,
        freed_and_filled_again,
        exchanged,
        all_exchanged,
        deleted,
        outside_written,
        outside_gone,
        buffer_written,
        requires_grad_now,
        moved,
    ],
)
def test_change(change: Callable[[FunctionBlock], None], chosen: dict[str, Any]) -> None:
    """Three steps, then one with a change: the same gradients, or the same error."""
    seen = []
    for native in (True, False):
        with with_library(native), recorded() as log:
            model = applied(build, replay(chosen))
            torch.manual_seed(3)
            for _ in range(3):
                model(torch.randn(8, 8)).square().sum().backward()
            model.zero_grad()
            parameters = dict(model.named_parameters())
            loss = model(torch.randn(8, 8)).square().sum()
            change(model.blocks[0])
            try:
                loss.backward()
                outcome: Any = {name: one.grad.tolist() for name, one in parameters.items() if one.grad is not None}
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            del loss, parameters
        seen.append(outcome)
        assert bool(log.ops) == native
    assert seen[0] == seen[1]


@ON_EACH
def test_the_model_is_gone(chosen: dict[str, Any]) -> None:
    """Only the graph is left when backward runs."""
    seen = []
    for native in (True, False):
        with with_library(native):
            torch.manual_seed(3)
            model = applied(build, replay(chosen))
            for _ in range(3):
                model(torch.randn(8, 8)).square().sum().backward()
            x = torch.randn(8, 8, requires_grad=True)
            loss = model(x).square().sum()
            del model
            gc.collect()
            try:
                loss.backward()
                seen.append(x.grad.tolist())  # type: ignore[union-attr]
            except Exception as error:
                seen.append(f"{type(error).__name__}: {error}")
    assert seen[0] == seen[1]


@ON_EACH
def test_micro_batches(chosen: dict[str, Any]) -> None:
    """Several forwards, then their backwards in another order."""
    seen = []
    for native in (True, False):
        with with_library(native):
            torch.manual_seed(3)
            model = applied(build, replay(chosen))
            for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
                losses = [model(torch.randn(8, 8)).square().sum() for _ in order]
                for index in order:
                    losses[index].backward()
            seen.append({name: one.tolist() for name, one in gradients(model).items()})
    assert seen[0] == seen[1]
