"""Copies to the host and into slots, on simulated streams: equal results, and no access that is not ordered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sac.errors import RegionError
from sac.stores import transfers
from sac.stores.contiguous import ContiguousBuffer, Slots
from sac.stores.host import OnHost, StoredOnHost
from sac.stores.transfers import HostCopy, Transfers
from sac.tensors import detached
from tests.support.cases import CASES, WIDTH, Run, hidden, layer, loss_of, written_after, written_inside
from tests.support.pairs import in_pairs
from tests.support.ranks import run_ranks
from tests.support.simulated_streams import Simulation, simulated_streams
from tests.support.stored_regions import MODES, as_region, differences, does_not_fit, plainly
from tests.support.training import new_tensors_in

STORES = ("host", "contiguous", "contiguous+host")


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch):
    with simulated_streams(monkeypatch) as one:
        yield one


@in_pairs(mode=MODES.keys(), store=STORES, name=CASES.keys(), unless=does_not_fit)
def test_every_program(monkeypatch, mode, store, name):
    run = as_region(store, MODES[mode], CASES[name], keep="all" if store == "host" else "first")
    exact = not (MODES[mode] and CASES[name].rounds)
    with new_tensors_in(torch.float32 if exact else torch.float64), simulated_streams(monkeypatch) as simulation:
        torch.manual_seed(3)
        plain = CASES[name].program(plainly)
        for _ in range(2):
            torch.manual_seed(3)
            assert differences(plain, CASES[name].program(run), exact=exact) == []
    assert simulation.races == []


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("mode", "program"), [("non-reentrant", written_inside), *((mode, written_after) for mode in MODES)]
)
def test_writes_to_the_input(monkeypatch, mode, store, program):
    torch.manual_seed(3)
    plain = program(plainly)
    with simulated_streams(monkeypatch) as simulation:
        torch.manual_seed(3)
        assert differences(plain, program(as_region(store, MODES[mode]))) == []
    assert simulation.races == []
    copies = [line for line in simulation.log if line.endswith("copies")]
    assert copies == (["side 1 copies", "side 2 copies"] if "host" in store else [])


def races_on_rank(store: str, name: str) -> list[str]:
    run = as_region(store, False, CASES[name], dist.group.WORLD)
    torch.manual_seed(3)
    plain = CASES[name].program(plainly)
    with pytest.MonkeyPatch.context() as patch, simulated_streams(patch) as simulation:
        torch.manual_seed(3)
        return differences(plain, CASES[name].program(run)) + simulation.races


@pytest.mark.parametrize("name", ["two_regions_in_a_row", "shared_input", "backward_twice", "nested"])
@pytest.mark.parametrize("store", [f"scattered+{store}" for store in STORES])
def test_shares(store, name):
    """The share of a rank is on the host or in a slot; it is brought back before it is gathered."""
    assert run_ranks(2, races_on_rank, store, name) == [[], []]


# Each wait is needed


def unordered(*args: Any) -> None:
    """A wait that is not made."""


def taken_at_once(transfers: Transfers, copy: HostCopy) -> Tensor:
    transfers._bring_up([copy], 0)
    found, copy.target = copy.target, None
    return found


WAITS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "the copy waits for what made the input": (
        lambda patch: patch.setattr("tests.support.simulated_streams.Stream.wait_stream", unordered),
        "aten.copy_.default on side 1 does not come after main",
    ),
    "the end of the forward waits for the copy": (
        lambda patch: patch.setattr(StoredOnHost, "settle", unordered),
        "aten.fill_.Scalar on main does not come after side 1",
    ),
    "recomputation waits for the copy back": (
        lambda patch: patch.setattr(Transfers, "take", taken_at_once),
        "aten.sin.default on main does not come after side 4",
    ),
}


@pytest.mark.parametrize("wait", WAITS)
def test_without_a_wait_there_is_a_race(monkeypatch, wait):
    take_out, race = WAITS[wait]
    with simulated_streams(monkeypatch) as simulation:
        written_after(as_region("host", False))
        assert simulation.races == []
        take_out(monkeypatch)
        with contextlib.suppress(RegionError):  # the values differ
            written_after(as_region("host", False))
    assert any(found.startswith(race.replace("side 1", "side 3")) for found in simulation.races), simulation.races


def test_write_inside_waits_for_the_copy(monkeypatch):
    with simulated_streams(monkeypatch) as simulation:
        written_inside(as_region("host", False))
        order = simulation.log[: simulation.log.index("main waits") + 1]
        assert order == ["side 1 waits for main", "side 1 copies", "side 1 records", "main waits"]
        monkeypatch.setattr(StoredOnHost, "settle", unordered)
        written_inside(as_region("host", False))
    assert any(found.startswith("aten.mul_.Tensor on main does not come after side 3") for found in simulation.races)


def test_source_lives_until_the_copy_is_ordered(simulation: Simulation):
    x = torch.randn(4)
    placed = OnHost().put(x, lambda: "x")
    del x
    assert simulation.races == []
    placed.settle()
    simulation.free_dead()
    assert simulation.races == []
    assert [memory.home for memory in simulation.memory.values()] == ["host"]  # x is gone


def test_buffer_that_goes_while_another_stream_reads_it(simulation: Simulation):
    buffer, other = ContiguousBuffer(1), simulation.stream_named("other")
    placed = buffer.put(torch.randn(4), lambda: "x")
    other.wait_stream(simulation.current_stream())
    with simulation.stream(other):
        placed.fetch().mul_(2)
    del placed, buffer
    simulation.free_dead()
    assert simulation.races == []


def test_source_that_dies_before_is_found(monkeypatch):
    with simulated_streams(monkeypatch) as simulation:
        x = torch.randn(4)
        placed = OnHost().put(x, lambda: "x")
        placed._copy.source = None
        del x
        simulation.free_dead()
    assert simulation.races == ["memory of main is freed while side 1 uses it"]


def test_inputs_come_back_before_backward_asks_for_them(simulation: Simulation):
    run, models, h = as_region("host", False), [layer() for _ in range(4)], hidden(4, WIDTH)[1]
    for model in models:
        h = run(model, h)
    forward = len(simulation.log)
    h.sum().backward()
    log = [line for line in simulation.log[forward:] if line in ("side 2 copies", "main waits")]
    assert log == ["side 2 copies", "main waits", *["side 2 copies"] * 3, *["main waits"] * 3]


# Other streams than the one of the forward


def test_region_entered_and_left_on_another_stream(simulation: Simulation):
    other = simulation.stream_named("other")
    x = torch.randn(4)
    placed = OnHost().put(x, lambda: "x")
    with simulation.stream(other):
        placed.settle()
        x.record_stream(other)
        x.zero_()
    main = simulation.current_stream()
    main.wait_stream(other)
    x.fill_(1.0)
    assert simulation.races == []


def test_backward_on_another_stream(simulation: Simulation):
    other = simulation.stream_named("other")
    for store in (OnHost(), ContiguousBuffer(2), ContiguousBuffer(2, on_host=True)):
        x = torch.randn(4)
        placed = store.put(x, lambda: "x")
        placed.settle()
        other.wait_stream(simulation.current_stream())
        with simulation.stream(other):
            y = placed.fetch() * 2
            del y
        del placed
    assert simulation.races == []


def use_slot_on_two_streams(simulation: Simulation) -> None:
    """Two streams that know nothing of each other share a buffer of one slot."""
    buffer = ContiguousBuffer(1)
    for name in ("main", "other", "main"):
        with simulation.stream(simulation.stream_named(name)):
            placed = buffer.put(torch.randn(4), lambda: "x")
            placed.fetch().mul_(2)
            del placed


def test_slot_goes_from_stream_to_stream(monkeypatch):
    with simulated_streams(monkeypatch) as simulation:
        use_slot_on_two_streams(simulation)
        assert simulation.races == []
        monkeypatch.setattr(Slots, "end_use", unordered)
        use_slot_on_two_streams(simulation)
    assert any(found.startswith("aten.copy_.default on other does not come after main") for found in simulation.races)


def test_slots_on_the_host_are_ordered_by_the_last_copy_of_each(simulation: Simulation):
    buffer = ContiguousBuffer(1, on_host=True)
    for name in ("main", "other", "main"):
        with simulation.stream(simulation.stream_named(name)):
            placed = buffer.put(torch.randn(4), lambda: "x")
            placed.settle()
            placed.fetch().mul_(2)
            del placed
    assert simulation.races == []
    assert simulation.made == 2


# In flight


def test_dropped_in_flight(simulation: Simulation):
    for store in (OnHost(), ContiguousBuffer(1, on_host=True)):
        for _ in range(2):
            store.put(torch.randn(4), lambda: "x")
        placed = store.put(torch.full((4,), 2.0), lambda: "x")
        placed.settle()
        assert torch.equal(placed.fetch(), torch.full((4,), 2.0))


def test_fetched_inside_the_forward(simulation: Simulation):
    model, x = layer(), torch.randn(4, WIDTH, requires_grad=True)

    def body(h: Tensor) -> Tensor:
        out = model(h)
        [slope] = torch.autograd.grad(out.sum(), h, retain_graph=True, create_graph=False)
        return out * slope.detach()

    run = as_region("host", False)
    for one in (plainly, run):
        x.grad = None
        model.zero_grad()
        loss_of([one(body, x * 1)]).backward()
        if one is plainly:
            expected = [x.grad, *(weight.grad for weight in model.parameters())]
    assert all(map(torch.equal, expected, [x.grad, *(weight.grad for weight in model.parameters())]))
    assert simulation.races == []


def read_at_once(tensor: Tensor) -> tuple[Tensor, float]:
    """A pack hook that looks at what it is given, on the host if that lies there."""
    return tensor, float(tensor.sum())


def written_unseen(h: Tensor) -> Tensor:
    guard = torch._C._DisableTorchDispatch()
    h.mul_(2)
    del guard
    return h.sin()


def test_write_that_nobody_saw_coming_does_not_hurt_a_copy_that_is_done():
    results = []
    for run in (plainly, as_region("contiguous", False), as_region("host", False)):
        x = torch.linspace(-1, 1, 4, requires_grad=True)
        run(written_unseen, x * 1).sum().backward()
        results.append(x.grad)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# Devices


@pytest.mark.parametrize(
    ("device", "module"), [("cpu", None), ("meta", None), ("cuda", torch.cuda), ("xpu", torch.xpu), ("mps", None)]
)
def test_devices_with_streams(device, module):
    assert transfers.streams_of(torch.device(device)) is module


def test_side_streams_are_two_per_store_and_device(simulation: Simulation):
    run: Run = as_region("host", False)
    model = nn.Linear(WIDTH, WIDTH)
    for _ in range(3):
        run(model, hidden(4, WIDTH)[1]).sum().backward()
    assert simulation.made == 2  # one down, one up


def test_simulation_sees_detached_views(simulation: Simulation):
    x = torch.randn(4, requires_grad=True)
    side = simulation.stream_named("elsewhere")
    with simulation.stream(side):
        detached(x).zero_()
    assert simulation.races == ["aten.zero_.default on elsewhere does not come after main 2"]
