"""Inputs in host memory: what is where, and, on a GPU, copies that take their time."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

import sac
from sac.full import FullConfig
from sac.stores.host import OnHost
from tests.support.blocks import llama_stack, policy, save, selective
from tests.support.cases import WIDTH, hidden, layer, loss_of
from tests.support.simulated_streams import simulated_streams
from tests.support.training import assert_same_training, deterministic

STORES = ("host", "contiguous", "contiguous+host")
CYCLES = 50_000_000  # of a GPU's clock: some tens of milliseconds


def name() -> str:
    return "args[0]"


def test_copy_of_an_input_on_the_cpu_is_a_plain_one():
    x = torch.randn(4)
    placed = OnHost().put(x, name)
    assert placed.bytes() == (16, 0)
    assert placed.fetch().data_ptr() != x.data_ptr()
    assert torch.equal(placed.fetch(), x)


def test_copy_of_an_input_on_a_device_is_on_the_host(monkeypatch):
    with simulated_streams(monkeypatch) as simulation:
        x = torch.randn(4)
        placed = OnHost().put(x, name)
        assert placed.bytes() == (0, 16)
        assert [memory.home for memory in simulation.memory.values()] == ["main", "host"]
        first, second = placed.fetch(), placed.fetch()
        assert torch.equal(first.zero_(), torch.zeros(4))  # what is fetched may be written to
        assert torch.equal(second, x)


def test_description():
    assert OnHost().describe() == "in host memory"


def test_host_of_a_model_goes_with_it():
    for way in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        x = torch.randn(4)
        assert torch.equal(way(OnHost()).put(x, name).fetch(), x)


# On a GPU


def slow_copies(patch: pytest.MonkeyPatch) -> None:
    """Let every copy between device and host begin late, on the stream that it runs on."""
    plain = Tensor.copy_

    def late(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            torch.cuda._sleep(CYCLES)
        return plain(target, source, non_blocking=non_blocking)

    patch.setattr(Tensor, "copy_", late)


def config_of(store: str) -> FullConfig:
    return FullConfig(store=store, num_checkpoints=8 if "contiguous" in store else None)


@pytest.mark.gpu
@pytest.mark.parametrize("store", STORES)
def test_late_copies_and_a_caller_that_overwrites(monkeypatch, store):
    model, x = layer().cuda(), torch.randn(64, WIDTH, device="cuda")
    with deterministic("cuda"):
        expected = torch.autograd.grad(model(x.sin()).sum(), model.parameters())
        slow_copies(monkeypatch)
        for _ in range(3):
            h = x.clone()
            out = sac.checkpoint(lambda h: model(h.sin()), h, config=config_of(store))
            h.fill_(float("nan"))
            del h
            torch.full((64, WIDTH), float("nan"), device="cuda")  # the memory of h, most likely
            assert all(map(torch.equal, expected, torch.autograd.grad(out.sum(), model.parameters())))


@pytest.mark.gpu
@pytest.mark.parametrize("store", STORES)
def test_late_copies_and_a_region_that_overwrites(monkeypatch, store):
    model, x = layer().cuda(), torch.randn(64, WIDTH, device="cuda", requires_grad=True)

    def body(h: Tensor) -> Tensor:
        return model(h.mul_(2).add_(1))

    with deterministic("cuda"):
        expected = torch.autograd.grad(body(x * 1).sum(), [x, *model.parameters()])
        slow_copies(monkeypatch)
        for _ in range(3):
            out = sac.checkpoint(body, x * 1, config=config_of(store))
            assert all(map(torch.equal, expected, torch.autograd.grad(out.sum(), [x, *model.parameters()])))


@pytest.mark.gpu
@pytest.mark.parametrize("store", STORES)
def test_late_copies_and_memory_that_is_used_again(monkeypatch, store):
    """Slots, pinned memory and what was fetched go round from region to region and from step to step."""
    models, x = [layer(dropout=0.2).cuda() for _ in range(6)], torch.randn(64, WIDTH, device="cuda", requires_grad=True)
    config = config_of(store)
    sources = [x, *(weight for model in models for weight in model.parameters())]

    def step(run) -> list[Tensor]:
        torch.manual_seed(4)
        h = x * 1
        for model in models:
            h = run(model, h)
        return list(torch.autograd.grad(loss_of([h.cpu()]), sources))

    with deterministic("cuda"):
        expected = step(lambda model, h: model(h))
        slow_copies(monkeypatch)
        for _ in range(3):
            found = step(lambda model, h: sac.checkpoint(model, h, config=config))
            assert all(map(torch.equal, expected, found))


@pytest.mark.gpu
@pytest.mark.parametrize("store", STORES)
def test_late_copies_on_streams_of_the_callers(monkeypatch, store):
    model, x = layer().cuda(), torch.randn(64, WIDTH, device="cuda")
    config, streams = config_of(store), [torch.cuda.Stream() for _ in range(3)]
    with deterministic("cuda"):
        expected = torch.autograd.grad(model(x.sin()).sum(), model.parameters())
        torch.cuda.synchronize()
        slow_copies(monkeypatch)
        for turn in range(6):
            with torch.cuda.stream(streams[turn % 3]):
                out = sac.checkpoint(lambda h: model(h.sin()), x.clone(), config=config)
                found = torch.autograd.grad(out.sum(), model.parameters())
                torch.cuda.current_stream().synchronize()
            assert all(map(torch.equal, expected, found))


@pytest.mark.gpu
@pytest.mark.parametrize("store", STORES)
def test_hooks_around_get_what_is_whole(monkeypatch, store):
    model, (x, _) = layer().cuda(), hidden(64, WIDTH)
    x = x.detach().cuda().requires_grad_()
    with deterministic("cuda"):
        expected = torch.autograd.grad(model(x * 1).sum(), [x, *model.parameters()])
        slow_copies(monkeypatch)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            out = sac.checkpoint(model, x * 1, config=config_of(store))
        assert all(map(torch.equal, expected, torch.autograd.grad(out.sum(), [x, *model.parameters()])))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("store", STORES)
def test_training_on_the_gpu(store, mode):
    more = {"store": store, **({"num_checkpoints": 2} if "contiguous" in store else {})}
    value = (
        {"mode": "full", "blocks": ["blocks.*"], **more}
        if mode == "full"
        else selective(policy(save("matmul")), **more)
    )
    with deterministic("cuda"):
        assert_same_training(llama_stack, value, steps=3, device="cuda")


@pytest.mark.gpu
def test_device_holds_nothing_of_the_input():
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    config = FullConfig(store="host")
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = sac.checkpoint(lambda h: h.exp().sin().sum(), x.exp().add(1), config=config)
        assert torch.cuda.memory_allocated() - before <= x.nbytes + 4096  # of exp, outside; the sum goes to the region
        out.backward()
        x.grad = None


@pytest.mark.gpu
def test_conjugate_input_on_the_gpu(monkeypatch):
    x = torch.randn(64, 64, dtype=torch.complex64, device="cuda", requires_grad=True)
    expected = torch.autograd.grad(torch.view_as_real(x.conj().sin()).sum(), x)[0]
    slow_copies(monkeypatch)
    out = sac.checkpoint(lambda h: torch.view_as_real(h.sin()), (x * 1).conj(), config=FullConfig(store="host"))
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
