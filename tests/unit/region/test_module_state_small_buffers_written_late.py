"""A small buffer that only a later call writes to, when nothing sees it: it advances once, and is put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.blocks import FULL, Stack, install, square
from tests.support.stateful import Way, as_it_is, by_function
from tests.support.training import assert_same, built, train


class Block(nn.Module):
    """Writes from its third call on, by a counter that gives no reason to record the call."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.calls: list[Any] = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        h = self.linear(x).sin()
        if self.calls[0] > 2:
            self.seen.add_(h.detach().mean(0))
        return h * (1 + self.seen.sum()) * x


WAYS: dict[str, Way] = {
    "apply": lambda model: install(model, FULL),
    "function": by_function,
    "reentrant": lambda model: by_function(model, use_reentrant=True),
}


def trained(way: Way) -> dict[str, Tensor]:
    return train(way(built(lambda: Stack(Block(), Block()))), steps=5, make_input=square)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_training_is_as_without(way: Way) -> None:
    assert_same(trained(as_it_is), trained(way))
