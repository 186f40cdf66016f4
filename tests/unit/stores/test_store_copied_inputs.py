"""What holds for every store that keeps a copy of its own: training, writes to the input, memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import sac
from sac.full import FullConfig
from tests.support.blocks import (
    FunctionBlock,
    Stack,
    llama_stack,
    square,
    with_dropout,
)
from tests.support.cases import WIDTH, layer, loss_of
from tests.support.recording import Recorder, without_collector
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

# Training


@pytest.mark.parametrize("mode", MODES)
@every_store
def test_training_is_the_same(mode, store):
    def build() -> Stack:
        return with_dropout(llama_stack(), 0.2, 0.1)

    assert_same_training(build, MODES[mode](**store), steps=3)


@pytest.mark.parametrize("mode", MODES)
@every_store
def test_training_on_inputs_without_gradient(mode, store):
    assert_same_training(llama_stack, MODES[mode](**store), steps=2, input_needs_grad=[False])


def two_inputs(block: FunctionBlock, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ block.a).sin() * y, (y @ block.b).relu() + x


@pytest.mark.parametrize("keep", ["first", "all", lambda position, tensor: position == 1])
@pytest.mark.parametrize("mode", ["full", "selective"])
@every_store
def test_which_inputs_are_kept(mode, keep, store):
    def build() -> Stack:
        return Stack(FunctionBlock(two_inputs), FunctionBlock(two_inputs))

    def inputs(device: str) -> tuple[Tensor, ...]:
        return (*square(device), *square(device))

    value = MODES[mode](**with_slots(store, 4), keep=keep)
    assert_same_training(build, value, steps=2, make_input=inputs)


@every_store
def test_what_is_not_floating_point_is_kept_on_request(store):
    model, table = layer(), nn.Embedding(16, WIDTH)
    seen = []

    def keep(position: int, tensor: Tensor) -> bool:
        seen.append((position, tensor.dtype))
        return tensor.dtype == torch.int64

    ids = torch.arange(6)
    out = sac.checkpoint(lambda ids: model(table(ids)), ids, config=FullConfig(**store, keep=keep))
    ids.zero_()
    out.sum().backward()
    assert seen == [(0, torch.int64)]
    assert all(table.weight.grad[row].count_nonzero() for row in range(6))


# Writes


def writes_to_input(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x.mul_(2).add_(1) @ block.a).sin() @ block.b


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:], lambda x: x.t()], ids=["whole", "view", "transposed"])
@every_call
def test_region_that_writes_to_its_input(call, view):
    def grads(run: Callable[..., Any], block: FunctionBlock) -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.randn(8, 8, requires_grad=True)
        loss_of([run(view(x * 1))]).backward()
        found = [x.grad.clone(), block.a.grad.clone(), block.b.grad.clone()]
        block.zero_grad()
        return found

    torch.manual_seed(1)
    block = FunctionBlock(writes_to_input)
    plain = copy.deepcopy(block)
    expected = grads(plain, plain)
    run = call(block)
    for _ in range(3):
        assert same(expected, grads(run, block))


@every_call_and_reentrant
def test_caller_writes_between_forward_and_backward(call):
    block = FunctionBlock(product)
    x = torch.randn(8, 8)
    expected = gradients(product(block, x), [block.a, block.b])
    run = call(block)
    for _ in range(3):
        h = x.clone()
        out = run(h)
        h.fill_(float("nan"))
        assert same(expected, gradients(out, [block.a, block.b]))


@every_call_and_reentrant
def test_the_callers_tensor_is_left_alone(call):
    block = FunctionBlock(product)
    run = call(block)
    for _ in range(2):
        x = torch.randn(8, 8, requires_grad=True)
        before, version, address = x.detach().clone(), x._version, x.data_ptr()
        run(x).sum().backward()
        assert torch.equal(x, before)
        assert (x._version, x.data_ptr(), x.stride()) == (version, address, before.stride())


# Memory


@every_call_and_reentrant
def test_the_callers_tensor_is_free_to_go(call):
    run = call(FunctionBlock(product))
    leaf = torch.randn(8, 8, requires_grad=True)
    with without_collector():
        for _ in range(3):
            x = leaf.exp().add(1)  # no op outside of the region saves it
            tensor, storage = weakref.ref(x), StorageWeakRef(x.untyped_storage())
            out = run(x)
            del x
            assert tensor() is None
            assert storage.expired()
            out.sum().backward()


@every_store
def test_every_kept_byte_is_counted_and_goes(store):
    value = FullConfig(**store)
    block, leaf = FunctionBlock(product), torch.randn(8, 8, requires_grad=True)
    slots = value.num_checkpoints or 1
    with without_collector():
        for turn in range(4):
            recorder = Recorder()
            with recorder:
                out = sac.checkpoint(block, leaf * 1, config=value)
            made_now = turn == 0 or "contiguous" not in value.stores  # the buffer is made once
            assert recorder.live_bytes(besides=out) == made_now * 256 * (slots if "contiguous" in value.stores else 1)
            with recorder:
                out.sum().backward()
            del out
            leaf.grad = block.a.grad = block.b.grad = None
            assert recorder.live_bytes() == (256 * slots if turn == 0 and "contiguous" in value.stores else 0)


@every_store
def test_graph_that_is_dropped_without_backward(store):
    value = FullConfig(**with_slots(store, 1))
    block, leaf = FunctionBlock(product), torch.randn(8, 8, requires_grad=True)
    with without_collector():
        for _ in range(3):
            recorder = Recorder()
            with recorder:
                out = sac.checkpoint(block, leaf * 1, config=value)
            del out
            assert recorder.live_bytes() <= (256 if value.buffer is not None else 0)
