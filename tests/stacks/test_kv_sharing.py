"""Models whose layers read the keys and values of another layer: whole blocks are regions, and nothing is lost."""

from __future__ import annotations

import functools
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from tests.stacks.composition import Outcome, differences, forward_done, outcome
from tests.support.blocks import alternate, policy
from tests.support.model_zoo import tiny
from tests.support.pairs import in_turn

transformers = pytest.importorskip("transformers", reason="tests/stacks needs transformers")

ALTERNATE = policy(alternate("matmul"))
MODES: dict[str, Any] = {
    "full": "full",
    "full, inputs on the host": {"mode": "full", "store": "host"},
    "selective": "selective",
    "rerun": {"mode": "selective", "policy": ALTERNATE, "engine": "rerun"},
    "auto": {"mode": "selective", "policy": ALTERNATE},
}
FAMILIES = ("gemma3n", "gemma4")


def trained(family: str, value: Any) -> Outcome:
    """Two micro-batches in flight before the first backward, with dropout; layers 2 and 3 read what 0 and 1 wrote."""
    model, batch = tiny(family, dropout=0.1)
    sac.apply(model, value)

    def step() -> Tensor:
        losses = [model(**batch).loss for _ in range(2)]
        forward_done()
        for loss in losses:
            loss.backward()
        return losses[0] + losses[1]

    return outcome(step, model)


@functools.cache
def without_us(family: str) -> Outcome:
    return trained(family, "none")


@pytest.mark.parametrize(("family", "mode"), in_turn(list(MODES), [(family,) for family in FAMILIES]))
def test_gradients_are_equal_and_attention_is_let_go(family: str, mode: str) -> None:
    plain, ours = without_us(family), trained(family, MODES[mode])
    assert differences(ours, plain) == []
    assert ours.flops > plain.flops
    assert ours.kept_bytes < 0.5 * plain.kept_bytes


@pytest.mark.filterwarnings("ignore:blocks|model:sac.errors.SacWarning")
def test_replay() -> None:
    plain, ours = without_us("gemma4"), trained("gemma4", {**MODES["auto"], "engine": "replay"})
    assert differences(ours, plain) == []
    assert ours.kept_bytes < 0.5 * plain.kept_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_cache_that_the_call_asks_for(family: str) -> None:
    found = []
    for value in ("none", "full"):
        model, batch = tiny(family, dropout=0.1)
        sac.apply(model, value)
        torch.manual_seed(0)
        model(**batch, use_cache=True).loss.backward()
        found.append(gradients(model))
    assert all(torch.equal(ours, plain) for plain, ours in zip(*found, strict=True))


def test_what_was_shared_is_afterwards_what_it_was() -> None:
    model, batch = tiny("gemma4")
    sac.apply(model, "full")
    shared = transformers.cache_utils.KVSharingDict()
    loss = model(**batch, shared_kv_states=shared).loss
    before = {name: tuple(held) for name, held in shared.items()}
    copies = [one.detach().clone() for held in before.values() for one in held]
    loss.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    loss.backward()
    assert before.keys() == shared.keys() == {"sliding_attention", "full_attention"}
    after = [one for held in shared.values() for one in held]
    assert all(one is other for one, other in zip(after, (x for held in before.values() for x in held), strict=True))
    assert all(map(torch.equal, after, copies))
    assert all(map(torch.equal, first, gradients(model)))


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_later_steps_of_full_run_without_a_dispatch_mode() -> None:
    model, batch = tiny("gemma4")
    sac.apply(model, "full")
    for _ in range(2):
        model(**batch).loss.backward()
    assert [one.region.stats.engine for one in regions_of(model)] == [""] * 4


class OwnDict(dict[str, Tensor]):
    pass


class OwnUserDict(UserDict[str, Tensor]):
    pass


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


class Stack(nn.Module):
    def __init__(self, shared: type, by_name: bool) -> None:
        super().__init__()
        self.layers, self.shared, self.by_name = nn.ModuleList(Adding() for _ in range(3)), shared, by_name

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared()
        for layer in self.layers:
            x = layer(x, shared_kv_states=shared) if self.by_name else layer(x, shared)
        return x.square().mean()


@pytest.mark.parametrize("mode", ["full", "rerun", "auto"])
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("shared", [dict, OwnDict, OwnUserDict, Bag])
def test_what_is_shared_may_be_of_any_class(shared: type, by_name: bool, mode: str) -> None:
    x, found = torch.linspace(-1, 1, 32).reshape(4, 8), []
    for value in ("none", MODES[mode]):
        torch.manual_seed(0)
        model = Stack(shared, by_name)
        sac.apply(model, value)
        for _ in range(2):
            model.zero_grad()
            model(x).backward()
        found.append(gradients(model))
    assert len(found[0]) == 12
    assert all(map(torch.equal, *found))
