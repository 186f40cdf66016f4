"""Transfers on simulated streams: no access is unordered, all bytes are right, and limits in bytes are kept."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from sac.errors import RegionError
from sac.stores import transfers as module
from sac.stores.backward_order import CallNode
from sac.stores.transfers import HostMemory, TransferLimits, Transfers
from tests.support.simulated_streams import Simulation, is_idle, simulated_streams
from tests.support.transfer_programs import Program

pytestmark = pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")  # of a host that is full
LIMITS = [
    TransferLimits(in_flight=in_flight, ahead=ahead, host=host)
    for in_flight, ahead, host in itertools.product((0, 6000, 20000), (0, 9000, 1 << 20), (1 << 14, 1 << 30))
]


def faults(seeds: range, limits: TransferLimits) -> list[str]:
    found: list[str] = []
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch, simulated_streams(patch) as simulation:
            program = Program(simulation, seed, limits)
            found += program.wrong
        found += simulation.races
    return found


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_random_programs(limits):
    assert faults(range(4), limits) == []


@pytest.mark.slow
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_many_random_programs(limits):
    assert faults(range(100, 200), limits) == []


# Limits


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch):
    with simulated_streams(monkeypatch) as one:
        yield one
    assert one.races == []


class Read(torch.autograd.Function):
    """A region whose backward takes a second and reads its copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, copies: list[Any], simulation: Simulation) -> torch.Tensor:
        ctx.copies, ctx.simulation = copies, simulation
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        for copy in ctx.copies:
            copy.transfers.look(copy).add(1)
        ctx.copies = []
        ctx.simulation.work(2.0)
        return grad * 1, None, None


def chain(simulation: Simulation, transfers: Transfers, regions: int, size: int) -> torch.Tensor:
    """A forward of regions that take a second each, and of which each has one storage on the host."""
    x = torch.ones(1, requires_grad=True)
    for _ in range(regions):
        call = CallNode()
        call.follow(x)
        source = torch.zeros(size, dtype=torch.uint8)
        simulation.work(1.0)
        copies = transfers.put([source], call)
        del source
        x = Read.apply(x, copies, simulation)
        del copies
        call.mark([x])
    return x


def test_memory_is_bounded_by_what_is_in_flight(simulation: Simulation):
    transfers = Transfers(torch.device("cpu"), simulation, TransferLimits(in_flight=3000, ahead=0))
    before = simulation.device_bytes
    out = chain(simulation, transfers, 8, 1000)
    simulation.free_dead()
    assert 3000 <= simulation.device_bytes - before < 3200
    assert simulation.peak_bytes - before < 4200
    out.backward()
    del out
    simulation.free_dead()
    assert is_idle(transfers)


def test_the_last_regions_are_spared_and_the_others_brought_up_in_time(simulation: Simulation):
    simulation.bytes_per_second = 1000.0  # a copy takes a second, as long as a region's forward
    transfers = Transfers(torch.device("cpu"), simulation, TransferLimits(in_flight=2000, ahead=2000))
    out = chain(simulation, transfers, 8, 1000)
    assert simulation.stalls["main"] == 0.0
    out.backward()
    copies = [line for line in simulation.log if line.endswith("copies")]
    assert copies.count("side 1 copies") == 8
    assert copies.count("side 2 copies") == 6
    assert simulation.stalls["main"] <= 1.0  # at the turn, for the copy down of the last region
    assert simulation.peak_bytes < 5300


def test_a_slow_link_stalls_for_what_it_cannot_hide(simulation: Simulation):
    simulation.bytes_per_second = 500.0
    transfers = Transfers(torch.device("cpu"), simulation, TransferLimits(in_flight=1000, ahead=1000))
    out = chain(simulation, transfers, 8, 1000)
    assert 6.0 <= simulation.stalls["main"] <= 8.0  # each of the copies takes a second longer than a region
    del out


