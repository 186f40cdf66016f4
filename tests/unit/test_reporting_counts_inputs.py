"""`sac.report` counts inputs of regions that are never recomputed where autograd holds them, and those sac holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import FunctionBlock, Stack, policy, save, selective, square, whole
from tests.support.training import built

VALUES: dict[str, Any] = {
    "the block itself, else recomputed": selective(policy(whole(""))),
    "everything by glob": selective(policy(save("*"))),
    **{f"default, {engine}": selective(policy(default="save"), engine=engine) for engine in ("replay", "rerun")},
}


def products(block: FunctionBlock, x: Tensor) -> Tensor:
    return torch.relu(x @ block.a) @ block.b


def reads_no_input(block: FunctionBlock, x: Tensor) -> Tensor:
    return torch.relu(x + 1) @ block.b


def reads_a_view(block: FunctionBlock, x: Tensor) -> Tensor:
    return torch.cat((x[:2] @ block.a, x[2:] @ block.b)).sin()


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("body", [products, reads_no_input, reads_a_view])
def test_inputs_count_where_backward_of_the_model_alone_reads_them(body: Callable[..., Any], name: str) -> None:
    model = sac.apply(built(lambda: Stack(*(FunctionBlock(body) for _ in range(3)))), VALUES[name])
    for _ in range(2):
        x = square()[0].requires_grad_()
        model(x).sum().backward()
        expected = 0 if body is reads_no_input else x.nbytes
        assert [kind.input_bytes for kind in sac.report(model).kinds] == [expected]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.norm(x)).relu()


@pytest.mark.parametrize("value", ["full", selective(policy(save("matmul")))], ids=["full", "selective"])
def test_copies_of_buffers_from_before_the_forward_are_counted_and_inputs_once(value: Any) -> None:
    model = sac.apply(Stack(Normed()), value)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    (kind,) = sac.report(model).kinds
    assert kind.input_bytes == x.nbytes + sum(buffer.nbytes for buffer in model.buffers())
