#!/usr/bin/env python3
"""What the frame of a region costs, part by part: microseconds of CPU time in one call, in addition to running its ops.

    .venv/bin/python scripts/frame_parts.py                 the small block of bench_overhead.py, about a minute
    .venv/bin/python scripts/frame_parts.py --rounds 20     that it works, not how fast it is

The first table has whole steps, nothing wrapped, in turns with `torch.utils.checkpoint`. In the second the block is not
checkpointed, but three ops after it are: what they add to a step is hardly more than a frame, whose code and data the
block has pushed out of the caches. The third has self times: the functions of each part are wrapped by a clock, which
is stopped while a function of another part runs. What the wrappers themselves cost is measured on an empty function
and taken off.
"""

from __future__ import annotations

import argparse
import gc
import pkgutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_blocks import Case, build
from bench_overhead import SMALL
from bench_rounds import HostClock, Runner, Times, ratio, shared_runner, threads, time_rounds, warmed_up
from bench_terminal import environment, print_table
from overhead_ways import BASELINE, REPLAY, SAC_FULL, TORCH_FULL, chain
from torch import Tensor, nn

from sac.errors import SacWarning

Place = tuple[str, str]  # pass and part
OPS, REST = "the forward itself", "the rest of the call"
WAYS_SHOWN = (SAC_FULL, REPLAY)
_REGION, _RECOMPUTE = "sac.region", "sac.recompute"
PARTS: dict[str, tuple[str, ...]] = {
    # Not the block's own `forward`: a region looks into it, and would find another clock at each call.
    OPS: (f"{_REGION}.frame.RegionCall._run_forward",),
    "fingerprint": (
        f"{_REGION}.survey.Surveys.taken",
        f"{_RECOMPUTE}.regions._fingerprint_of",
        f"{_RECOMPUTE}.regions._key",
    ),
    "inputs": (f"{_REGION}.inputs.RegionInputs.__init__",),
    "recorder": (f"{_RECOMPUTE}.regions.Region._replay_frame",),
    "state of Python": (f"{_REGION}.python_state.ReachableState.__init__",),
    "state of modules": (f"{_REGION}.module_state.ModuleState.__init__",),
    "random states": (f"{_REGION}.rng.RngSnapshot.__init__", f"{_REGION}.rng.HostRandomState.__init__"),
    "flags and modes": (
        f"{_REGION}.ambient.BackendFlags.__init__",
        f"{_REGION}.ambient.Snapshot.__init__",
        f"{_REGION}.ambient.ContextVariables.__init__",
    ),
    "begin": (f"{_REGION}.frame.RegionCall._begin",),
    "pack": (f"{_REGION}.frame.Frame._pack", f"{_RECOMPUTE}.replay.ReplayFrame._pack"),
    "recorder, per op": (f"{_RECOMPUTE}.recorder.TapeMode.__torch_dispatch__",),
    "close": (f"{_REGION}.frame.Frame._close",),
    "end of the tape": (f"{_RECOMPUTE}.recorder.ReplayRecorder.end",),
    "unpack": (f"{_REGION}.frame.Frame._unpack", f"{_RECOMPUTE}.replay.ReplayFrame._unpack"),
    "recomputation": (f"{_REGION}.frame.Frame._recompute", f"{_RECOMPUTE}.replay.ReplayFrame._recompute"),
    "rebuilt inputs": (f"{_REGION}.frame.Frame._rebuild",),
    "restore": (f"{_REGION}.frame.RegionCall._enter_forward_again",),
    "fill": (f"{_REGION}.frame.RecomputeProgress.pack",),
    "replay": (f"{_RECOMPUTE}.replay.run_schedule",),
    "verify": (f"{_RECOMPUTE}.replay.ReplayFrame._verify",),
    "undo": (f"{_REGION}.undo.UndoStack.__exit__",),
    "drop": (f"{_REGION}.frame.RegionCall._drop",),
}


