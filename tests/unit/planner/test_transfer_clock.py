"""The clock of transfers, next to the transfers themselves on simulated streams, and the search that relies on it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sac.planner import link_search
from sac.planner.layers import MemoryConstraint
from sac.planner.link_search import LinkOption, LinkProblem, Row
from sac.planner.transfer_clock import Link, RegionLoad, StepTimes, Windows, clock
from sac.stores.backward_order import CallNode
from sac.stores.transfers import HostCopy, TransferLimits, Transfers
from tests.support.simulated_streams import Simulation

RATE = 1000.0  # bytes per second
LINK = Link(RATE, RATE, None, smallest=1)


class Region(torch.autograd.Function):
    """A region that takes its time in both passes, and reads what it has put."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Simulation, copies: list[HostCopy], seconds: float) -> Tensor:
        ctx.rest = device, copies, seconds
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        device, copies, seconds = ctx.rest
        ctx.rest = None
        read = [copy.transfers.look(copy) for copy in copies]
        device.work(seconds)
        del read
        return grad * 1, None, None, None


def seconds_of_transfers(times: StepTimes, loads: list[RegionLoad], windows: Windows) -> tuple[float, float]:
    """Seconds of the step on simulated streams, and of these, what the computing stream waits."""
    device = Simulation(bytes_per_second=RATE)
    with device:
        limits = TransferLimits(smallest=1, in_flight=windows.in_flight, ahead=windows.ahead, host=1 << 30)
        transfers = Transfers(torch.device("cpu"), device, limits)
        x = torch.ones(1, requires_grad=True)
        for forward, backward, load in zip(times.forward, times.backward, loads, strict=True):
            device.work(forward)
            call = CallNode()
            call.follow(x)
            copies = transfers.put([torch.zeros(size, dtype=torch.uint8) for size in load.sent], call)
            x = Region.apply(x, device, [one for one in copies if one is not None], backward + load.again)
            call.mark([x])
            del copies
        device.work(times.pause)
        x.backward()
        return device.seconds["main"], device.stalls["main"]


@pytest.mark.parametrize("seed", range(12))
def test_the_clock_tells_what_the_transfers_take(seed):
    chance = random.Random(seed)
    count = chance.randint(2, 6)
    times = StepTimes(
        *(tuple(chance.uniform(0.1, 1.0) for _ in range(count)) for _ in range(2)), pause=chance.uniform(0, 1)
    )
    loads = [
        RegionLoad(chance.uniform(0, 0.5), tuple(chance.randint(1, 400) for _ in range(chance.randint(0, 3))))
        for _ in range(count)
    ]
    windows = Windows(chance.choice((0, 300, 900)), chance.choice((0, 300, 900)))
    found = clock(times, loads, LINK, windows)
    seconds, stalls = seconds_of_transfers(times, loads, windows)
    assert found.seconds == pytest.approx(seconds)
    assert found.stall == pytest.approx(stalls, abs=1e-9)


def test_inputs_go_down_with_their_region_and_are_waited_for_at_its_end():
    times, load = StepTimes((1.0, 1.0), (2.0, 2.0), pause=1.0), RegionLoad(0.0, input=1500)
    found = clock(times, [load, load], LINK, Windows(0, 0))
    # Each forward waits half a second for its input. The last one comes up at the turn, the first one after it.
    assert (found.stall_down, found.stall_up, found.host) == (1.0, 3.0, 3000)
    ahead = clock(times, [load, load], LINK, Windows(0, 1500))
    assert (ahead.stall_down, ahead.stall_up) == (1.0, 1.5)
    assert ahead.early == (0, 1500)


def test_a_faster_link_is_not_slower():
    times, load = StepTimes((1.0,) * 5, (2.0,) * 5), RegionLoad(0.3, (300, 700))
    taken = [
        clock(times, [load] * 5, replace(LINK, down=rate, up=rate), Windows(1000, 1000)).seconds
        for rate in (100, 500, 1000, 5000)
    ]
    assert taken == sorted(taken, reverse=True)
    assert taken[-1] >= times.total + 5 * 0.3


def problem(chance: random.Random, count: int, options: int) -> LinkProblem:
    def option() -> LinkOption:
        sent = tuple(chance.randrange(1, 4) * 100 for _ in range(chance.randrange(3)))
        return LinkOption(chance.randrange(8) * 100, chance.randrange(1, 10) * 0.1, sent)

    own = (1000,) * options
    rows = [Row(MemoryConstraint(0, at, own), at, back) for at in range(count) for back in (False, True)]
    times = StepTimes((0.4,) * count, (0.8,) * count, pause=0.5)
    found = (LinkOption(0, 1.0), *(option() for _ in range(options - 1)))
    return LinkProblem((0,) * count, (found,), tuple(rows), times, replace(LINK, smallest=50))


@pytest.mark.parametrize("seed", range(4))
def test_the_search_next_to_all_plans(monkeypatch, seed):
    chance = random.Random(seed)
    monkeypatch.setattr(link_search, "CHANGES", 1500)
    case, budget = problem(chance, 4, 5), 1400 + 200 * seed
    found = case.best(budget)
    assert found is not None
    assert found.peak <= budget
    windows = {found.windows, *case.windows()}
    every = (case.run(choice, one) for choice in itertools.product(range(5), repeat=4) for one in windows)
    best = min(one.clocked.seconds for one in every if case.fits(one, budget))
    assert found.clocked.seconds <= 1.02 * best
    assert case.bound(budget) <= found.clocked.seconds * (1 + 1e-9)


def test_the_search_keeps_to_the_host(monkeypatch):
    monkeypatch.setattr(link_search, "CHANGES", 500)
    case = problem(random.Random(1), 4, 5)
    found = replace(case, link=replace(case.link, host=300)).best(1600)
    assert found is not None
    assert found.clocked.host <= 300
