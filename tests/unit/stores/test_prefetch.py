"""Gathers that are started ahead: which, when, in one order on all ranks; and nothing is left of them."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from sac.stores import prefetch as gathering
from sac.stores.scatter import StoredShare
from tests.support.ranks import run_ranks
from tests.support.recording import Recorder, without_collector
from tests.support.runs import Noted
from tests.support.scattering import Run, bytes_left, plainly, scattered

SIZES = (4, 5, 6, 7)  # the input of region i has 2 * SIZES[i] elements, of which a share has SIZES[i]


class SpiedWork:
    def __init__(self, work: Any, name: str, events: list[str]) -> None:
        self.work, self.name, self.events = work, name, events

    def wait(self) -> None:
        self.events.append(f"wait {self.name}")
        self.work.wait()


@contextlib.contextmanager
def spied() -> Iterator[list[str]]:
    """Note each gather's start and end, named by the elements of a share."""
    events: list[str] = []
    real = gathering.gather_into

    def gather(target: Tensor, source: Tensor, **options: Any) -> SpiedWork:
        name = str(source.numel() // 4)
        events.append(f"start {name}")
        return SpiedWork(real(target, source, **options), name, events)

    gathering.gather_into = gather
    try:
        yield events
    finally:
        gathering.gather_into = real


def shares_alive() -> int:
    return sum(isinstance(one, StoredShare) for one in gc.get_objects())


class Layers(nn.Module):
    """Regions in a row, each with another width; `events` notes when one is run again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(a, b) for a, b in itertools.pairwise(SIZES)])
        self.watch = Noted(None, "")  # events, and where a run fails: not put back when a region runs again

    @property
    def events(self) -> list[str] | None:
        return self.watch[0]

    @events.setter
    def events(self, value: list[str] | None) -> None:
        self.watch[0] = value

    @property
    def fails(self) -> str:
        return self.watch[1]

    @fails.setter
    def fails(self, value: str) -> None:
        self.watch[1] = value

    def one(self, h: Tensor, at: int) -> Tensor:
        if self.events is not None:
            self.events.append(f"run {h.shape[-1]}")
            if self.fails == str(h.shape[-1]):
                raise ValueError("on purpose")
        return torch.tanh(h @ self.weights[at]) ** 2

    def forward(self, h: Tensor, run: Run) -> Tensor:
        for at in range(len(self.weights)):
            h = run(self.one, h, at)
        return h


def start(seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, SIZES[0], requires_grad=True) * 2


def warmed_up(run: Run) -> Layers:
    """Layers of which it is known that they need no dispatch mode."""
    layers = Layers()
    layers(start(), run).sum().backward()
    layers.zero_grad()
    return layers


def backward_events(prefetch: int, retain: bool, use_reentrant: bool) -> list[list[str]]:
    run = scattered(prefetch=prefetch, use_reentrant=use_reentrant)
    layers = warmed_up(run)
    out = layers(start(), run).sum()
    found = []
    for turn in range(2 if retain else 1):
        with spied() as events:
            layers.events = events
            out.backward(retain_graph=retain and turn == 0)
        found.append(events)
    return found


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("retain", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (0, "start 6, wait 6, run 6, start 5, wait 5, run 5, start 4, wait 4, run 4"),
        (1, "start 6, wait 6, start 5, run 6, wait 5, start 4, run 5, wait 4, run 4"),
        (2, "start 6, wait 6, start 5, start 4, run 6, wait 5, run 5, wait 4, run 4"),
        (9, "start 6, wait 6, start 5, start 4, run 6, wait 5, run 5, wait 4, run 4"),
    ],
)
def test_gathers_are_started_ahead(prefetch, expected, retain, reentrant):
    turns = 2 if retain else 1
    assert run_ranks(2, backward_events, prefetch, retain, reentrant) == [[expected.split(", ")] * turns] * 2


def several_inputs() -> list[str]:
    """Two inputs per region: ahead is counted in regions."""
    run = scattered(prefetch=1, keep="all")
    layers = warmed_up(run)
    h, mask = start(), [torch.ones(6, size // 2 if size % 2 == 0 else size) for size in SIZES]
    for at in range(3):
        h = run(lambda h, mask, at: layers.one(h, at) * mask.mean(), h, mask[at], at)
    with spied() as events:
        h.sum().backward()
    return events


def test_ahead_is_counted_in_regions():
    expected = "start 6, start 9, wait 6, wait 9, start 5, start 15, wait 5, wait 15, start 4, start 6, wait 4, wait 6"
    for events in run_ranks(2, several_inputs):
        assert sorted(events) == sorted(expected.split(", "))
        assert events.index("start 15") < events.index("wait 5")
        assert events.index("start 4") > events.index("wait 15")
        assert events[-2:] == ["wait 4", "wait 6"]


def part_of_the_graph() -> list[list[str]]:
    run = scattered(prefetch=2)
    layers = warmed_up(run)
    h = start()
    out = layers(h, run).sum()
    found = []
    for wanted in ([layers.weights[2]], [layers.weights[1]], [h]):
        with spied() as events:
            torch.autograd.grad(out, wanted, retain_graph=True)
        found.append([event for event in events if event.startswith("start")])
    return found


def test_only_what_this_backward_will_need_is_gathered():
    expected = [["start 6"], ["start 6", "start 5"], ["start 6", "start 5", "start 4"]]
    assert run_ranks(2, part_of_the_graph) == [expected] * 2


def two_graphs() -> list[list[str]]:
    run = scattered(prefetch=3)
    layers = warmed_up(run)
    outs = [layers(start(seed), run).sum() for seed in range(2)]
    found = []
    for out in outs:
        with spied() as events:
            out.backward()
        found.append([event for event in events if event.startswith("start")])
    return found


def test_gathers_stay_within_a_graph():
    expected = [["start 6", "start 5", "start 4"]] * 2
    assert run_ranks(2, two_graphs) == [expected] * 2


def dead_on_some_ranks() -> tuple[list[str], list[int]]:
    """Graphs on the same input that were dropped without backward: rank 0 holds them in a cycle, uncollected."""
    run = scattered(prefetch=3)
    layers = warmed_up(run)
    x = start()
    with without_collector():
        dropped: list[Any] = [layers(x, run)]
        h = run(layers.one, x, 0)
        dropped.append(run(lambda h: torch.tanh(h.repeat(1, 3)) ** 2, h))  # a branch without a loss
        if dist.get_rank() == 0:
            dropped.append(dropped)
        del dropped
        alive = shares_alive()
        with spied() as events:
            for at in (1, 2):
                h = run(layers.one, h, at)
            h.sum().backward()
    gc.collect()
    plain = Layers()
    plain(start(), plainly).sum().backward()
    pairs = zip(plain.weights, layers.weights, strict=True)
    assert alive == (5 if dist.get_rank() == 0 else 1)
    return events, [i for i, (left, right) in enumerate(pairs) if not torch.equal(left.grad, right.grad)]


def test_a_graph_that_lives_on_some_ranks_only_does_not_matter():
    expected = ["start 6", "wait 6", "start 5", "start 4", "wait 5", "wait 4"]
    assert run_ranks(2, dead_on_some_ranks) == [(expected, [])] * 2


def not_directly_after_one_another() -> list[str]:
    """Other ops and two regions side by side between the regions."""
    run = scattered(prefetch=2)
    layers = warmed_up(run)
    h = run(layers.one, start(), 0)
    left = run(layers.one, h, 1)
    right = run(lambda h: torch.tanh(h.repeat(2, 3)[:, :6]) ** 2, torch.cat([h] * 2))
    h = run(layers.one, F.layer_norm((left + right[:2].abs().sqrt()) * 2, (6,)).relu(), 2)
    with spied() as events:
        h.sum().backward()
    return events


def test_regions_are_found_behind_other_ops():
    events = ["start 6", "wait 6", "start 5", "start 10", "wait 10", "start 4", "wait 5", "wait 4"]
    assert run_ranks(2, not_directly_after_one_another) == [events] * 2


def far_from_one_another() -> list[str]:
    run = scattered(prefetch=2)
    layers = warmed_up(run)
    h = run(layers.one, start(), 0)
    for _ in range(100):
        h = h + 0.01
    h = run(layers.one, h, 1)
    with spied() as events:
        h.sum().backward()
    return events


def test_regions_far_from_one_another_are_gathered_in_time():
    assert run_ranks(2, far_from_one_another) == [["start 5", "wait 5", "start 4", "wait 4"]] * 2


def failed_while_in_flight() -> tuple[list[str], int]:
    """Recomputation fails while two gathers are under way, and the graph is dropped."""
    run = scattered(prefetch=2)
    layers = warmed_up(run)
    out = layers(start(), run)
    with without_collector(), spied() as events:
        layers.events, layers.fails = [], "6"
        with contextlib.suppress(ValueError):
            out.sum().backward()
        layers.events, layers.fails = None, ""
        del out
    alive = shares_alive()
    layers.zero_grad()
    layers(start(), run).sum().backward()  # the ranks still understand each other
    return events, alive


def test_what_is_in_flight_when_a_graph_is_dropped_is_waited_for():
    expected = ["start 6", "wait 6", "start 5", "start 4", "wait 5", "wait 4"]
    for events, alive in run_ranks(2, failed_while_in_flight):
        assert events[:4] == expected[:4]
        assert sorted(events) == sorted(expected)
        assert alive == 0


def started_in_vain() -> tuple[list[str], int]:
    """The loss needs of a region what can be had without running it again."""
    run = scattered(prefetch=1)
    layers = warmed_up(run)
    x = torch.randn(2, SIZES[0], requires_grad=True)
    _side, h = run(lambda h: (torch.tanh(h) ** 2, h * 1.0), run(layers.one, x * 2, 0))
    out = run(lambda h: layers.one(h, 1) ** 2, h)
    made = Recorder()
    with without_collector(), spied() as events, made:
        out.sum().backward()
    return events, bytes_left(made, besides=(x.grad, [weight.grad for weight in layers.weights]))


def test_what_was_started_in_vain_is_let_go():
    events = ["start 5", "wait 5", "start 5", "start 4", "wait 4", "wait 5"]
    assert run_ranks(2, started_in_vain) == [(events, 0)] * 2


def steps() -> list[int]:
    run = scattered(prefetch=2)
    layers = warmed_up(run)
    alive = []
    with without_collector():
        for step in range(6):
            out = layers(start(), run)
            if step % 3 != 1:
                out.sum().backward()
            del out
            alive.append(shares_alive())
    return alive


def test_nothing_is_left_of_a_step():
    assert run_ranks(2, steps) == [[0] * 6] * 2
