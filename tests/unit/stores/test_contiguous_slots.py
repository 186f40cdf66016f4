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
from tests.support.cases import WIDTH
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
    with pytest.raises(RegionError) as error:
        before.sum().backward()
    assert str(error.value) == (
        "contiguous buffer: reset() took back the slot of this region's input, and another region's input lies in it "
        "now\n"
        "    fix: call reset() only when the forwards before it will have no backward"
    )
    del before
    after.sum().backward()
    assert torch.equal(y.grad, y.cos())


# Slots come back


def test_drop_gives_back_once():
    buffer = ContiguousBuffer(1)
    first = buffer.put(numbers(1.0), name)
    first.drop()
    first.drop()
    second = buffer.put(numbers(2.0), name)
    first.drop()
    del first
    with pytest.raises(RegionError, match="each of its 1"):
        buffer.put(numbers(3.0), name)
    assert torch.equal(second.fetch(), numbers(2.0))


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


def test_hooks_around_get_a_copy_when_they_come_late():
    buffer = ContiguousBuffer(1)
    placed = buffer.put(numbers(1.0), name)
    given = []
    placed.pack_with_outer_hooks((lambda tensor: given.append(tensor) or tensor, lambda packed: packed))
    other = buffer.put(numbers(2.0), name)
    assert torch.equal(given[0], numbers(1.0))
    placed.fetch().add_(1)  # what is fetched may be written to
    assert torch.equal(placed.fetch(), numbers(1.0))
    assert torch.equal(other.fetch(), numbers(2.0))


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
