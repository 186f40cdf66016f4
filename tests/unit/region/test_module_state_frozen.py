"""A parameter that is frozen or thawed between forward and backward: the recomputation saves what the forward did."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from tests.support.blocks import FunctionBlock, Stack, square
from tests.support.stateful import ON_EACH_WAY, Way, as_it_is
from tests.support.training import assert_same, built, train


def body(block: FunctionBlock, x: Tensor) -> Tensor:
    return ((x @ block.a).sin() @ block.b).cos() * x


def trained(way: Way, frozen_in_forward: bool) -> dict[str, Tensor]:
    model = way(built(lambda: Stack(FunctionBlock(body), FunctionBlock(body))))

    def backward(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Any]:
        model.blocks[0].a.requires_grad_(frozen_in_forward)
        loss.backward()
        model.blocks[0].a.requires_grad_(not frozen_in_forward)
        return []

    model.blocks[0].a.requires_grad_(not frozen_in_forward)
    return train(model, steps=3, make_input=square, backward=backward)


@ON_EACH_WAY
@pytest.mark.parametrize("frozen_in_forward", [False, True])
def test_gradients_are_those_without(way: Way, frozen_in_forward: bool) -> None:
    assert_same(trained(as_it_is, frozen_in_forward), trained(way, frozen_in_forward))
