"""Random programs of regions whose values wait on the host, for simulated streams: what is read has to be what was put.

A program runs steps of micro-batches. Each micro-batch is a chain of regions on one of two streams that know nothing of
each other; backward may run on a third one, twice, only through a part of the chain, or end in an exception; graphs may
be dropped without a backward; the host may be full.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sac.stores.backward_order import CallNode
from sac.stores.transfers import HostCopy, TransferLimits, Transfers
from tests.support.simulated_streams import Simulation, is_idle

SIZES = (64, 1000, 4096, 5000)


class Stopped(Exception):
    """What a backward is interrupted with."""


@dataclass
class Value:
    """One storage: its copy on the host, or itself if the host was full; and what it has to be.

    An input is put by its caller, who writes to it when the region is over.
    """

    copy: HostCopy | None
    held: Tensor | None
    expected: Tensor
    is_input: bool = False

    def look(self, program: Program) -> Tensor:
        if self.copy is None:
            assert self.held is not None
            program.mine.append(self.held)  # who reads it on another stream has to see to its memory
            return self.held
        transfers = self.copy.transfers
        return transfers.take(self.copy) if self.is_input else transfers.look(self.copy)


class Piece(torch.autograd.Function):
    """One region: its backward reads the values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, program: Program, values: list[Value], fails: bool) -> Tensor:
        ctx.program, ctx.values, ctx.fails = program, values, fails
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        program = ctx.program
        for value in program.random.sample(ctx.values, program.random.randint(1, len(ctx.values))):
            program.check(value)
        if ctx.fails:
            raise Stopped
        if not program.retains:
            ctx.values = []
        return grad * 1, None, None, None


class Program:
    """See above. ``wrong``: what was read and is not what was put."""

    def __init__(self, simulation: Simulation, seed: int, limits: TransferLimits, *, steps: int = 2) -> None:
        self.simulation = simulation
        self.random = random.Random(seed)
        self.transfers = Transfers(torch.device("cpu"), simulation, limits)
        self.wrong: list[str] = []
        self.retains = False
        self.mine: list[Tensor] = []  # what the program itself reads on several streams: it lives to the end
        streams = [simulation.current, simulation.stream_named("other")]
        third = simulation.stream_named("third")
        for step in range(steps):
            chains = [(self.chain(stream), stream, stream.record_event()) for stream in self.some(streams, 3)]
            self.random.shuffle(chains)
            while chains:
                out, stream, after = chains.pop()
                if self.random.random() < 0.15:
                    del out
                    continue  # a graph that dies without backward
                if self.random.random() < 0.3:
                    third.wait_event(after)  # of what the stream has run since, it knows nothing
                    stream = third
                with simulation.stream(stream):
                    self.backwards(out, step)
                del out
        for stream in streams:
            stream.wait_stream(third)
        torch.full((4096,), 77, dtype=torch.uint8)
        simulation.free_dead()
        if not is_idle(self.transfers):
            self.wrong.append("something is still held")

    def some(self, what: list[Any], most: int) -> list[Any]:
        return [self.random.choice(what) for _ in range(self.random.randint(1, most))]

    def chain(self, stream: Any) -> Tensor:
        """A forward."""
        with self.simulation.stream(stream):
            x = torch.ones(1, requires_grad=True)
            self.mine.append(x.detach())
            for _ in range(self.random.randint(2, 6)):
                x = self.region(x)
                torch.full((4096,), 77, dtype=torch.uint8)  # what the next region makes, where memory was freed
        return x

    def region(self, x: Tensor) -> Tensor:
        expected = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in self.some([*SIZES], 4)]
        self.mine += expected
        sources = [one * 1 for one in expected]
        call = CallNode()
        call.follow(x)
        copies = self.transfers.put(sources, call)
        values = [
            Value(copy, source if copy is None else None, one)
            for copy, source, one in zip(copies, sources, expected, strict=True)
        ]
        if self.random.random() < 0.4:
            values += self.input(call)
        out = Piece.apply(x, self, values, self.random.random() < 0.03)
        call.mark([out])
        return out

    def input(self, call: CallNode) -> list[Value]:
        self.mine.append(torch.randint(0, 255, (3000,), dtype=torch.uint8))
        source = self.mine[-1] * 1
        copy = self.transfers.start([source], call)[0]
        if copy is None:
            return []
        self.transfers.settle(copy)
        source.zero_()
        return [Value(copy, None, self.mine[-1], is_input=True)]

    def backwards(self, out: Tensor, step: int) -> None:
        rounds = self.random.choice((1, 1, 2))
        for turn in range(rounds):
            self.retains = turn < rounds - 1
            try:
                out.backward(torch.ones(1), retain_graph=self.retains)
            except Stopped:
                return

    def check(self, value: Value) -> None:
        found = value.look(self)
        if not torch.equal(found, value.expected):
            self.wrong.append("other bytes were read than were put")
        if value.is_input:
            found.zero_()
        del found
        torch.full((4096,), 99, dtype=torch.uint8)
