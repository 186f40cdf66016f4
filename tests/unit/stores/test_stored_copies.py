"""Stores that keep a copy of the input: the caller's tensor is free, every byte is counted, and errors lose nothing."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import sac
from sac.full import FullConfig
from tests.support.blocks import FunctionBlock, llama_stack, tokens
from tests.support.recording import Recorder, without_collector
from tests.support.stores import (
    MODES,
    every_call_and_reentrant,
    every_store,
    gradients,
    product,
    same,
    with_slots,
)
from tests.support.training import assert_same_training, built


@every_call_and_reentrant
def test_the_callers_tensor_is_his_own(call):
    """He may drop it, or write to it, between forward and backward; we never do."""
    block, leaf = FunctionBlock(product), torch.randn(8, 8, requires_grad=True)
    expected = gradients(product(block, leaf.exp()), [leaf, block.a, block.b])
    run = call(block)
    with without_collector():
        for _ in range(3):
            x = leaf.exp()
            before, version, address = x.detach().clone(), x._version, x.data_ptr()
            out = run(x)
            assert torch.equal(x, before)
            assert (x._version, x.data_ptr()) == (version, address)
            assert same(expected, gradients(out, [leaf, block.a, block.b]))
            x = leaf.detach().exp().add(1)
            tensor, storage = weakref.ref(x), StorageWeakRef(x.untyped_storage())
            out = run(x)
            x.fill_(float("nan"))
            del x
            assert tensor() is None
            assert storage.expired()
            del out


@every_store
def test_every_kept_byte_is_counted_and_goes(store):
    value = FullConfig(**store)
    block, leaf = FunctionBlock(product), torch.randn(8, 8, requires_grad=True)
    held = 256 * (value.num_checkpoints or 1)
    with without_collector():
        for turn in range(3):
            recorder = Recorder()
            with recorder:
                out = sac.checkpoint(block, leaf * 1, config=value)
            made_now = turn == 0 or "contiguous" not in value.stores  # the buffer is made once
            assert recorder.live_bytes(besides=out) == made_now * held
            with recorder:
                out.sum().backward()
            del out
            leaf.grad = block.a.grad = block.b.grad = None
            assert recorder.live_bytes() == (held if turn == 0 and "contiguous" in value.stores else 0)


@every_store
def test_a_slot_is_free_after_an_error_and_without_grad(store):
    value = FullConfig(**with_slots(store, 1))
    x = torch.randn(8, requires_grad=True)

    def fails(h: Tensor) -> Tensor:
        raise ValueError("out of luck")

    with without_collector():
        for _ in range(3):
            with pytest.raises(ValueError, match="out of luck"):
                sac.checkpoint(fails, x * 1, config=value)
            with torch.no_grad():
                sac.checkpoint(torch.sin, x * 1, config=value)
        sac.checkpoint(torch.sin, x * 1, config=value).sum().backward()
    assert torch.equal(x.grad, x.cos())


def two_heads(block: FunctionBlock, x: Tensor) -> tuple[Tensor, Tensor]:
    return x @ block.a, x @ block.b


@every_store
def test_what_one_backward_leaves_for_a_later_one_is_not_overwritten(store):
    """The first backward runs the region again, and gives the slot back; the second reads what it left."""
    value = FullConfig(**with_slots(store, 1))
    block, x = FunctionBlock(two_heads), torch.randn(8, 8)
    left, right = sac.checkpoint(block, x.clone(), config=value)
    [first] = torch.autograd.grad(left.sum(), [block.a])
    other = sac.checkpoint(block, torch.full((8, 8), 1000.0), config=value)  # the same slot, another input
    [second] = torch.autograd.grad(right.sum(), [block.b])
    assert torch.equal(first, x.t() @ torch.ones(8, 8))
    assert torch.equal(second, first)
    del other


@pytest.mark.parametrize("mode", ["full", "selective"])
@every_store
def test_hooks_around_the_region_decide(mode, store):
    assert_same_training(llama_stack, MODES[mode](**store), steps=2, around_forward=torch.autograd.graph.save_on_cpu)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@every_store
def test_copy_of_a_model_with_a_pending_backward(again, store):
    model = sac.apply(built(llama_stack), MODES["full"](**store))
    [x] = tokens()
    pending = model(x.requires_grad_())
    twin: Any = again(model)
    twin(x).sum().backward()
    pending.sum().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
