"""Transfers on simulated streams: no access is unordered, all bytes are right, and limits in bytes are kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sac.errors import RegionError
from sac.stores.backward_order import CallNode
from sac.stores.transfers import TransferLimits, Transfers
from tests.support.simulated_streams import Simulation, is_idle, simulated_streams
from tests.support.transfer_programs import Program

CPU = torch.device("cpu")
LIMITS = [
    TransferLimits(in_flight=in_flight, ahead=ahead, host=host)
    for in_flight, ahead, host in itertools.product((0, 6000, 20000), (0, 9000, 1 << 20), (1 << 14, 1 << 30))
]


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    with simulated_streams(monkeypatch) as one:
        yield one
    assert one.races == []


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")  # of a host that is full
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_programs(simulation: Simulation, limits: TransferLimits, seed: int) -> None:
    assert Program(simulation, seed, limits).wrong == []


# -- Limits


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


class Read(torch.autograd.Function):
    """A region whose backward reads its copies and takes a second."""

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


def chain(simulation: Simulation, transfers: Transfers, *sizes: int) -> torch.Tensor:
    """A forward of regions that take a second each, and of which each has one storage on the host."""
    x = torch.ones(1, requires_grad=True)
    for size in sizes:
        call = CallNode()
        call.follow(x)
        source = zeros(size)
        simulation.work(1.0)
        copies = transfers.put([source], call)
        del source
        x = Read.apply(x, copies, simulation)
        del copies
        call.mark([x])
    return x


def test_memory_is_bounded_by_what_is_in_flight(simulation: Simulation) -> None:
    transfers = Transfers(CPU, simulation, TransferLimits(in_flight=3000, ahead=0))
    before = simulation.device_bytes
    out = chain(simulation, transfers, *[1000] * 8)
    simulation.free_dead()
    assert 3000 <= simulation.device_bytes - before < 3200
    assert simulation.peak_bytes - before < 4200
    out.backward()
    del out
    simulation.free_dead()
    assert is_idle(transfers)


def test_the_last_regions_are_spared_and_the_others_brought_up_in_time(simulation: Simulation) -> None:
    simulation.bytes_per_second = 1000.0  # a copy takes a second, as long as a region's forward
    out = chain(simulation, Transfers(CPU, simulation, TransferLimits(in_flight=2000, ahead=2000)), *[1000] * 8)
    assert simulation.stalls["main"] == 0.0
    out.backward()
    assert (simulation.log.count("side 1 copies"), simulation.log.count("side 2 copies")) == (8, 6)
    assert simulation.stalls["main"] <= 1.0  # at the turn, for the copy down of the last region
    assert simulation.peak_bytes < 5300


def test_without_room_ahead_nothing_is_brought_up_early(simulation: Simulation) -> None:
    chain(simulation, Transfers(CPU, simulation, TransferLimits(in_flight=0, ahead=0)), *[1000] * 3).backward()
    log = [line for line in simulation.log if line in ("side 2 copies", "main waits")]
    turns = log[log.index("side 2 copies") :]
    assert [line for line, _ in itertools.groupby(turns)] == ["side 2 copies", "main waits"] * 3


# -- Host memory


def test_buffers_are_given_back_after_an_error_for_want_of_room(simulation: Simulation) -> None:
    transfers = Transfers(CPU, simulation, TransferLimits(host=1 << 16, strict=True))
    with pytest.raises(RegionError, match=r"^host_memory: 48\.0 KiB of values stay on the device"):
        transfers.put([zeros(48 << 10) for _ in range(3)])
    assert is_idle(transfers)
    assert transfers.put([zeros(48 << 10)]) != [None]