class ThreeOps(nn.Module):
    """Hardly more than a frame, if it is a region."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin().cos()


def with_three_ops(way: str, blocks: nn.Sequential, x: Tensor, weights: Tensor, clock: HostClock) -> Runner:
    """Steps of the blocks without checkpointing and of three ops with it."""
    ops = shared_runner(way, nn.Sequential(ThreeOps(x.shape[-1])), x, weights, clock)
    return Runner(chain([blocks, ops.step]), [*blocks.parameters(), *ops.parameters], x, weights, clock)


class PartClock:
    """Nanoseconds of CPU time by pass and part, without those of the wrappers; ``pass_`` is the pass that runs."""

    def __init__(self, added: tuple[float, float] = (0.0, 0.0)) -> None:
        self.spent: Counter[Place] = Counter()
        self.pass_ = "forward"
        self._added = added  # by a wrapper: to the part that it is of, and to the one that calls it
        self._part = REST
        self._since = time.thread_time_ns()

    def switch(self, part: str) -> str:
        """From now on the time is that of ``part``; returns the part before."""
        now, before = time.thread_time_ns(), self._part
        self.spent[self.pass_, before] += now - self._since
        self._part, self._since = part, now
        return before

    def wrapped(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        inside, outside = self._added

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self.switch(part)
            self.spent[self.pass_, part] -= inside
            self.spent[self.pass_, before] -= outside
            try:
                return function(*args, **kwargs)
            finally:
                self.switch(before)

        timed.__module__ = torch.__name__  # else a region would restore this clock for its recomputation
        return timed

    @contextmanager
    def on_all_parts(self) -> Iterator[None]:
        """Wrap the functions of all parts."""
        places = [(part, *name.rpartition(".")[::2]) for part, names in PARTS.items() for name in names]
        found = [(part, pkgutil.resolve_name(owner), name) for part, owner, name in places]
        originals = [(owner, name, vars(owner)[name]) for _, owner, name in found]
        try:
            for part, owner, name in found:
                setattr(owner, name, self.wrapped(part, vars(owner)[name]))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


def added_by_wrapper() -> tuple[float, float]:
    """Nanoseconds that a wrapper adds: to the part that it is of, and to the part that calls it."""
    clock, rounds = PartClock(), 20_000
    wrapped = clock.wrapped("inside", lambda: None)
    for _ in range(rounds):
        wrapped()
    clock.switch(REST)
    return clock.spent["forward", "inside"] / rounds, clock.spent["forward", REST] / rounds


def parts_of(runners: dict[str, Runner], rounds: int) -> dict[str, dict[Place, float]]:
    """Microseconds of each part in one step of each way. The ways take turns."""
    clock = PartClock(added_by_wrapper())
    steps: dict[str, list[dict[Place, float]]] = {way: [] for way in runners}

    def backward_begins() -> None:
        clock.switch(REST)
        clock.pass_ = "backward"

    with clock.on_all_parts():
        for _ in range(rounds):
            for way, runner in runners.items():
                runner.clear()
                clock.pass_ = "forward"
                clock.switch(REST)
                clock.spent.clear()
                runner.pass_through(backward_begins)
                clock.switch(REST)
                steps[way].append(dict(clock.spent))
    return {way: medians(found) for way, found in steps.items()}


def medians(steps: list[dict[Place, float]]) -> dict[Place, float]:
    places = {place for step in steps for place in step}
    return {place: median(step.get(place, 0.0) for step in steps) / 1e3 for place in places}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="steps of each way")
    case = replace(SMALL, rounds=parser.parse_args().rounds)
    print(f"$ {environment('frame_parts.py')['command']}\n{case.label}, CPU time")
    with threads(1):
        measure(case)
    return 0


def measure(case: Case) -> None:
    blocks, x, weights = build(case)
    clock = HostClock(time.thread_time)
    runners = {way: shared_runner(way, blocks, x, weights, clock) for way in (BASELINE, TORCH_FULL, *WAYS_SHOWN)}
    for runner in runners.values():
        warmed_up(runner, case.warm_up, None)
    times = time_rounds(case, runners, lambda _: None)
    print_table(("step", "forward", "backward", "both", "÷ full"), [total(way, times) for way in runners])
    frames = {way: with_three_ops(way, blocks, x, weights, clock) for way in runners}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)  # no rule of the policy matches one of these ops
        for runner in frames.values():
            warmed_up(runner, case.warm_up, None)
    times = time_rounds(case, frames, lambda _: None)
    others = [way for way in frames if way != BASELINE]
    print_table(("three ops add", "forward", "backward", "both"), [added(way, times) for way in others])
    gc.disable()
    parts = parts_of({way: runners[way] for way in (TORCH_FULL, *WAYS_SHOWN)}, case.rounds)
    gc.enable()
    columns = [(way, pass_) for way in (TORCH_FULL, *WAYS_SHOWN) for pass_ in ("forward", "backward")]
    rows = [[part, *(shown(parts[way].get((pass_, part), 0.0)) for way, pass_ in columns)] for part in (*PARTS, REST)]
    sums = [sum(us for place, us in parts[way].items() if place[0] == pass_) for way, pass_ in columns]
    rows.append(["all", *map(shown, sums)])
    print_table(("µs in one call", *(f"{way}, {pass_}" for way, pass_ in columns)), rows)


def shown(us: float) -> str:
    return f"{us:.0f}" if us >= 0.5 else ""


def total(way: str, times: dict[str, list[Times]]) -> list[str]:
    forward = 1e6 * median(each.forward for each in times[way])
    backward = 1e6 * median(each.step - each.forward for each in times[way])
    both = 1e6 * median(each.step for each in times[way])
    us = [f"{one:.0f} µs" for one in (forward, backward, both)]
    return [way, *us, f"{ratio(times[way], times[TORCH_FULL]):.2f}"]


def added(way: str, times: dict[str, list[Times]]) -> list[str]:
    pairs = [*zip(times[way], times[BASELINE], strict=True)]
    forward = median(one.forward - none.forward for one, none in pairs)
    both = median(one.step - none.step for one, none in pairs)
    return [way, *(f"{1e6 * one:.0f} µs" for one in (forward, both - forward, both))]


if __name__ == "__main__":
    sys.exit(main())
