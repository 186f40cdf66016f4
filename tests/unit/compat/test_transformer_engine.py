"""TransformerEngine's `checkpoint`: its signature and defaults, the old form too, and what its own tests hold."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch

from sac.compat import transformer_engine as te
from sac.errors import ConfigError, RegionError
from sac.full import RngTracker
from tests.support.ranks import run_ranks
from tests.support.stored_regions import plainly
from tests.support.training import assert_same
from tests.unit.compat.programs import WIDTH, forking, trained, unequal_in_a_residual


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

    def call(function: Any, *args: Any) -> Any:
        with pytest.warns(DeprecationWarning, match="are keywords of checkpoint: by position they will be"):
            return te.checkpoint(function, False, lambda: tracker, None, *args)

    assert_same(forking(plainly, RngTracker()), forking(call, tracker))


def test_the_check_of_recomputation_is_passed_on():
    sizes = (one for one in (2, 3))  # a generator is not put back
    out = te.checkpoint(lambda x: x[: next(sizes)].exp().exp(), torch.ones(4, requires_grad=True), use_reentrant=False)
    with pytest.raises(RegionError, match="was float32"):
        out.sum().backward()


def contexts() -> tuple[Any, Any]:
    return contextlib.nullcontext(), contextlib.nullcontext()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"context_fn": contexts}, r"checkpoint\.context_fn: its contexts are not entered"),
        ({"determinism_check": "sometimes"}, r'checkpoint\.determinism_check: determinism_check is "sometimes"'),
        ({"distribute_saved_activations": True}, r"checkpoint\.tp_group: .* no group to scatter them over"),
    ],
)
def test_what_is_refused(given, text):
    with pytest.raises(ConfigError, match=text):
        te.checkpoint(torch.exp, torch.ones(2), **given)


def scattered_over_the_default_group(use_reentrant: bool) -> list[str]:
    scatters = partial(te.checkpoint, distribute_saved_activations=True, use_reentrant=use_reentrant)
    return unequal_in_a_residual(scatters)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_no_group_means_the_default_group(use_reentrant):
    assert run_ranks(2, scattered_over_the_default_group, use_reentrant) == [[]] * 2
