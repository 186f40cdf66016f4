"""Forward-mode differentiation through regions that are replayed, then backward; where Python runs again, an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from sac.errors import RegionError
from tests.support.every_mode import MODES, assert_as_without

REPLAYED = ("auto", "replay", "everything", "whole")
replayed = pytest.mark.parametrize("mode", REPLAYED)
rerun = pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in REPLAYED])


class Block(nn.Module):
    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(dropout)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        h = self.dropout(self.down(torch.sin(self.up(x))))
        return x + (h if gate is None else h * gate)


def blocks(count: int = 2) -> nn.ModuleList:
    torch.manual_seed(7)
    return nn.ModuleList(Block() for _ in range(count))


def inputs() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(2, 1, 16).view(4, 4)


def through(calls: list[Callable[..., Any]], x: Tensor) -> Tensor:
    for call in calls:
        x = call(x)
    return x


@replayed
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
def test_a_dual_number_and_then_backward(mode: str, needs_grad: bool, inside: bool) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x, tangent = inputs()
        x.requires_grad_(needs_grad)
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(through(calls, forward_ad.make_dual(x, tangent)))
            loss = out.primal.square().sum() + out.tangent.square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [out.primal.detach(), out.tangent.detach(), x.grad]

    assert_as_without(mode, blocks(), program)


@replayed
def test_the_derivative_of_a_gradient(mode: str) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x, tangent = inputs()
        x.requires_grad_()
        with forward_ad.dual_level():
            out = through(calls, forward_ad.make_dual(x, tangent)).square().sum()
            grad = torch.autograd.grad(out, x, create_graph=True)[0]
            primal, derivative = forward_ad.unpack_dual(grad)
        return [primal.detach(), None if derivative is None else derivative.detach()]

    assert_as_without(mode, blocks(), program)


@rerun
def test_where_python_runs_again_it_is_an_error(mode: str) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x, tangent = inputs()
        with forward_ad.dual_level():
            forward_ad.unpack_dual(through(calls, forward_ad.make_dual(x, tangent))).tangent.sum().backward()
        return []

    with pytest.raises(
        RegionError, match=r"called with dual tensors .forward-mode differentiation.*\n.*engine: replay"
    ):
        assert_as_without(mode, blocks(), program)
