"""Micro-batches of several lengths in flight, with something compiled inside the regions.

The second length makes Dynamo compile a dynamic graph, which fits the first length too. Recomputation of the first
micro-batch has to get the static graph that its forward got; see Note [Graphs that both fit].
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac import torch_private
from sac.errors import RegionError
from tests.support.blocks import FULL, Stack, policy, save, selective
from tests.support.pairs import in_pairs
from tests.support.training import assert_same, built

WIDTH = 8
SHAPES = ((4, 6), (5, 7), (4, 6))
set_by_last_use = torch._C._dynamo.eval_frame._set_lru_cache


class Averaging(nn.Module):
    """A block of which a static graph saves other tensors for its backward than a dynamic one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.a(x).softmax(-1).mean(0, keepdim=True)
        return self.b(mean * self.a(x).tanh() / x.shape[0]) + x


class InParts(Averaging):
    """The same, as a part of its own inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Averaging()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).sin() + super().forward(x)


def as_forward(block: nn.Module) -> None:
    block.forward = torch.compile(block.forward, backend="aot_eager")


def as_part(block: nn.Module) -> None:
    block.part.compile(backend="aot_eager")


def micro_batches(model: nn.Module, order: tuple[int, ...]) -> dict[str, Tensor]:
    """All forwards, then the backwards in `order`, as a pipeline stage has them."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, WIDTH, generator=generator).requires_grad_() for shape in SHAPES]
    outputs = [model(x) for x in inputs]
    for place in order:
        outputs[place].square().sum().backward()
    seen = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return seen | {f"input {place}": x.grad for place, x in enumerate(inputs)}


def trained(
    kind: type[nn.Module], compile_it: Callable[[nn.Module], None], value: Any, order: Any
) -> dict[str, Tensor]:
    """Two rounds: in the first the graphs are made, in the second they are all there."""
    torch._dynamo.reset()
    set_by_last_use(True)  # as a process begins
    model = built(lambda: Stack(kind(), kind()))
    for block in model.blocks:
        compile_it(block)
    sac.apply(model, value)
    rounds = [micro_batches(model, order) for _ in range(2)]
    return {f"round {place} {name}": value for place, one in enumerate(rounds) for name, value in one.items()}


VALUES = {"full": FULL, "products": selective(policy(save("matmul")))}


@in_pairs(
    value=VALUES,
    compiled={"block": (Averaging, as_forward), "part": (InParts, as_part)},
    order={"first in first out": (0, 1, 2), "last in first out": (2, 1, 0)},
)
def test_recomputation_gets_the_graph_of_its_forward(value: Any, compiled: Any, order: Any) -> None:
    expected = trained(*compiled, "none", order)
    assert_same(expected, trained(*compiled, value, order))


def test_by_last_use_it_would_get_the_dynamic_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above are worth: with Dynamo's list as it comes this program fails."""
    monkeypatch.setattr("sac.engine.state.keep_graphs_in_order_of_making", lambda: None)
    with pytest.raises(RegionError, match="saved tensor"):
        trained(Averaging, as_forward, FULL, (0, 1, 2))


def test_a_process_without_dynamo_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(torch_private, "_order_by_use", said.append)
    monkeypatch.setitem(sys.modules, "torch._dynamo", object())
    torch_private.keep_graphs_in_order_of_making()
    assert said == [False]
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    torch_private.keep_graphs_in_order_of_making()
    assert said == [False]
