"""Of a saved tensor that is a small part of a result, a region keeps the elements only; training has the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import FunctionBlock, Stack, policy, save, selective
from tests.support.layouts import SIDE, VIEWS, Reading
from tests.support.training import assert_same_training, built


def trained(view: Callable[[Tensor], Tensor], value: Any) -> Stack:
    def body(block: Any, x: Tensor) -> Tensor:
        return x + Reading.apply(view(x @ block.a), []).sum().real  # type: ignore[no-untyped-call]

    model = sac.apply(built(lambda: Stack(FunctionBlock(body, SIDE), FunctionBlock(body, SIDE))), value)
    model(torch.randn(SIDE, SIDE, requires_grad=True)).sum().backward()
    return model


@pytest.mark.parametrize("engine", ["replay", "rerun"])
@pytest.mark.parametrize(
    ("name", "elements"), [("columns", 3 * SIDE), ("repeated", SIDE), ("rows", 2 * SIDE), ("overlapping", SIDE)]
)
def test_the_region_keeps_no_more_than_its_elements(name: str, elements: int, engine: str) -> None:
    model = trained(VIEWS[name], selective(policy(save("matmul")), engine=engine))
    kind = sac.report(model).kinds[0]
    assert kind.saved_bytes - kind.dead_bytes <= elements * 4 + SIDE * SIDE * 4, kind


class Columns(nn.Module):
    """A product with one row, whose order of summation depends on the distance of the other factor's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(52, 52) / 8)
        self.row = nn.Parameter(torch.randn(1, 33))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.row @ (x @ self.weight)[:, :13]).sum()


@pytest.mark.parametrize("engine", ["replay", "rerun"])
def test_training_is_the_same_bit_by_bit(engine: str) -> None:
    value = selective(policy(save("matmul")), engine=engine)
    assert_same_training(
        lambda: Stack(Columns(), Columns()), value, steps=3, make_input=lambda device: (torch.randn(33, 52),)
    )
