"""Every rank sends the same collectives in the same order, whatever a rank has met before and whatever way it takes.

A rank that recomputes less than another leaves the other waiting for ever: each test here would hang, and `run_ranks`
ends it.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import sac
from tests.support.blocks import FULL, FunctionBlock, Stack, selective
from tests.support.rank_programs import BODIES, SummedOverRanks, reduced, stack_of
from tests.support.ranks import run_ranks
from tests.support.training import built, same_bits
from tests.support.ways import POLICIES

TIMEOUT_SECONDS = 60.0
ENGINES = ("replay", "auto", "rerun")


def value_of(name: str, policy: str = "nothing") -> Any:
    """The config value: "none", "full", or an engine."""
    if name == "none":
        return "none"
    return FULL if name == "full" else selective(POLICIES[policy], engine=name)


def sent_in(work: Any) -> list[str]:
    """The collectives that this rank sends, in order; waits are not among them."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("gloo:")]


# -- Where in a region a collective is


def alone(block: nn.Module, x: Tensor) -> Tensor:
    return reduced(block.up(x))


def last(block: nn.Module, x: Tensor) -> Tensor:
    """The all-reduce that ends a row-parallel layer: backward reads nothing behind it."""
    return reduced(block.down(block.up(x).tanh()))


def aside(block: nn.Module, x: Tensor) -> Tensor:
    """Backward reads nothing but inputs and parameters."""
    return reduced(block.up(x)) + block.down(x)


def middle(block: nn.Module, x: Tensor) -> Tensor:
    return block.down(reduced(block.up(x)).tanh())


def before_a_sine(block: nn.Module, x: Tensor) -> Tensor:
    return reduced(block.down(block.up(x).tanh())).sin()


def in_place(block: nn.Module, x: Tensor) -> Tensor:
    return block.down(SummedOverRanks.apply(block.up(x)).sin())  # type: ignore[no-untyped-call]


def that_nothing_reads(block: nn.Module, x: Tensor) -> Tensor:
    """Statistics over the ranks, for a log: recomputation passes them on its way to the second product."""
    h = block.up(x)
    reduced(h.detach().abs())
    return block.down(h.sin()).cos()


PLACES = {body.__name__: body for body in (alone, last, aside, middle, before_a_sine, in_place, that_nothing_reads)}


class Layer(nn.Module):
    """What rank 0 runs: nothing but products and a collective."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        return PLACES[self.place](self, x)


class Careful(Layer):
    """What rank 1 runs: it meets what makes calls careful, in the first call or in each: a choice, a draw, a write."""

    always = False

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.generator, self.table, self.calls = torch.Generator().manual_seed(1), torch.zeros(2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1 or self.always:
            self.seen = x.detach().topk(2, dim=-1).indices.sum()
            self.draws = torch.rand(2, generator=self.generator)
            self.table.add_(1)
        return super().forward(x)


class AlwaysCareful(Careful):
    always = True


def layers(place: str, always: bool) -> Stack:
    careful = AlwaysCareful if always else Careful
    kind = careful if dist.get_rank() == 1 else Layer
    return Stack(kind(place), kind(place))


def sent_in_backward(place: str, names: list[str], always: bool = False) -> list[list[str]]:
    """Of four steps; rank r takes the r-th way."""
    model = sac.apply(built(lambda: layers(place, always)), value_of(names[dist.get_rank()]))
    counts = []
    for _ in range(4):
        loss = model(torch.randn(3, 8)).square().sum()
        counts.append(sent_in(loss.backward))
    return counts


@pytest.mark.parametrize("always", [False, True], ids=["in its first call", "in each call"])
@pytest.mark.parametrize("place", PLACES)
def test_full_sends_the_same_in_every_backward_whatever_a_rank_has_met(place: str, always: bool) -> None:
    """With and without the recorder that a careful call has."""
    one, other = run_ranks(2, sent_in_backward, place, ["full", "full"], always, timeout=TIMEOUT_SECONDS)
    assert one == other == [one[0]] * 4


@pytest.mark.parametrize("place", PLACES)
def test_ranks_meet_where_one_replays_and_one_reruns(place: str) -> None:
    """A replay sends what nothing on its tape reads, as long as something that comes later is needed."""
    one, other = run_ranks(2, sent_in_backward, place, ["replay", "rerun"], timeout=TIMEOUT_SECONDS)
    assert one == other == [one[0]] * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_collective_in_the_middle_is_sent_again_in_each_way(engine: str) -> None:
    """The counting itself: two regions, a collective in each."""
    one, other = run_ranks(2, sent_in_backward, "middle", [engine, engine], timeout=TIMEOUT_SECONDS)
    assert one == other == [["gloo:all_reduce"] * 2] * 4


# -- Each kind of collective


def trained(name: str, policy: str, ways: list[str]) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Gradients and collectives of three steps; rank r takes the r-th way."""
    torch.manual_seed(1)
    model = sac.apply(stack_of(name), value_of(ways[dist.get_rank()], policy))
    seen: dict[str, Tensor] = {}
    sent = []
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).requires_grad_()
        sent.append(sent_in(lambda x=x: model(x).square().sum().backward()))
        seen[f"{step} input"] = x.grad
    return seen | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sent


