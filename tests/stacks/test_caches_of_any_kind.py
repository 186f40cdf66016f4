"""Caches and dicts that a model's own file defines: however they hold their state, recomputation finds it as it was."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import alternate, policy

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


def layers(kind: type[nn.Module], value: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(kind() for _ in range(3))
    return sac.apply(model, value)


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")  # the call that first writes to a late cache is kept
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("value", ["full", "selective"])
@pytest.mark.parametrize("kind", [DictCache, SlotsCache, NestedCache, LateCache])
def test_a_cache_is_in_recomputation_what_it_was(kind: Any, value: str, times: int) -> None:
    found = []
    for model, cache in ((layers(Block, one), kind()) for one in ("none", value)):
        found.append([step(model, cache, times) for _ in range(3 if kind is LateCache else 1)][-1])
    assert all(map(torch.equal, *found))


# -- What layers share


class Bag:
    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        return self.held.get(name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.held[name] = value


class Adding(nn.Module):
    """A layer that adds to the keys it is handed: read after the forward, they are another layer's."""

    is_kv_shared_layer = True

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, shared_kv_states: Any) -> Tensor:
        keys, before = self.keys(x), shared_kv_states.get("keys")
        shared_kv_states["keys"] = keys = keys if before is None else keys + before
        return x + self.out(torch.tanh(x * keys))


@pytest.mark.parametrize(
    "value", ["full", {"mode": "selective", "policy": policy(alternate("matmul")), "engine": "rerun"}]
)
@pytest.mark.parametrize("shared", [dict, Bag])
def test_what_is_shared_may_be_of_any_class(shared: type, value: Any) -> None:
    found = []
    for model in (layers(Adding, one) for one in ("none", value)):
        for by_name in (True, False):
            x, held = torch.linspace(-1, 1, 32).reshape(4, 8), shared()
            for layer in model.layers:
                x = layer(x, shared_kv_states=held) if by_name else layer(x, held)
            x.square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
