"""Copies of inputs, backwards as often as autograd allows, and regions in regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from sac.full import FullConfig
from tests.support.blocks import FunctionBlock, llama_stack
from tests.support.cases import WIDTH, layer, loss_of
from tests.support.custom_ops import Luck, lucky
from tests.support.recording import Recorder, without_collector
from tests.support.stored_regions import plainly
from tests.support.stores import (
    MODES,
    every_call,
    every_call_and_reentrant,
    every_store,
    gradients,
    product,
    same,
    with_slots,
)
from tests.support.training import assert_same_training

# Backward as often as autograd allows


@every_call
def test_two_backwards(call):
    block = FunctionBlock(product)
    leaf = torch.randn(8, 8, requires_grad=True)
    expected = torch.autograd.grad(product(block, leaf * 1).sum(), [leaf, block.a, block.b])
    out = call(block)(leaf * 1).sum()
    for retain in (True, True, False):
        found = torch.autograd.grad(out, [leaf, block.a, block.b], retain_graph=retain)
        assert same(expected, found)


@every_call
def test_double_backward(call):
    block = FunctionBlock(product)
    leaf = torch.randn(8, 8, requires_grad=True)

    def curvature(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        [slope] = torch.autograd.grad(run(leaf * 1).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(slope.sin().sum(), [leaf, block.a, block.b])

    expected = curvature(lambda x: product(block, x))
    assert same(expected, curvature(call(block)))


def two_heads(block: FunctionBlock, x: Tensor) -> tuple[Tensor, Tensor]:
    return x @ block.a, x @ block.b


@every_store
def test_what_one_backward_leaves_for_a_later_one_is_not_overwritten(store):
    """The first backward runs the region again, and gives the slot back; the second reads what it left."""
    value = FullConfig(**with_slots(store, 1))
    block, x = FunctionBlock(two_heads), torch.randn(8, 8)
    for _ in range(3):
        left, right = sac.checkpoint(block, x.clone(), config=value)
        [first] = torch.autograd.grad(left.sum(), [block.a])
        other = sac.checkpoint(block, torch.full((8, 8), 1000.0), config=value)  # the same slot, another input
        [second] = torch.autograd.grad(right.sum(), [block.b])
        assert torch.equal(first, x.t() @ torch.ones(8, 8))
        assert torch.equal(second, x.t() @ torch.ones(8, 8))
        del other


@every_call_and_reentrant
def test_backward_that_fails_can_be_run_again(call):
    """The op that fails runs again under each engine; where it is called from does not."""
    block = FunctionBlock(lambda block, x: lucky(x @ block.a).sin() @ block.b)
    leaf = torch.randn(8, 8, requires_grad=True)
    sources = [leaf, block.a, block.b]
    expected = gradients(product(block, leaf * 1), sources)
    run = call(block)
    try:
        for _ in range(3):
            Luck.left = True
            out = run(leaf * 1)
            Luck.left = False
            with pytest.raises(ValueError, match="out of luck"):
                out.sum().backward()
            Luck.left = True
            assert same(expected, gradients(out, sources))
    finally:
        Luck.left = True


@every_store
def test_forward_that_fails_can_be_run_again(store):
    value = FullConfig(**with_slots(store, 1))
    x = torch.randn(8, requires_grad=True)

    def fails(h: Tensor) -> Tensor:
        h = h.sin()
        raise ValueError("out of luck")

    with without_collector():
        for _ in range(3):
            with pytest.raises(ValueError, match="out of luck"):
                sac.checkpoint(fails, x * 1, config=value)
        sac.checkpoint(torch.sin, x * 1, config=value).sum().backward()
    assert torch.equal(x.grad, x.cos())


# Regions in regions, and hooks around them


@pytest.mark.parametrize("outer_too", [False, True])
@every_store
def test_nested_regions(store, outer_too):
    inner_config = FullConfig(**store)
    outer_config = FullConfig(**store) if outer_too else None
    inner, outer, leaf = layer(dropout=0.3), layer(dropout=0.3), torch.randn(4, WIDTH, requires_grad=True)

    def grads(run_inner: Any, run_outer: Any) -> list[Tensor]:
        torch.manual_seed(7)

        def body(h: Tensor) -> Tensor:
            for _ in range(3):
                h = run_inner(inner, outer(h)) + h
            return h

        sources = [leaf, *inner.parameters(), *outer.parameters()]
        out = run_outer(body, run_outer(body, leaf * 1))
        return [*torch.autograd.grad(loss_of([out]), sources), torch.get_rng_state()]

    expected = grads(plainly, plainly)
    for _ in range(3):
        found = grads(
            lambda function, h: sac.checkpoint(function, h, config=inner_config),
            lambda function, h: sac.checkpoint(function, h, config=outer_config),
        )
        assert same(expected, found)


@pytest.mark.parametrize("mode", ["full", "selective"])
@every_store
def test_under_save_on_cpu(mode, store):
    assert_same_training(llama_stack, MODES[mode](**store), steps=2, around_forward=torch.autograd.graph.save_on_cpu)


@every_store
def test_region_of_torch_around(store):
    from torch.utils.checkpoint import checkpoint

    value = FullConfig(**store)
    model, leaf = layer(dropout=0.3), torch.randn(4, WIDTH, requires_grad=True)

    def grads(run: Any) -> list[Tensor]:
        torch.manual_seed(7)
        out = checkpoint(lambda h: run(model, run(model, h) + h), leaf * 1, use_reentrant=False)
        return list(torch.autograd.grad(loss_of([out]), [leaf, *model.parameters()]))

    expected = grads(plainly)
    for _ in range(3):
        found = grads(lambda function, h: sac.checkpoint(function, h, config=value))
        assert same(expected, found)


# Where nothing is to be kept


@every_store
def test_no_grad_and_frozen_regions_keep_nothing(store):
    value = FullConfig(**with_slots(store, 1))
    model = layer().requires_grad_(False)
    recorder = Recorder()
    with without_collector():
        with recorder:
            with torch.no_grad():
                outputs = [sac.checkpoint(model, torch.randn(4, WIDTH), config=value) for _ in range(3)]
            assert recorder.live_bytes(besides=outputs) == 0
            outputs += [sac.checkpoint(model, torch.randn(4, WIDTH), config=value) for _ in range(3)]
        assert recorder.live_bytes(besides=outputs) <= (128 if value.buffer is not None else 0)