@pytest.mark.parametrize("name", BODIES)
def test_each_kind_of_collective_with_another_way_on_each_rank(name: str) -> None:
    """Waits are not ops, and a send must be under way when its receive is waited for."""
    plain = run_ranks(2, trained, name, "nothing", ["none", "none"], timeout=TIMEOUT_SECONDS)
    for policy, *ways in (("nothing", "replay", "rerun"), ("matmuls", "rerun", "auto"), ("nothing", "full", "full")):
        ours = run_ranks(2, trained, name, policy, ways, timeout=TIMEOUT_SECONDS)
        assert sorted(ours[0][1][-1]) == sorted(ours[1][1][-1])
        for (reference, _), (gradients, _) in zip(plain, ours, strict=True):
            assert [key for key in reference if not same_bits(reference[key], gradients[key])] == []


def late_on_rank_1(engine: str) -> list[str]:
    """Collectives whose results are not there yet when the region goes on: what differs from the plain model."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = x @ block.a
        total = h.detach().clone()
        if dist.get_rank() == 1:
            time.sleep(0.05)
        work = dist.all_reduce(total, async_op=True)
        between = h.sin() @ block.b
        work.wait()
        return between * total.cos()

    def gradients(value: Any) -> dict[str, Tensor]:
        torch.manual_seed(dist.get_rank())
        model = sac.apply(built(lambda: Stack(FunctionBlock(body), FunctionBlock(body))), value)
        for _ in range(2):
            model(torch.randn(8, 8)).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    reference, ours = gradients("none"), gradients(value_of(engine))
    return [name for name in reference if not same_bits(reference[name], ours[name])]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_result_is_not_looked_at_before_it_has_come(engine: str) -> None:
    assert run_ranks(2, late_on_rank_1, engine, timeout=TIMEOUT_SECONDS) == [[], []]


# -- What only one rank sees


def routed_unlike(engine: str) -> list[list[str]]:
    """A choice on each rank, kept in every mode, between two collectives: experts that get other numbers of rows."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = reduced(x @ block.a)
        chosen = h.detach().topk(1 + dist.get_rank(), dim=1).indices
        return (h.sin() @ block.b + reduced(h)).gather(1, chosen)

    torch.manual_seed(dist.get_rank())
    model = sac.apply(built(lambda: Stack(FunctionBlock(body))), value_of(engine))
    sent = []
    for _ in range(3):
        loss = model(torch.randn(8, 8)).square().sum()
        sent.append(sent_in(loss.backward))
    return sent


@pytest.mark.parametrize("engine", ["full", *ENGINES])
def test_ranks_that_choose_other_rows_send_the_same(engine: str) -> None:
    one, other = run_ranks(2, routed_unlike, engine, timeout=TIMEOUT_SECONDS)
    assert one == other == [one[0]] * 3
