"""Caches that a model's own file defines: however they hold their state, and without leaking cycles."""

from __future__ import annotations

import collections
import warnings
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


class SlotsCache(DictCache):
    __slots__ = ("state",)


class PureSlotsCache:
    __slots__ = ("__state",)

    def __init__(self) -> None:
        self.__state = torch.zeros(WIDTH)

    def step(self, h: Tensor) -> Tensor:
        self.__state = self.__state * 0.5 + h.mean(0)
        return self.__state


class DequeCache:
    def __init__(self) -> None:
        self.states = collections.deque([torch.zeros(WIDTH)], maxlen=1)

    def step(self, h: Tensor) -> Tensor:
        self.states.append(self.states[-1] * 0.5 + h.mean(0))
        return self.states[-1]


class ListOfDictsCache:
    def __init__(self) -> None:
        self.layers: list[dict[str, Any]] = [{"seen": ()}]

    def step(self, h: Tensor) -> Tensor:
        self.layers[0]["seen"] = (*self.layers[0]["seen"], h.mean(0))
        return torch.stack(self.layers[0]["seen"]).sum(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        h = self.a(x)
        return x + self.b(torch.tanh(h * cache.step(h)))


def model_of_blocks(value: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(3))
    return sac.apply(model, value)


def step(model: nn.Module, cache: Any, times: int = 1) -> list[Tensor]:
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    for block in model.layers:
        x = block(x, cache)
    for left in range(times - 1, -1, -1):
        x.square().sum().backward(retain_graph=left > 0)
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("value", ["full", "selective"])
@pytest.mark.parametrize("kind", [DictCache, SlotsCache, PureSlotsCache, DequeCache, ListOfDictsCache])
def test_a_cache_is_in_recomputation_what_it_was(kind: Any, value: str, times: int) -> None:
    plain, ours = (step(model_of_blocks(one), kind(), times) for one in ("none", value))
    assert all(map(torch.equal, plain, ours))


class LateCache(DictCache):
    """Is written to in place, but not in its first steps."""

    steps = 0

    def step(self, h: Tensor) -> Tensor:
        self.steps += 1
        if self.steps > 3:
            with torch.no_grad():
                self.state += h.mean(0)
        return self.state.clone()


@pytest.mark.parametrize("value", ["full", "selective"])
def test_a_cache_that_later_calls_write_to(value: str) -> None:
    found = []
    for one in ("none", value):
        model, cache = model_of_blocks(one), LateCache()
        with warnings.catch_warnings(record=True):  # the call that does so first keeps its activations
            warnings.simplefilter("always")
            found.append([step(model, cache) for _ in range(3)][-1])
    assert all(map(torch.equal, *found))
