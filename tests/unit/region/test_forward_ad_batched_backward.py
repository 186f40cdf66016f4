"""Batched backward (``is_grads_batched``, ``vmap`` over ``torch.autograd.grad``) through regions that draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.every_mode import MODES, assert_as_without

every_mode = pytest.mark.parametrize("mode", MODES)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(torch.sin(self.up(x)))
        return x + self.down(h) * torch.rand(4, generator=self.generator).add(0.5) * torch.rand_like(x)


def blocks() -> nn.ModuleList:
    torch.manual_seed(7)
    return nn.ModuleList(Block() for _ in range(2))


def forward(calls: list[Callable[..., Any]], x: Tensor) -> Tensor:
    for call in calls:
        x = call(x)
    return x


def leaves(calls: list[Callable[..., Any]]) -> tuple[Tensor, list[Tensor]]:
    modules = [one if isinstance(one, nn.Module) else one.block for one in calls]
    return torch.linspace(-1, 1, 8).view(2, 4).requires_grad_(), [one for m in modules for one in m.parameters()]


BATCH = torch.eye(8).view(8, 2, 4)


@every_mode
@pytest.mark.parametrize("retain", [True, False])
def test_batched_gradients(mode: str, retain: bool) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x, parameters = leaves(calls)
        out = forward(calls, x)
        wanted = [x, *parameters]
        found = list(torch.autograd.grad(out, wanted, BATCH, is_grads_batched=True, retain_graph=retain))
        if retain:
            out.sum().backward()
        return found

    assert_as_without(mode, blocks(), program)


@every_mode
@pytest.mark.parametrize("randomness", ["error", "same"])
def test_vmap_over_gradients(mode: str, randomness: str) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x, parameters = leaves(calls)
        out = forward(calls, x)

        def pull(grad: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, [x, *parameters], grad, retain_graph=True)

        return [*torch.vmap(pull, randomness=randomness)(BATCH), *pull(BATCH[0])]

    assert_as_without(mode, blocks(), program)
