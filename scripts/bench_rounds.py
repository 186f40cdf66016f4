"""Ways to train the same blocks, checked against each other, then timed in turns."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from overhead_ways import AROUND_BOTH_PASSES, MATMULS, WAYS, Step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

DETACH = torch.ops.aten.detach.default
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
WAITING = (torch.ops._c10d_functional.wait_tensor.default,)


class Times(NamedTuple):
    """Seconds of one step: of its forward, of all of it, and until the host was done with it."""

    forward: float
    step: float
    host: float


class Clock(Protocol):
    """Where instants come from, and what three of them (begin, forward done, end) mean."""

    def now(self) -> Any: ...

    def times(self, begin: Any, between: Any, end: Any) -> Times: ...


class HostClock:
    """Reads one of the `time` module's functions."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now

    def times(self, begin: float, between: float, end: float) -> Times:
        return Times(between - begin, end - begin, end - begin)


class CudaClock:
    """Events on the current stream, and the wall's time at which each was put there."""

    def now(self) -> tuple[torch.cuda.Event, float]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, time.perf_counter()

    def times(self, begin: Any, between: Any, end: Any) -> Times:
        end[0].synchronize()
        return Times(begin[0].elapsed_time(between[0]) / 1e3, begin[0].elapsed_time(end[0]) / 1e3, end[1] - begin[1])


CPU_TIME = HostClock(time.process_time)
WALL_TIME = HostClock(time.perf_counter)


class Count(TorchDispatchMode):
    """Counts ops, and matrix products and collectives among them.

    Not `detach`, by which the ways hold tensors for backward. An op on DTensors is counted by what it runs: that is
    where its collectives are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops = self.matmuls = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        self.ops += func is not DETACH
        self.matmuls += func in MATMULS
        self.collectives += func.namespace in COLLECTIVES and func not in WAITING
        return func(*args, **(kwargs or {}))


class Runner:
    """A step of a model on one input; a round of several runs them in turns."""

    def __init__(
        self,
        step: Step,
        parameters: Iterable[Tensor],
        x: Tensor,
        weights: Tensor,
        clock: Clock,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.step, self.parameters = step, list(parameters)
        self.x = x.clone().requires_grad_()
        self.weights, self.clock, self.around = weights, clock, around

    def pass_through(self, between: Callable[[], object]) -> None:
        """One forward and backward, which adds to the gradients that are there; `between` is called in between."""
        with self.around():
            output = self.step(self.x)
            between()
            output.backward(self.weights)

    def clear(self) -> None:
        """Drop all gradients."""
        for tensor in (self.x, *self.parameters):
            tensor.grad = None

    def run(self) -> Times:
        """One forward and backward from no gradients."""
        self.clear()
        instants = [self.clock.now()]
        self.pass_through(lambda: instants.append(self.clock.now()))
        return self.clock.times(*instants, self.clock.now())

    def count(self) -> Counted:
        """One more, uncounted by any clock: what the dispatcher runs in it."""
        self.clear()
        forward_ops = forward_collectives = 0

        def forward_is_over() -> None:
            nonlocal forward_ops, forward_collectives
            forward_ops, forward_collectives = counted.ops, counted.collectives

        with Count() as counted:
            self.pass_through(forward_is_over)
        collectives = forward_collectives, counted.collectives - forward_collectives
        return Counted(forward_ops, counted.ops - forward_ops, counted.matmuls, collectives)

    def gradients(self) -> list[Tensor]:
        """Those of the last step; the next one, whoever's, makes others. Of a DTensor, this rank's share."""
        return [local(tensor.grad) for tensor in (self.x, *self.parameters) if tensor.grad is not None]


def shared_runner(mode: str, blocks: nn.Sequential, x: Tensor, weights: Tensor, clock: Clock) -> Runner:
    """One way, on modules of its own with everybody's parameters: gradients are those of who ran last."""
    parameters = list(blocks.parameters())
    own = copy.deepcopy(blocks, {id(parameter): parameter for parameter in parameters})
    around = AROUND_BOTH_PASSES.get(mode, contextlib.nullcontext)
    return Runner(WAYS[mode](own), parameters, x, weights, clock, around)


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True)
class Counted:
    """Ops that the dispatcher ran in a step; `matmuls` are those of both passes, `collectives` those of each."""

    forward_ops: int
    backward_ops: int
    matmuls: int
    collectives: tuple[int, int]


def warmed_up(runner: Runner, steps: int, reference: list[Tensor] | None) -> tuple[Counted, list[Tensor], bool]:
    """Run some steps and a counted one; returns the count, the last gradients, and whether they are the reference's.

    The first step, in which much is learnt of a region, has to have the same gradients as the last. Without a reference
    it is the first step's that the last are compared with.
    """
    runner.run()
    first = runner.gradients()
    for _ in range(steps):
        runner.run()
    counted = runner.count()
    runner.run()
    last = runner.gradients()
    return counted, last, same(first, last) and (reference is None or same(last, reference))


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether two lists of gradients are the same bit for bit."""
    return len(left) == len(right) and all(map(torch.equal, left, right))


def time_rounds(case: Any, runners: dict[str, Any], advance: Callable[[str], None]) -> dict[str, list[Any]]:
    """What each way's `run` returns, by round. Python's cycle collector runs between rounds, not inside a step."""
    found: dict[str, list[Any]] = {mode: [] for mode in runners}
    order = list(runners)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for index in range(case.rounds):
            turn = index % len(order)
            for mode in order[turn:] + order[:turn]:
                found[mode].append(runners[mode].run())
            gc.collect()
            advance(f"{case.key}: round {index + 1}")
    finally:
        gc.enable()
        gc.unfreeze()
    return found


def ratio(left: list[Times], right: list[Times]) -> float:
    """The median over rounds of the ratio of two ways' steps."""
    return median(mine.step / theirs.step for mine, theirs in zip(left, right, strict=True))


def quartiles(values: list[float]) -> tuple[float, float]:
    """The lower and the upper one."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


@contextlib.contextmanager
def threads(wanted: int) -> Iterator[None]:
    """Run with this many threads inside an op; 0 leaves torch's choice."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
