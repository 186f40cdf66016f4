"""Under `full` a region sends the same collectives in every backward, on every rank, whatever calls before it did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import sac
from tests.support.ranks import run_ranks

CALLS = 4


class Sum(torch.autograd.Function):
    """The trailing all-reduce of a row-parallel layer: it saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Layer(nn.Module):
    """A linear layer whose result all ranks add up; `place`: where in the region that is done."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "alone":
            return Sum.apply(self.up(x))
        if self.place == "last":
            return Sum.apply(self.down(torch.tanh(self.up(x))))
        if self.place == "aside":
            return Sum.apply(self.up(x)) + self.down(x)  # backward reads nothing but inputs and parameters
        if self.place == "middle":
            return self.down(torch.tanh(Sum.apply(self.up(x))))
        return Sum.apply(self.down(torch.tanh(self.up(x)))).sin()


class FilledLate(Layer):
    """Its class names an op that fills what autograd has saved before: always recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(super().forward(x), training=True)


class Sent(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "_c10d_functional" and "wait" not in func.__name__
        return func(*args, **(kwargs or {}))


def sent_in_backward(place: str, recorded: bool) -> list[int]:
    torch.manual_seed(0)
    model = nn.Sequential(FilledLate("last") if place == "before rrelu" else Layer(place))
    sac.apply(model, {"mode": "full", "blocks": "0"})
    region = model[0].forward.__self__.region
    counts = []
    for _ in range(CALLS):
        if recorded and dist.get_rank() == 1:
            region.group.careful = True
        loss = model(torch.randn(3, 4)).square().sum()
        with Sent() as sent:
            loss.backward()
        counts.append(sent.count)
    return counts


@pytest.mark.parametrize("recorded", [False, True], ids=["alike", "one rank has a recorder"])
@pytest.mark.parametrize("place", ["alone", "last", "aside", "middle", "before sin", "before rrelu"])
def test_full_sends_the_same_in_every_call(place: str, recorded: bool) -> None:
    one, other = run_ranks(2, sent_in_backward, place, recorded)
    assert one == other == [one[0]] * CALLS
