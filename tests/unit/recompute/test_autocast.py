"""A custom op whose body leans on autocast computes in the same precision under a policy as without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.blocks import ENTRIES, FULL, FunctionBlock, Stack, policy, save, selective, square
from tests.support.training import assert_same_training


@torch.library.custom_op("sactest::product_in_autocast", mutates_args=())
def product_in_autocast(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).float() if x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu") else (x @ w) * 2


def _backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return grad.float() @ w.float().T, x.float().T @ grad.float()


product_in_autocast.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def on(block: FunctionBlock, x: Tensor) -> Tensor:
    return product_in_autocast(x, block.a).float().sin() * x


def off_inside(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return product_in_autocast(x, block.a).sin() * x


def within(body: object) -> object:
    def run(block: FunctionBlock, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return body(block, x)

    return run


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("body", [on, off_inside])
@pytest.mark.parametrize("rule", ["sactest::product_in_autocast", "aten.sin"])
def test_precision_is_that_of_the_caller(body: object, rule: str, entry: str) -> None:
    assert_same_training(
        lambda: Stack(FunctionBlock(within(body))), selective(policy(save(rule))), entry=entry, make_input=square
    )


def test_precision_is_that_of_the_caller_in_full() -> None:
    assert_same_training(lambda: Stack(FunctionBlock(within(on))), FULL, make_input=square)
