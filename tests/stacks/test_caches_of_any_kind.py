"""Caches that a model's own file defines: however they hold their state, recomputation finds it as it was.

Arguments whose fields change, dicts among them, are in tests/fuzz/test_changing_programs_are_exact.py.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac

WIDTH = 4


class DictCache:
    def __init__(self) -> None:
        self.state = torch.zeros(WIDTH)

    def step(self, h: Tensor) -> Tensor:
        self.state = self.state * 0.5 + h.mean(0)
        return self.state


class SlotsCache:
    __slots__ = ("__state",)

    def __init__(self) -> None:
        self.__state = torch.zeros(WIDTH)

    def step(self, h: Tensor) -> Tensor:
        self.__state = self.__state * 0.5 + h.mean(0)
        return self.__state


class NestedCache:
    def __init__(self) -> None:
        self.layers: list[dict[str, Any]] = [{"seen": collections.deque(maxlen=2)}]

    def step(self, h: Tensor) -> Tensor:
        self.layers[0]["seen"].append(h.mean(0))
        return torch.stack(tuple(self.layers[0]["seen"])).sum(0)


class LateCache(DictCache):
    """Is written to in place, but not in its first steps."""

    steps = 0

    def step(self, h: Tensor) -> Tensor:
        self.steps += 1
        if self.steps > 3:
            with torch.no_grad():
                self.state += h.mean(0)
        return self.state.clone()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        h = self.a(x)
        return x + self.b(torch.tanh(h * cache.step(h)))


def step(model: nn.Module, cache: Any, times: int) -> list[Tensor]:
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    for block in model.layers:
        x = block(x, cache)
    for left in range(times - 1, -1, -1):
        x.square().sum().backward(retain_graph=left > 0)
    return [parameter.grad for parameter in model.parameters()]


def layers(value: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(3))
    return sac.apply(model, value)


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")  # the call that first writes to a late cache is kept
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("value", ["full", "selective"])
@pytest.mark.parametrize("kind", [DictCache, SlotsCache, NestedCache, LateCache])
def test_a_cache_is_in_recomputation_what_it_was(kind: Any, value: str, times: int) -> None:
    found = []
    for model, cache in ((layers(one), kind()) for one in ("none", value)):
        found.append([step(model, cache, times) for _ in range(3 if kind is LateCache else 1)][-1])
    assert all(map(torch.equal, *found))
