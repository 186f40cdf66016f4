"""Transfers on simulated streams: no access is unordered, all bytes are right, and limits in bytes are kept."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from sac.errors import RegionError
from sac.stores.backward_order import CallNode
from sac.stores.transfers import HostPool, TransferLimits, Transfers
from tests.support.simulated_streams import Simulation, simulated_streams
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
    assert transfers.is_idle()


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
        stored.take()
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
        stored = transfers.put_one(torch.zeros(size + 1, dtype=torch.uint8))
        stored.call = call
        call.add_copy(stored)
        stored.settle()
        x = Looks.apply(x, stored, transfers.put([torch.zeros(size, dtype=torch.uint8)] * 1, call))
        call.mark([x])
    came: list[int] = []
    plain = transfers.copy_up
    transfers.copy_up = lambda copy, target: came.append(copy.size) or plain(copy, target)
    x.backward()
    assert came[:2] == [101, 100]
    assert sorted(came) == [100, 101, 200, 201, 300, 301]


# Host memory


def plain_pool(limit: int | None = None, slab: int = 1 << 16) -> HostPool:
    return HostPool(lambda size: torch.empty(size, dtype=torch.uint8), limit, slab=slab)


@pytest.mark.parametrize("size", [1, 63, 64, 100, 1000, 4097, (1 << 20) + 1, 9_999_999])
def test_size_classes_waste_an_eighth_at_most(size):
    found = HostPool.size_class(size)
    assert size <= found <= max(64, size * 9 // 8 + 64)
    assert found % 64 == 0


def test_buffers_are_used_again():
    pool = plain_pool()
    for _ in range(100):
        taken = [pool.take(size) for size in (1000, 5000, 1000)]
        assert len({buffer.parts[0].data_ptr() for buffer in taken}) == 3
        for buffer in taken:
            pool.give(buffer)
    assert pool.slab_bytes == 1 << 16
    assert pool.is_idle()


def test_a_training_leaves_no_references_behind():
    """What is below the limits is not freed by `put`, but dies with its graph."""
    transfers = Transfers(torch.device("cpu"), None, TransferLimits(host=1 << 30))
    for _ in range(50):
        alive = transfers.put([torch.zeros(64, dtype=torch.uint8) for _ in range(3)])
    assert len(transfers._flying) <= 2 * len(alive) + 64
    del alive
    assert transfers.is_idle()


def test_buffers_are_given_back_after_an_error_for_want_of_room():
    transfers = Transfers(torch.device("cpu"), None, TransferLimits(host=1 << 16, strict=True))
    with pytest.raises(RegionError, match=r"^host_memory: 96\.0 KiB of values stay on the device"):
        transfers.put([torch.zeros(48 << 10, dtype=torch.uint8) for _ in range(3)])
    assert transfers.is_idle()
    assert transfers.put([torch.zeros(48 << 10, dtype=torch.uint8)]) != [None]


@pytest.mark.parametrize("limit", [1 << 18, (1 << 18) + 50_000])
def test_slabs_are_powers_of_two_and_fill_the_limit(limit):
    sizes = []
    pool = HostPool(lambda size: sizes.append(size) or torch.empty(size, dtype=torch.uint8), limit, slab=1 << 16)
    held = [pool.take(40_000) for _ in range(9)]
    fit = limit // HostPool.size_class(40_000)
    assert [one is None for one in held] == [False] * fit + [True] * (9 - fit)
    assert sizes[:4] == [1 << 16] * 4
    assert all(size.bit_count() == 1 for size in sizes)
    assert sum(sizes) <= limit


def test_free_slabs_are_cut_anew_when_sizes_change():
    pool = plain_pool(limit=1 << 16)
    pool.give(pool.take(60_000))
    assert pool.take(30_000) is not None
    assert pool.slab_bytes <= 1 << 16


def test_sizes_that_change_from_step_to_step_do_not_add_up():
    """As those of sequences."""
    pool = plain_pool()
    for size in range(1000, 60_000, 1000):
        taken = [pool.take(size) for _ in range(20)]
        assert pool.slab_bytes <= 1.15 * 20 * size + (1 << 16)
        for buffer in taken:
            pool.give(buffer)


@pytest.mark.parametrize("seed", range(20))
def test_sizes_that_change_within_a_step_do_not_add_up(seed):
    """The pool pins as much as waits at once, and never lends the same memory twice, whatever is given back when."""
    rng, pool, held, most = random.Random(seed), plain_pool(slab=1 << 12), [], 0
    for _ in range(400):
        if held and rng.random() < 0.5:
            pool.give(held.pop(rng.randrange(len(held)))[1])
        else:
            size = rng.choice([600, 1000, 3000, 10_000, rng.randrange(600, 20_000)])
            held.append((size, pool.take(size)))
        most = max(most, sum(size for size, _ in held))
        assert pool.slab_bytes <= 1.15 * most + (1 << 12)
        spans = sorted((part.data_ptr(), part.numel()) for _, buffer in held for part in buffer.parts)
        assert all(one + size <= other for (one, size), (other, _) in itertools.pairwise(spans))


def test_memory_of_another_size_is_used_within_the_limit():
    pool = plain_pool(limit=1 << 16)
    kept, *others = [pool.take(size) for size in (4096, 30_000, 20_000)]
    for number, buffer in enumerate(others):
        buffer.used = (number,)
        pool.give(buffer)
    found = pool.take(50_000)
    assert len(found.parts) > 1
    assert found.used == (0, 1)  # whoever uses it waits for the last copies of both
    assert pool.take(20_000) is None
    assert kept.used == ()


def test_sizes_that_take_turns_keep_their_memory():
    made = []
    pool = HostPool(lambda size: made.append(size) or torch.empty(size, dtype=torch.uint8), slab=1 << 16)
    for step in range(10):
        for buffer in [pool.take(40_000 if step % 2 else 41_000) for _ in range(20)]:
            pool.give(buffer)
    assert sum(made) <= 20 * HostPool.size_class(41_000) + (1 << 16)


@pytest.mark.parametrize("size", [600, 33_000, 36_864, 40_000, 65_536, 65_600, 135_000, 300_001])
def test_host_memory_of_equal_sizes_is_that_of_what_is_offloaded(size):
    """Sizes just above half a slab, or above a slab, waste no more than others."""
    pool = plain_pool()
    for count in range(1, 60):
        buffer = pool.take(size)
        assert sum(part.numel() for part in buffer.parts) == buffer.size >= size
        assert pool.slab_bytes <= 1.15 * (size * count) + (1 << 16)


def test_host_memory_of_sizes_that_differ_is_that_of_what_is_offloaded():
    pool = plain_pool(slab=1 << 24)
    sizes = [1 << 20, 3 << 20, 7 << 19, (1 << 22) + 4096, (1 << 24) + 4096] * 30
    assert all(pool.take(size) is not None for size in sizes)
    assert pool.slab_bytes <= 1.15 * sum(sizes) + (1 << 24)


def test_a_buffer_in_several_parts_holds_its_bytes():
    pool = plain_pool(slab=1 << 10)
    for size in (1000, 1, 700, 5000, 64, 3001, 333):
        buffer, flat = pool.take(size), torch.randint(0, 255, (size,), dtype=torch.uint8)
        again = torch.zeros_like(flat)
        for piece, begin, end in buffer.pieces(size):
            piece.copy_(flat[begin:end])
        for piece, begin, end in buffer.pieces(size):
            again[begin:end].copy_(piece)
        assert torch.equal(flat, again)
    assert len(buffer.parts) > 1
