"""TransformerEngine's `checkpoint`: its signature and defaults, the old form too, and what its own tests hold."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sac.compat import transformer_engine as te
from sac.errors import ConfigError, RegionError
from sac.full import RngTracker
from tests.support.ranks import run_ranks
from tests.support.training import assert_same
from tests.unit.compat.programs import WIDTH, forking, gradients_of, plainly, same_everywhere, trained


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_gradients_are_those_of_the_plain_call(use_reentrant, needs_grad):
    """As its test of full recomputation: a layer called with keywords, the input with and without a gradient."""
    kwargs = {"mask": torch.ones(WIDTH), "scale": 0.5}
    ours = trained(partial(te.checkpoint, use_reentrant=use_reentrant), needs_grad=needs_grad, **kwargs)
    assert_same(trained(plainly, needs_grad=needs_grad, **kwargs), ours)


def test_it_is_reentrant_unless_told_otherwise():
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(torch.autograd.grad(te.checkpoint(torch.exp, x, use_reentrant=False).sum(), x)[0], x.exp())
    with pytest.raises(RegionError, match="use_reentrant=False"):
        torch.autograd.grad(te.checkpoint(torch.exp, x).sum(), x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_tracker_is_put_back(use_reentrant):
    tracker = te.CudaRNGStatesTracker()
    call = partial(te.checkpoint, get_rng_state_tracker=lambda: tracker, use_reentrant=use_reentrant)
    assert_same(forking(plainly, RngTracker()), forking(call, tracker))


def test_the_old_form_is_understood():
    tracker = RngTracker()
    seen = []

    def call(function: Any, *args: Any) -> Any:
        with pytest.warns(
            DeprecationWarning,
            match="^distribute_saved_activations, get_rng_state_tracker and tp_group "
            "are keywords of checkpoint: by position they will be taken for arguments of the function$",
        ):
            return te.checkpoint(function, False, lambda: seen.append(1) or tracker, None, *args)

    assert_same(forking(plainly, RngTracker()), forking(call, tracker))
    assert seen


def test_contexts_of_the_caller_are_refused():
    with pytest.raises(
        ConfigError, match=r"transformer_engine\.checkpoint\.context_fn: the caller's contexts .* not entered"
    ):
        te.checkpoint(torch.exp, torch.ones(2), context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext()))


def test_the_check_of_recomputation_is_passed_on():
    sizes = (one for one in (2, 3))  # a generator is not put back

    def region(x: Tensor) -> Tensor:
        return x[: next(sizes)].exp().exp().sum()

    x = torch.ones(4, requires_grad=True)
    out = te.checkpoint(region, x, use_reentrant=False)
    with pytest.raises(RegionError, match="was float32"):
        out.backward()
    with pytest.raises(
        ConfigError, match=r'transformer_engine\.checkpoint\.determinism_check: determinism_check is "sometimes"'
    ):
        te.checkpoint(torch.exp, x, determinism_check="sometimes")


@pytest.mark.parametrize("module", ["quantization", "fp8"])
def test_fp8_in_an_unknown_version_is_refused(monkeypatch, module):
    """FP8 in a known one: tests/unit/region/test_fp8_state.py."""
    state = type("Manager", (), {"is_fp8_enabled": staticmethod(lambda: True)})
    fake = SimpleNamespace(FP8GlobalStateManager=state)
    monkeypatch.setitem(sys.modules, f"transformer_engine.pytorch.{module}", fake)
    with pytest.raises(
        ConfigError, match=r"FP8 is on around the region, .* this version of TransformerEngine is not known"
    ):
        te.checkpoint(torch.exp, torch.ones(2))
    state.is_fp8_enabled = staticmethod(lambda: False)
    te.checkpoint(torch.exp, torch.ones(2))


def test_scattering_without_any_group_is_an_error():
    with pytest.raises(
        ConfigError, match=r"transformer_engine\.checkpoint\.tp_group: .* no group to scatter them over"
    ):
        te.checkpoint(torch.exp, torch.ones(2), distribute_saved_activations=True)


def scattered_over_the_default_group(use_reentrant: bool) -> tuple[list[str], bool]:
    """The input in a residual too, which TransformerEngine gets wrong: it writes its share into the caller's tensor."""

    def program(scatters: bool) -> tuple[dict[str, Tensor], bool]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3))
        x = torch.randn(3, WIDTH, requires_grad=True)
        h = x * 1.5
        before = h.detach().clone()
        options = {"distribute_saved_activations": True, "use_reentrant": use_reentrant}
        out = te.checkpoint(block, h, **options) if scatters else block(h)
        untouched = torch.equal(h.detach(), before)
        return gradients_of((out + h).square().sum(), x, block), untouched

    plain, _ = program(False)
    ours, untouched = program(True)
    return same_everywhere(plain, ours), untouched


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_no_group_means_the_default_group(use_reentrant):
    assert run_ranks(2, scattered_over_the_default_group, use_reentrant) == [([], True)] * 2
