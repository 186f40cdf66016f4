"""One buffer with slots for inputs: its memory, and what is told when none is free or none fits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

import sac
from sac.errors import RegionError
from sac.full import FullConfig
from sac.stores.contiguous import ContiguousBuffer
from tests.support.blocks import llama_stack, tokens
from tests.support.cases import WIDTH, layer
from tests.support.recording import Recorder, without_collector
from tests.support.training import assert_same_training, built


def name() -> str:
    return "argument 0"


def numbers(value: float, count: int = 4) -> Tensor:
    return torch.full((count,), value)


# The memory


def test_memory_is_one_piece_made_once():
    config = FullConfig(store="contiguous", num_checkpoints=3)
    model, recorder = layer(), Recorder()
    for _ in range(4):
        with recorder:
            h = torch.randn(4, WIDTH)
            for _ in range(3):
                h = sac.checkpoint(model, h, config=config)
            h.sum().backward()
    # Three slots of 4 x 8 floats. No other op makes as much.
    assert [size for _, size in recorder._made.values() if size == 3 * 128] == [3 * 128]


def test_slots_lie_next_to_each_other():
    buffer = ContiguousBuffer(3)
    placed = [buffer.put(numbers(one), name) for one in (1.0, 2.0, 3.0)]
    first, second, third = (one.inner.value.data_ptr() for one in placed)
    assert (second - first, third - second) == (16, 16)
    assert all(one.inner.value.untyped_storage().nbytes() == 48 for one in placed)


def test_host_memory_of_the_cpu_counts_as_the_device():
    placed = ContiguousBuffer(2, on_host=True).put(numbers(1.0), name)
    assert placed.bytes() == (16, 0)


def test_another_size_may_come_when_all_is_free():
    config = FullConfig(store="contiguous", num_checkpoints=2)
    model = layer()
    for rows in (4, 7, 1, 4):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        expected = torch.autograd.grad(model(model(x)).sum(), x)[0]
        out = sac.checkpoint(model, sac.checkpoint(model, x, config=config), config=config)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_old_memory_goes_before_the_new_is_made():
    buffer = ContiguousBuffer(2)
    recorder = Recorder()
    with without_collector(), recorder:
        buffer.put(numbers(1.0, 100), name)
        assert recorder.live_bytes() == 800
        buffer.put(numbers(1.0, 50), name)
        assert recorder.live_bytes() == 400


def test_buffer_under_training_with_batches_of_several_sizes():
    sizes = iter([2, 3, 1, 2] * 2)

    def inputs(device: str) -> tuple[Tensor, ...]:
        return tokens(device, batch=next(sizes))

    value = {"mode": "full", "blocks": ["blocks.*"], "store": "contiguous", "num_checkpoints": 2}
    assert_same_training(llama_stack, value, steps=4, make_input=inputs)


# Errors


def test_one_checkpoint_too_many():
    config = FullConfig(store="contiguous", num_checkpoints=2)
    model, x = layer(), torch.randn(4, WIDTH, requires_grad=True)
    outputs = [sac.checkpoint(model, x, config=config) for _ in range(2)]
    with pytest.raises(RegionError) as error:
        sac.checkpoint(lambda *, hidden: model(hidden), hidden=x, config=config)
    assert str(error.value) == (
        "argument 0: no slot of the contiguous buffer is free: each of its 2 (num_checkpoints) holds the input "
        "of a region whose backward has not run\n"
        "    fix: let num_checkpoints be the number of regions whose backward is pending at once; of forwards whose "
        "backward will never run, drop the outputs or call reset()"
    )
    expected = torch.autograd.grad(model(x).sum(), x)[0]  # nothing is lost
    for out in outputs:
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    assert torch.equal(torch.autograd.grad(sac.checkpoint(model, x, config=config).sum(), x)[0], expected)


OTHERS = {
    "size": (lambda: torch.randn(3, WIDTH), "24 elements of float32 on cpu"),
    "dtype": (lambda: torch.randn(4, WIDTH).double(), "32 elements of float64 on cpu"),
    "device": (lambda: torch.empty(4, WIDTH, device="meta"), "32 elements of float32 on meta"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_inputs_that_differ(what):
    make, told = OTHERS[what]
    config = FullConfig(store="contiguous", num_checkpoints=3)
    x = torch.randn(4, WIDTH, requires_grad=True)
    out = sac.checkpoint(torch.sin, x, config=config)
    other = make().requires_grad_()
    with pytest.raises(RegionError) as error:
        sac.checkpoint(torch.sin, other, config=config)
    assert str(error.value) == (
        f"argument 0: it has {told}, but the slots of the contiguous buffer have 32 elements of float32 on cpu and "
        "cannot be replaced while some are in use\n"
        "    fix: choose inputs of one size by `keep`, or another `store`; the size may change while no backward is "
        "pending"
    )
    out.sum().backward()
    assert torch.equal(x.grad, x.cos())
    sac.checkpoint(torch.sin, other, config=config).sum().backward()


def test_inputs_of_a_region_differ():
    config = FullConfig(store="contiguous", num_checkpoints=3, keep="all")
    x, y = torch.randn(4, requires_grad=True), torch.randn(1, requires_grad=True)
    with without_collector():
        with pytest.raises(RegionError, match=r"^argument 1: it has 1 elements of float32 on cpu, but the slots"):
            sac.checkpoint(torch.mul, x, y, config=config)
        out = sac.checkpoint(torch.mul, y, y, config=config)  # the slot of x is free again
    out.sum().backward()
    assert torch.equal(y.grad, 2 * y)


# Copies


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copy_is_empty_and_alike(way, on_host):
    buffer = ContiguousBuffer(1, on_host=on_host)
    placed = buffer.put(numbers(1.0), name)
    twin = way(buffer)
    assert (twin.num_checkpoints, twin.on_host) == (1, on_host)
    twin.put(numbers(2.0, 7), name)
    assert torch.equal(placed.fetch(), numbers(1.0))


@pytest.mark.parametrize(
    ("on_host", "told"), [(False, "in one buffer of 4 slots"), (True, "in one buffer of 4 slots in host memory")]
)
def test_description(on_host, told):
    assert ContiguousBuffer(4, on_host=on_host).describe() == told


def test_regions_of_a_model_share_one_buffer():
    model = sac.apply(
        built(lambda: llama_stack(3)),
        {"mode": "full", "blocks": ["blocks.*"], "store": "contiguous", "num_checkpoints": 2},
    )
    [x] = tokens()
    with pytest.raises(RegionError, match="each of its 2"):
        model(x)