def test_without_room_ahead_nothing_is_brought_up_early(simulation: Simulation):
    transfers = Transfers(torch.device("cpu"), simulation, TransferLimits(in_flight=0, ahead=0))
    chain(simulation, transfers, 3, 1000).backward()
    log = [line for line in simulation.log if line in ("side 2 copies", "main waits")]
    turns = log[log.index("side 2 copies") :]
    assert [line for line, _ in itertools.groupby(turns)] == ["side 2 copies", "main waits"] * 3


def test_a_read_outside_of_a_backward_leaves_nothing_on_the_device(simulation: Simulation):
    transfers = Transfers(torch.device("cpu"), simulation, TransferLimits(in_flight=0, ahead=0))
    before = simulation.device_bytes
    copies = transfers.put([torch.full((1000,), value, dtype=torch.uint8) for value in (1, 2)], CallNode())
    assert transfers.look(copies[0])[0] == 1
    simulation.free_dead()
    assert simulation.device_bytes == before


class Looks(torch.autograd.Function):
    """A region whose backward takes its input, then reads its values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stored: Any, copies: list[Any]) -> torch.Tensor:
        ctx.rest = stored, copies
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        stored, copies = ctx.rest
        stored.transfers.take(stored)
        stored.transfers.look_ahead(stored.call)
        for copy in copies:
            copy.transfers.look(copy)
        return grad * 1, None, None


def test_what_a_region_needs_comes_up_before_what_the_next_ones_need(simulation: Simulation):
    """Its input and its values together, and once; as in Note [The clock of transfers]."""
    transfers = Transfers(torch.device("cpu"), simulation, TransferLimits(in_flight=0, ahead=1 << 20))
    x = torch.ones(1, requires_grad=True)
    for size in (300, 200, 100):
        call = CallNode()
        call.follow(x)
        stored = transfers.put_one(torch.zeros(size + 1, dtype=torch.uint8), call)
        transfers.settle(stored)
        x = Looks.apply(x, stored, transfers.put([torch.zeros(size, dtype=torch.uint8)] * 1, call))
        call.mark([x])
    came: list[int] = []
    plain = transfers._bring_up
    transfers._bring_up = lambda copies, task: came.extend(copy.size for copy in copies) or plain(copies, task)
    x.backward()
    assert came[:2] == [101, 100]
    assert sorted(came) == [100, 101, 200, 201, 300, 301]


# Host memory


def test_a_training_leaves_no_references_behind(simulation: Simulation):
    """What is below the limits is not freed by `put`, but dies with its graph."""
    transfers = Transfers(torch.device("cpu"), simulation, TransferLimits(host=1 << 30))
    for _ in range(50):
        alive = transfers.put([torch.zeros(64, dtype=torch.uint8) for _ in range(3)])
    assert len(transfers._flying) == len(alive)
    del alive
    assert is_idle(transfers)


def test_buffers_are_given_back_after_an_error_for_want_of_room(simulation: Simulation):
    transfers = Transfers(torch.device("cpu"), simulation, TransferLimits(host=1 << 16, strict=True))
    with pytest.raises(RegionError, match=r"^host_memory: 96\.0 KiB of values stay on the device"):
        transfers.put([torch.zeros(48 << 10, dtype=torch.uint8) for _ in range(3)])
    assert is_idle(transfers)
    assert transfers.put([torch.zeros(48 << 10, dtype=torch.uint8)]) != [None]


def test_limit_is_that_of_what_is_in_use_and_a_driver_that_pins_no_more_is_one(monkeypatch):
    made = []

    def make(size: int) -> torch.Tensor:
        if sum(made) + size > 1 << 18:
            raise RuntimeError("no more\nsecond line")
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(module, "pinned_memory", make)
    memory = HostMemory(1 << 16)
    held = [memory.take(size) for size in (1 << 15, 20_000, 1)]  # 20,000 bytes are rounded up as torch does
    assert [one is None for one in held] == [False, False, True]
    memory.give(1 << 15)
    assert memory.take(1 << 15) is not None
    assert memory.used_bytes == 1 << 16
    memory = HostMemory()
    while (one := memory.take(1 << 14)) is not None:
        assert one.numel() == 1 << 14
    assert (memory.limit, memory.failure) == (memory.used_bytes, "no more")
