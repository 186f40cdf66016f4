"""A saved tensor that is a small part of a result comes back as it was: strides, address modulo 64, lazy bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import FunctionBlock, Stack, policy, save, selective
from tests.support.training import assert_same_training, built

WIDTH = 24

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda h: h[:2],
    "rows in the middle": lambda h: h[3:5],
    "columns": lambda h: h[:, 2:5],
    "every third column": lambda h: h[:, ::3],
    "transposed": lambda h: h[:, 1:4].t(),
    "repeated": lambda h: h[1:2].expand(4, WIDTH),
    "overlapping": lambda h: h[1].unfold(0, 4, 2),
    "conjugated": lambda h: torch.view_as_complex(h[:, 2:6].unflatten(1, (2, 2))).conj(),
    "negated": lambda h: torch.view_as_complex(h[:, 2:6].unflatten(1, (2, 2))).conj().imag,
    "one element": lambda h: h[1, 1],
}


class Reading(torch.autograd.Function):
    """Notes the layout of what it has saved, when its backward reads it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, read: list[Any]) -> Tensor:
        ctx.save_for_backward(part)
        ctx.read = read
        return part * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (part,) = ctx.saved_tensors
        ctx.read.append((part.shape, part.stride(), part.data_ptr() % 64, part.is_conj(), part.is_neg()))
        return grad * part.conj(), None


def layouts(view: Callable[[Tensor], Tensor], value: Any) -> tuple[list[Any], list[Any], Any]:
    read: list[Any] = []

    def body(block: Any, x: Tensor) -> Tensor:
        return x + Reading.apply(view(x @ block.a), read).sum().real  # type: ignore[no-untyped-call]

    model = built(lambda: Stack(FunctionBlock(body, WIDTH), FunctionBlock(body, WIDTH)))
    if value is not None:
        model = sac.apply(model, value)
    torch.manual_seed(0)
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    model(x).sum().backward()
    return read, [one.grad for one in (x, *model.parameters()) if one.grad is not None], model


@pytest.mark.parametrize("engine", ["replay", "rerun"])
@pytest.mark.parametrize("name", VIEWS)
def test_backward_reads_it_in_its_layout(name: str, engine: str) -> None:
    expected, grads, _ = layouts(VIEWS[name], None)
    found, ours, _ = layouts(VIEWS[name], selective(policy(save("matmul")), engine=engine))
    assert found == expected
    assert all(torch.equal(*pair) for pair in zip(grads, ours, strict=True))
    assert [one.stride() for one in ours] == [one.stride() for one in grads]


@pytest.mark.parametrize("engine", ["replay", "rerun"])
@pytest.mark.parametrize(
    ("name", "elements"), [("columns", 3 * WIDTH), ("repeated", WIDTH), ("rows", 2 * WIDTH), ("overlapping", WIDTH)]
)
def test_the_region_keeps_no_more_than_its_elements(name: str, elements: int, engine: str) -> None:
    _, _, model = layouts(VIEWS[name], selective(policy(save("matmul")), engine=engine))
    kind = sac.report(model).kinds[0]
    assert kind.saved_bytes - kind.dead_bytes <= elements * 4 + WIDTH * WIDTH * 4, kind


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
