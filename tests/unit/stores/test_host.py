"""Inputs in host memory, and, on a GPU, copies that take their time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sac
from sac.full import FullConfig
from sac.stores.host import OnHost
from tests.support.cases import WIDTH, hidden, layer, loss_of
from tests.support.simulated_streams import simulated_streams
from tests.support.stored_regions import Run, Seen, as_region, plainly, wrong
from tests.support.training import deterministic

CYCLES = 50_000_000  # of a GPU's clock: some tens of milliseconds


def test_copy_of_an_input_on_a_device_is_on_the_host(monkeypatch):
    with simulated_streams(monkeypatch) as simulation:
        x = torch.randn(4)
        placed = OnHost().put(x, lambda: "args[0]")
        assert placed.bytes() == (0, 16)
        assert [memory.home for memory in simulation.memory.values()] == ["main", "host"]
        first, second = placed.fetch(), placed.fetch()
        assert torch.equal(first.zero_(), torch.zeros(4))  # what is fetched may be written to
        assert torch.equal(second, x)


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["host", "contiguous", "contiguous+host"])
def test_late_copies_on_a_gpu(monkeypatch, store):
    """The caller overwrites his inputs; slots, pinned memory and what was fetched go round from step to step."""
    plain = Tensor.copy_

    def late(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            torch.cuda._sleep(CYCLES)
        return plain(target, source, non_blocking=non_blocking)

    def program(run: Run) -> Seen:
        models, (_, h) = [layer(dropout=0.2).cuda() for _ in range(6)], hidden(64, WIDTH)
        h = h.cuda()
        for model in models:
            given = h.clone()
            h = run(model, given)
            if run is not plainly:
                given.detach().fill_(float("nan"))
            del given
        loss_of([h.cpu()]).backward()
        return {f"{i} {j}": one.grad for i, model in enumerate(models) for j, one in enumerate(model.parameters())}

    with deterministic("cuda"):
        monkeypatch.setattr(Tensor, "copy_", late)
        assert wrong(program, as_region(store)) == []


@pytest.mark.gpu
def test_the_gpu_holds_nothing_of_the_input():
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    config = FullConfig(store="host")
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = sac.checkpoint(lambda h: h.exp().sin().sum(), x.exp().add(1), config=config)
        assert torch.cuda.memory_allocated() - before <= x.nbytes + 4096  # of exp, outside; the sum goes to the region
        out.backward()
        x.grad = None
