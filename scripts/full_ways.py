"""The ways to recompute one layer as a whole that `bench_full.py` compares, and one process's measurement of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from bench_rounds import same, threads, time_rounds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.layers import stack
from tests.support.recording import Recorder

Step = Callable[[Tensor], Tensor]
BASELINE, TORCH, TORCH_REENTRANT = "none", "torch", "torch reentrant"
SCATTERED = "sac scattered"


def none(layer: nn.Module) -> Step:
    return layer


def torch_checkpoint(layer: nn.Module, *, use_reentrant: bool) -> Step:
    return partial(checkpoint, layer, use_reentrant=use_reentrant)


def sac_checkpoint(layer: nn.Module, *, use_reentrant: bool) -> Step:
    return partial(sac.checkpoint, layer, use_reentrant=use_reentrant)


def sac_apply(layer: nn.Module) -> Step:
    return sac.apply(nn.Sequential(layer), {"mode": "full", "blocks": ["0"]})[0]


def sac_scattered(layer: nn.Module) -> Step:
    return partial(sac.checkpoint, layer, distribute_saved_activations=True, tp_group=dist.group.WORLD)


WAYS: dict[str, Callable[[nn.Module], Step]] = {
    BASELINE: none,
    TORCH: partial(torch_checkpoint, use_reentrant=False),
    TORCH_REENTRANT: partial(torch_checkpoint, use_reentrant=True),
    "sac.checkpoint": partial(sac_checkpoint, use_reentrant=False),
    "sac.checkpoint reentrant": partial(sac_checkpoint, use_reentrant=True),
    "sac.apply full": sac_apply,
    SCATTERED: sac_scattered,
}
# The way of torch's that does the same.
COUNTERPART = {way: TORCH_REENTRANT if way.endswith("reentrant") else TORCH for way in WAYS if way != BASELINE}


@dataclass(frozen=True, slots=True)
class Case:
    """Layers one after the other, each of them a region, and one input."""

    key: str
    layers: int
    d: int
    heads: int
    batch: int
    seq: int
    rounds: int
    warm_up: int

    @property
    def label(self) -> str:
        size = f"d={self.d}, {self.heads} heads, MLP {4 * self.d}, batch {self.batch}, {self.seq} tokens"
        return f"{self.layers} layer(s) of {size}"


@dataclass(frozen=True, slots=True)
class Row:
    """One way in one case: medians, quartiles of the forward, and medians of ratios and differences in single rounds.

    Times are of one layer: those of all of them, divided by how many there are. `region_us`: what the forward costs
    more than without checkpointing. `recomputed_percent`: the FLOPs of matrix products that a step runs more than one
    without checkpointing, in percent of those of a forward.
    """

    way: str
    forward_us: float
    forward_quartiles_us: tuple[float, float]
    region_us: float
    step_us: float
    forward_to_torch: float
    step_to_torch: float
    recomputed_percent: float
    gradients_equal: bool


class Runner:
    """One way, on layers of its own with the same weights as everybody's."""

    def __init__(self, way: str, layers: nn.Module, x: Tensor, weights: Tensor) -> None:
        self.layers = copy.deepcopy(layers)
        self.steps = [WAYS[way](layer) for layer in self.layers]
        self.x = x.clone().requires_grad_()
        self.weights = weights

    def run(self) -> tuple[float, float]:
        """One forward and backward from no gradients; returns the CPU seconds of the forward and of both."""
        self.x.grad = None
        for parameter in self.layers.parameters():
            parameter.grad = None
        started = time.process_time()
        output = self.x
        for step in self.steps:
            output = step(output)
        between = time.process_time()
        output.backward(self.weights)
        return between - started, time.process_time() - started

    def gradients(self) -> list[Tensor]:
        """Those of the last step."""
        return [tensor.grad for tensor in (self.x, *self.layers.parameters()) if tensor.grad is not None]


def measure(case: Case, ways: list[str], advance: Callable[[str], None] = lambda label: None) -> list[Row]:
    """Verify, count, warm up and time every way of one case, on one thread."""
    layers = stack(case.layers, case.d, case.heads)
    shape = (case.batch, case.seq, case.d)
    x, weights = torch.randn(shape), torch.randn(shape)
    with Recorder() as forward:
        layers(x)
    with threads(1):
        runners = {way: Runner(way, layers, x, weights) for way in ways}
        flops = {}
        for way, runner in runners.items():
            advance(f"{case.key}: {way}")
            flops[way] = warmed_up(runner, case.warm_up)
        equal = {way: same(runner.gradients(), runners[BASELINE].gradients()) for way, runner in runners.items()}
        seconds = time_rounds(case, runners, advance)
    more = {way: 100 * (flops[way] - flops[BASELINE]) / forward.product_flops for way in ways}
    return [row(way, case.layers, seconds, more[way], equal[way]) for way in ways]


def warmed_up(runner: Runner, steps: int) -> int:
    """Run some steps; returns the FLOPs of the matrix products of the last one but one."""
    for _ in range(steps):
        runner.run()
    with Recorder() as counted:
        runner.run()
    runner.run()
    return counted.product_flops


def row(way: str, layers: int, seconds: dict[str, list[tuple[float, float]]], percent: float, equal: bool) -> Row:
    us = 1e6 / layers
    forwards = sorted(us * forward for forward, _ in seconds[way])
    rounds = list(zip(seconds[way], seconds[BASELINE], seconds[COUNTERPART.get(way, TORCH)], strict=True))
    return Row(
        way,
        median(forwards),
        (forwards[len(forwards) // 4], forwards[-1 - len(forwards) // 4]),
        median(us * (mine[0] - plain[0]) for mine, plain, _ in rounds),
        median(us * step for _, step in seconds[way]),
        median(mine[0] / theirs[0] for mine, _, theirs in rounds),
        median(mine[1] / theirs[1] for mine, _, theirs in rounds),
        percent,
        equal,
    )
