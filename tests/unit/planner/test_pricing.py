"""The price of a choice: the ops that run again, and what checkpointing itself takes of the host."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from sac.planner.cost import OVERHEAD, Overhead
from sac.planner.devices import DEVICES
from sac.planner.plan_file import make_plan
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from sac.planner.pricing import Pricing
from sac.planner.profile import Entry, Need, RegionProfile

COSTS = Overhead(record_s=1.0, rerun_s=10.0, replayed_call_s=100.0, rerun_call_s=1000.0)


def chain(count: int = 3, *, routes: bool = False) -> RegionProfile:
    """Entry n reads value n and makes value n + 1; backward needs all of them but the last. The first may route."""
    entries = tuple(
        Entry(n, "", "aten.sin.default", n, (n,), (n + 1,), savable=True, must_save=routes and n == 0)
        for n in range(count)
    )
    needs = tuple(Need(value, value) for value in range(1, count))
    return RegionProfile("", ("",), (0,), entries, tuple(range(count + 1)), (8,) * (count + 1), needs)


@pytest.mark.parametrize(
    ("engine", "saved", "routes", "overhead"),
    [
        ("auto", (), False, 1020),  # Python runs the first two again, and records nothing
        ("auto", (), True, 1013),  # the first is kept and the second runs again; all three are recorded
        ("auto", (0,), False, 103),  # a replay of three recorded ops
        ("replay", (), False, 103),
        ("rerun", (), False, 1020),
        ("rerun", (0,), False, 1013),
    ],
)
def test_what_each_engine_takes_of_the_host(engine: str, saved: tuple[int, ...], routes: bool, overhead: float) -> None:
    profile, times = chain(routes=routes), (0.5, 0.25, 0.125)
    choice = Pricing(engine, DEVICES["cpu"], COSTS).choice(profile, times, frozenset(saved), "x")
    assert choice.keep is not None
    again = 0.25 if saved or routes else 0.75
    assert (choice.keep.seconds, choice.seconds) == (again, again + overhead)


def test_a_gpu_hides_what_its_kernels_outlast() -> None:
    """The host is ahead of the kernels of the forward and of the recomputation, without their launches."""
    profile, h100 = chain(), DEVICES["h100"]
    pricing = Pricing("auto", h100, COSTS)
    assert pricing.overhead_of(profile, (h100.launch_s,) * 3, {0}) == 103
    assert pricing.overhead_of(profile, (20 + h100.launch_s,) * 3, {0}) == pytest.approx(103 - 4 * 20)
    assert pricing.overhead_of(profile, (30.0,) * 3, {0}) == 0


class Scan(nn.Module):
    """A scan over positions in plain ops on few numbers, as that of a state-space model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x_BTD: Tensor) -> Tensor:
        state, found = torch.zeros_like(x_BTD[:, 0]), []
        for one in self.inner(x_BTD).unbind(1):
            state = torch.tanh(state * 0.9 + one)
            found.append(state)
        return x_BTD + self.outer(torch.stack(found, 1))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scan() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def seconds_of(planner: Planner, choice: tuple[int, ...], costs: Overhead) -> float:
    pricing = Pricing("auto", planner.pricing.device, costs)
    of_group = [
        [0.0 if one.keep is None else pricing.choice(profile, times, one.keep.saved, "").seconds for one in choices]
        for profile, times, choices in zip(planner.profiles, planner.times, planner.choices, strict=True)
    ]
    return math.fsum(of_group[group][one] for group, one in zip(planner.groups, choice, strict=True))


def test_no_plan_for_tiny_layers_is_slower_than_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the overhead, recording hundreds of ops to spare one of them looked faster than running them again."""
    model, inputs = Stack(), (torch.ones(2, 60, 8),)
    recording = Overhead(20e-6, 5e-6, 0.0, 0.0)
    slower = []
    for costs in (recording, Overhead(0, 0, 0, 0)):
        monkeypatch.setattr("sac.planner.prepare.OVERHEAD", costs)
        planner = prepare(model, inputs)
        full = planner.everywhere(lambda group: 0)
        planner.run(full)
        for budget in (planner.point("full", full).peak, "50%", "90%"):
            made = make_plan(planner, budget)
            assert made.point.peak <= made.budget
            if made.budget >= planner.point("full", full).peak:
                chosen = seconds_of(planner, made.point.choice, recording)
                slower.append(chosen > seconds_of(planner, full, recording))
    assert slower[: len(slower) // 2] == [False] * (len(slower) // 2)
    assert any(slower)


def test_saving_all_but_a_little_of_a_large_layer_is_still_worth_recording() -> None:
    profile, times = chain(), (1e-3, 1e-3, 1e-3)
    pricing = Pricing("auto", DEVICES["cpu"], OVERHEAD)
    full, saving = (pricing.choice(profile, times, frozenset(saved), "").seconds for saved in ((), (0, 1)))
    assert saving < full / 4
