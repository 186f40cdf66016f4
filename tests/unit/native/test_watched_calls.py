"""Calls of `full` without a recorder: what only a later call does is found by the library when it happens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sac
from sac.errors import SacWarning
from sac.recompute import native_watch
from sac.region.module_state import ModuleState
from tests.promises.test_exact_when_programs_change import assert_same, train, usual
from tests.support.native_engine import needs_library, with_library
from tests.support.outside import NOISE, noise_of

pytestmark = needs_library

FIX = (
    "none is needed: the activations of this call are kept until its backward instead of being recomputed, and later "
    "calls of the region keep a copy of what they write to"
)
# These are functions because sac knows of some ops by their names in the code of a region's classes.


def nothing(layer: nn.Module, h: Tensor) -> Tensor:
    return h


def add_noise(layer: nn.Module, h: Tensor) -> Tensor:
    return h + noise_of(h)


def keep_largest(layer: nn.Module, h: Tensor) -> Tensor:
    return h.topk(3, dim=1).values.repeat(1, 2)


def leak(layer: nn.Module, h: Tensor) -> Tensor:
    return F.rrelu(h, training=True)


def shrink(layer: Any, h: Tensor) -> Tensor:
    layer.up.weight.data.mul_(0.9)
    return h


class Late(nn.Module):
    """Does something from its third call on, which a counter in a list tells."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.count, self.does = [0], does

    def forward(self, x: Tensor) -> Tensor:
        self.count[0] += 1
        h = torch.tanh(self.up(x))
        self.given = x
        if self.count[0] > 2:
            h = self.does(self, h)
        del self.given
        return x + self.down(h.sin())


FOUND = {
    add_noise: "this call ran aten.randn, with a generator of its own, and no earlier call did",
    keep_largest: "this call ran aten.topk, which makes a choice, and no earlier call did",
    leak: "this call ran aten.rrelu_with_noise, which fills a tensor that autograd has saved before, and no earlier "
    "call did",
    shrink: "this call changed parameter 'weight' (float32[6, 4]) in place, which no earlier call did",
}
each = pytest.mark.parametrize("does", FOUND, ids=lambda does: does.__name__)


def late(does: Any) -> Callable[[], Late]:
    NOISE.manual_seed(3)
    return lambda: Late(does)


@each
def test_gradients_are_right_in_the_first_such_call_and_later(does: Any) -> None:
    def run() -> Late:
        NOISE.manual_seed(3)
        return Late(does)

    with with_library():
        assert_same(run, "full")


@each
def test_it_is_told_once_per_region(does: Any) -> None:
    with with_library(), pytest.warns(SacWarning) as caught:
        train(late(does), "full")
    assert [str(one.message) for one in caught] == [
        f"{path}: {FOUND[does]}\n    fix: {FIX}" for path in ("layers.0", "layers.1")
    ]


def take_by_mask(layer: nn.Module, h: Tensor) -> Tensor:
    """Run an op whose kernel runs `nonzero`, which makes a choice by itself."""
    return torch.cat([h[h > 0], h[h <= 0]]).view(3, 6)


def write_own(layer: nn.Module, h: Tensor) -> Tensor:
    """Write to what the region has made, and to what autograd has not saved."""
    return h.add(1).clamp_(min=0.5).mul_(2)


@pytest.mark.parametrize("does", [take_by_mask, write_own], ids=lambda does: does.__name__)
def test_what_a_recomputation_repeats_is_not_told(does: Any) -> None:
    with with_library():
        assert_same(lambda: Late(does), "full")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(lambda: Late(does), "full")


def test_writes_to_what_the_region_made_are_told_apart_quickly() -> None:
    """Python looks at what a call has written to only if one of the region's own tensors may be among it."""
    with with_library(), mock.patch.object(ModuleState, "without_copy", autospec=True, return_value={}) as asked:
        train(lambda: Late(write_own), "full")
        assert asked.call_count == 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(lambda: Late(shrink), "full")
        assert asked.call_count > 0


def test_a_call_without_gradients_keeps_nothing() -> None:
    def choose_in_validation(layer: nn.Module, h: Tensor) -> Tensor:
        return h if torch.is_grad_enabled() else keep_largest(layer, h)

    def validating(model: Any, x: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            model(x)
        return usual(model, x, step)

    with with_library():
        assert_same(lambda: Late(choose_in_validation), "full", validating)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(lambda: Late(choose_in_validation), "full", validating)


def test_regions_inside_of_a_watched_one_are_watched_too() -> None:
    class Outer(Late):
        def __init__(self) -> None:
            super().__init__(nothing)
            self.inner = Late(add_noise)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(sac.checkpoint(self.inner, x))

    def run() -> Outer:
        NOISE.manual_seed(3)
        return Outer()

    with with_library():
        assert_same(run, "full")
        with pytest.warns(SacWarning) as caught:
            train(run, "full")
    assert [str(one.message).partition(": ")[0] for one in caught] == ["Late", "layers.0", "Late", "layers.1"]


def test_nothing_is_watched_after_an_error() -> None:
    class Failing(Late):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if self.count[0] > 2:
                raise ValueError("the third call")
            return out

    model = nn.ModuleDict({"layers": nn.ModuleList([Failing(nothing)])})
    sac.apply(model, {"mode": "full", "blocks": "layers.*"})
    x = torch.randn(3, 4, requires_grad=True)
    with with_library():
        for _ in range(2):
            model["layers"][0](x).sum().backward()
        with (
            mock.patch.object(native_watch.NativeWatch, "forward_mode", noting(watches := [])),
            pytest.raises(ValueError, match="the third call"),
        ):
            model["layers"][0](x)
        add_noise(model, x), keep_largest(model, torch.randn(3, 6))
    assert [one._native.found() for one in watches] == [None]


def noting(watches: list[Any]) -> Any:
    forward_mode = native_watch.NativeWatch.forward_mode

    def noted(watch: Any) -> Any:
        watches.append(watch)
        return forward_mode(watch)

    return noted
