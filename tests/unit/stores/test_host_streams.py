"""Copies to the host and into slots, on simulated streams and a GPU: the same results, and every access is ordered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sac
from sac.errors import RegionError
from sac.full import FullConfig
from sac.stores.contiguous import ContiguousBuffer
from sac.stores.store import OnHost, StoredTensor
from tests.support.cases import CASES, WIDTH, Run, Seen, hidden, layer, loss_of, written_after, written_inside
from tests.support.pairs import in_pairs
from tests.support.ranks import run_ranks
from tests.support.simulated_streams import Simulation, simulated_streams
from tests.support.stored_regions import MODES, as_region, compare, does_not_fit, plainly, wrong
from tests.support.training import deterministic

STORES = ("host", "contiguous")


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    with simulated_streams(monkeypatch) as one:
        yield one
    assert one.races == []


def test_copy_of_an_input_on_a_device_is_on_the_host(monkeypatch):
    with simulated_streams(monkeypatch) as simulation:
        x = torch.randn(4)
        placed = OnHost().put(x, lambda: "args[0]")
        assert placed.bytes == (0, 16)
        assert [memory.home for memory in simulation.memory.values()] == ["main", "host"]
        first, second = placed.fetch(), placed.fetch()
        assert torch.equal(first.zero_(), torch.zeros(4))  # what is fetched may be written to
        assert torch.equal(second, x)


@in_pairs(mode=MODES.keys(), store=STORES, name=CASES.keys(), unless=does_not_fit)
def test_every_program(simulation, mode, store, name):
    assert compare(name, store, MODES[mode], keep="all" if store == "host" else "first") == []


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("mode", "program"), [("non-reentrant", written_inside), *((mode, written_after) for mode in MODES)]
)
def test_writes_to_the_input(simulation, mode, store, program):
    assert wrong(program, as_region(store, MODES[mode], keep="all")) == []
    copies = [line for line in simulation.log if line.endswith("copies")]
    assert copies == (["side 1 copies", "side 2 copies"] * 3 if store == "host" else [])


def races_on_rank(store: str, name: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, simulated_streams(patch) as simulation:
        return compare(name, store, False, dist.group.WORLD) + simulation.races


@pytest.mark.parametrize("name", ["two_regions_in_a_row", "shared_input", "backward_twice", "nested"])
@pytest.mark.parametrize("store", [f"scattered+{store}" for store in STORES])
def test_shares(store, name):
    """The share of a rank is on the host or in a slot; it is brought back before it is gathered."""
    assert run_ranks(2, races_on_rank, store, name) == [[], []]


def test_a_wait_that_is_left_out_is_seen_as_a_race(monkeypatch):
    monkeypatch.setattr(StoredTensor, "settle", lambda self: None)  # the forward's end waits for the copy
    with simulated_streams(monkeypatch) as simulation, contextlib.suppress(RegionError):  # the values differ
        written_after(as_region("host"))
    assert any("aten.fill_.Scalar on main does not come after side 1" in race for race in simulation.races)


def test_inputs_come_back_before_backward_asks_for_them(simulation: Simulation):
    run, h = as_region("host"), hidden(4, WIDTH)[1]
    for model in [layer() for _ in range(4)]:
        h = run(model, h)
    forward = len(simulation.log)
    h.sum().backward()
    log = [line for line in simulation.log[forward:] if line in ("side 2 copies", "main waits")]
    assert log == ["side 2 copies", "main waits", *["side 2 copies"] * 3, *["main waits"] * 3]


def test_backward_on_another_stream_than_the_forward(simulation: Simulation):
    other = simulation.stream_named("other")
    for store in (OnHost(), ContiguousBuffer(2)):
        x = torch.randn(4)
        expected = (x * 2).tolist()
        placed = store.put(x, lambda: "x")
        placed.settle()
        other.wait_stream(simulation.current_stream())
        with simulation.stream(other):
            assert (placed.fetch() * 2).tolist() == expected
        assert simulation.races == []
        del placed


def test_a_slot_goes_from_stream_to_stream(simulation: Simulation):
    """Two streams that know nothing of each other share a buffer of one slot."""
    buffer = ContiguousBuffer(1)
    for name in ("main", "other", "main"):
        with simulation.stream(simulation.stream_named(name)):
            x = torch.randn(4)
            expected = x * 2
            placed = buffer.put(x, lambda: "x")
            assert torch.equal(placed.fetch().mul_(2), expected)
            del placed
        assert simulation.races == []


# -- On a GPU, whose copies take their time

CYCLES = 50_000_000  # of a GPU's clock: some tens of milliseconds


@pytest.mark.gpu
@pytest.mark.parametrize("store", STORES)
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
