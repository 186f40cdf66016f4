"""Who holds the slots of a buffer, and when they are free again: reset, dropped graphs, collectors, threads."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import RegionError
from sac.full import FullConfig
from sac.stores.contiguous import ContiguousBuffer
from tests.support.cases import WIDTH, layer, loss_of
from tests.support.recording import without_collector


def name() -> str:
    return "args[0]"


def numbers(value: float, count: int = 4) -> Tensor:
    return torch.full((count,), value)


# Reset


def test_reset_takes_every_slot_back():
    config = FullConfig(store="contiguous", num_checkpoints=2)
    x = torch.randn(4, requires_grad=True)
    pending = [sac.checkpoint(torch.sin, x, config=config) for _ in range(2)]
    config.reset()
    out = sac.checkpoint(torch.sin, sac.checkpoint(torch.exp, x, config=config), config=config)
    out.sum().backward()
    assert torch.equal(x.grad, x.exp() * x.exp().cos())
    del pending


def test_backward_of_before_a_reset_never_reads_what_another_region_put():
    config = FullConfig(store="contiguous", num_checkpoints=1)
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    before = sac.checkpoint(torch.sin, x, config=config)
    config.reset()
    after = sac.checkpoint(torch.sin, y, config=config)
    before.sum().backward()
    after.sum().backward()
    assert torch.equal(x.grad, x.cos())
    assert torch.equal(y.grad, y.cos())


def test_backward_of_before_a_reset_runs_while_its_slot_is_its_own():
    config = FullConfig(store="contiguous", num_checkpoints=2)
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    first = sac.checkpoint(torch.sin, x, config=config)
    second = sac.checkpoint(torch.sin, x * 2, config=config)
    config.reset()
    second.sum().backward()
    assert torch.equal(x.grad, 2 * (2 * x).cos())
    other = [sac.checkpoint(torch.sin, y, config=config) for _ in range(2)]  # two slots are free, and not three
    with pytest.raises(RegionError, match="each of its 2"):
        sac.checkpoint(torch.sin, y, config=config)
    sum(other).sum().backward()
    assert torch.equal(y.grad, 2 * y.cos())
    del first


def test_reset_then_another_size():
    config = FullConfig(store="contiguous", num_checkpoints=1)
    x, y = torch.randn(4, requires_grad=True), torch.randn(6, requires_grad=True)
    before = sac.checkpoint(torch.sin, x, config=config)
    config.reset()
    after = sac.checkpoint(torch.sin, y, config=config)
    before.sum().backward()  # its slot lies in the memory of before, which is still whole
    after.sum().backward()
    assert torch.equal(x.grad, x.cos())
    assert torch.equal(y.grad, y.cos())


def test_reset_of_a_buffer_that_has_no_memory_yet():
    buffer = ContiguousBuffer(1)
    buffer.reset()
    assert torch.equal(buffer.put(numbers(1.0), name).fetch(), numbers(1.0))


# Slots come back


def test_slot_of_a_graph_in_a_cycle_comes_back_with_the_collector():
    config = FullConfig(store="contiguous", num_checkpoints=1)
    x = torch.randn(4, requires_grad=True)
    with without_collector():
        cycle = [sac.checkpoint(torch.sin, x, config=config)]
        cycle.append(cycle)
        del cycle
        with pytest.raises(RegionError, match="each of its 1"):
            sac.checkpoint(torch.sin, x, config=config)
        gc.collect()
        sac.checkpoint(torch.sin, x, config=config).sum().backward()
    assert torch.equal(x.grad, x.cos())


class CollectsInCopy(torch.utils._python_dispatch.TorchDispatchMode):
    """Runs the cycle collector while an input is being copied into its slot."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            gc.collect()
        return func(*args, **(kwargs or {}))


def test_collector_that_runs_while_a_slot_is_taken():
    buffer = ContiguousBuffer(2)
    with without_collector():
        cycle = [buffer.put(numbers(1.0), name)]
        cycle.append(cycle)
        del cycle
        with CollectsInCopy():
            second = buffer.put(numbers(2.0), name)
        third = buffer.put(numbers(3.0), name)
    assert torch.equal(second.fetch(), numbers(2.0))
    assert torch.equal(third.fetch(), numbers(3.0))


def test_retained_graph_keeps_its_slot():
    config = FullConfig(store="contiguous", num_checkpoints=1)
    x = torch.randn(4, requires_grad=True)
    with without_collector():
        out = sac.checkpoint(torch.sin, x, config=config).sum()
        out.backward(retain_graph=True)
        with pytest.raises(RegionError, match="each of its 1"):
            sac.checkpoint(torch.sin, x, config=config)
        out.backward()
        sac.checkpoint(torch.sin, x, config=config).sum().backward()
    assert torch.equal(x.grad, x.cos() + x.cos() + x.cos())


# Regions in regions


def test_regions_in_a_region_need_no_slots_of_their_own():
    config = FullConfig(store="contiguous", num_checkpoints=2)
    inner, x = layer(dropout=0.2), torch.randn(4, WIDTH, requires_grad=True)

    def body(run, h: Tensor) -> Tensor:
        for _ in range(3):
            h = run(inner, h) + run(lambda h: h.sum(-1, keepdim=True).sin(), h[:, :2]) + h
        return h

    def grads(run) -> list[Tensor]:
        torch.manual_seed(2)
        out = run(lambda h: body(run, h), run(lambda h: body(run, h), x * 1))
        return list(torch.autograd.grad(loss_of([out]), [x, *inner.parameters()]))

    expected = grads(lambda function, h: function(h))
    for _ in range(3):
        found = grads(lambda function, h: sac.checkpoint(function, h, config=config))
        assert all(map(torch.equal, expected, found))


# Threads


def test_threads_share_a_buffer():
    """Each thread has at most two regions pending at a time; slots go from one to the other."""
    config = FullConfig(store="contiguous", num_checkpoints=8)
    models = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    wrong: list[str] = []

    def work(number: int) -> None:
        model = models[number]
        generator = torch.Generator().manual_seed(number)
        for turn in range(40):
            x = torch.randn(4, WIDTH, generator=generator)
            expected = torch.autograd.grad(model(model(x).sin()).sum(), model.parameters())
            h = sac.checkpoint(lambda x: model(x).sin(), x, config=config)
            out = sac.checkpoint(model, h, config=config)
            if turn % 3:  # else the graph is dropped without backward
                found = torch.autograd.grad(out.sum(), model.parameters())
                if not all(map(torch.equal, expected, found)):
                    wrong.append(f"thread {number} turn {turn}")
            del h, out

    def guarded(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
