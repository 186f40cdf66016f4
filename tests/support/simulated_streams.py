"""Streams of a device, simulated on the CPU, that find every access to memory which no wait orders.

While a `Simulation` is active, tensors that ops make lie "on the device" and the ops that use them run on the current
simulated stream; pinned tensors lie on the host. Each stream, and the host, has a vector clock: what it knows to be
over on the others. An access that does not know of an earlier one to the same storage (one of them a write) is a race.
Memory that dies goes back to the stream it was made on: its uses on other streams must be known there by then, or the
allocator told of them (`record_stream`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sac.stores import contiguous as slots
from sac.stores import host as host_copies

HOST = "host"
LOOKS_ONLY = (torch.ops.aten.new_empty, torch.ops.aten.empty_like)  # at the shape: they do not read the data
Clock = dict[str, int]


@dataclass
class Memory:
    """One storage: who made it, and who last used it, and when."""

    reference: StorageWeakRef
    home: str
    written: tuple[str, int]
    used: Clock
    told: set[str] = field(default_factory=set)  # streams that record_stream named


class Event:
    """What a stream knew when it recorded this."""

    def __init__(self, simulation: Simulation, knows: Clock) -> None:
        self.simulation = simulation
        self.knows = knows

    def synchronize(self) -> None:
        self.simulation.learn(HOST, self.knows)


class Stream:
    """One simulated stream; `log` of the simulation tells what was asked of it."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name

    def record_event(self) -> Event:
        self.simulation.log.append(f"{self.name} records")
        return Event(self.simulation, dict(self.simulation.clocks[self.name]))

    def wait_event(self, event: Event) -> None:
        self.simulation.log.append(f"{self.name} waits")
        self.simulation.learn(self.name, event.knows)

    def wait_stream(self, other: Stream) -> None:
        self.simulation.log.append(f"{self.name} waits for {other.name}")
        self.simulation.learn(self.name, self.simulation.clocks[other.name])


class Simulation(TorchDispatchMode):
    """See above. `races` holds what was found, `log` who recorded, waited and copied, in order.

    It stands in for torch's device module too: `Stream`, `stream` and `current_stream` are those of `torch.cuda`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks: dict[str, Clock] = {HOST: {HOST: 1}}
        self.memory: dict[int, Memory] = {}
        self.races: list[str] = []
        self.log: list[str] = []
        self.made = 0
        self.current = self.stream_named("main")

    # What sac asks of a device module

    def Stream(self, device: Any = None) -> Stream:
        self.made += 1
        return self.stream_named(f"side {self.made}")

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    # The simulation

    def stream_named(self, name: str) -> Stream:
        self.clocks.setdefault(name, {name: 1})
        return Stream(self, name)

    def learn(self, name: str, knows: Clock) -> None:
        """From now on `name` comes after all that `knows` tells."""
        self.free_dead()
        clock = self.clocks[name]
        for other, time in knows.items():
            clock[other] = max(clock.get(other, 0), time)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        self.free_dead()
        is_pinned = bool(kwargs.get("pin_memory"))
        if is_pinned:
            kwargs["pin_memory"] = False
        given = {key_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        returned = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        made = [x for x in returned if key_of(x) not in given and key_of(x) not in self.memory]
        if (func is torch.ops.aten.copy_.default and len(args) > 2) or kwargs.get("non_blocking"):
            self.log.append(f"{self.current.name} copies")
        who = self.enqueue(args, kwargs, func)
        maker = HOST if is_pinned else who
        for x in made:
            time = self.clocks[maker][maker]
            self.memory[key_of(x)] = Memory(StorageWeakRef(x.untyped_storage()), maker, (maker, time), {maker: time})
        return result

    def enqueue(self, args: Any, kwargs: Any, func: Any) -> str:
        """Let the host, or the current stream, run one op now; return who."""
        arguments = [*zip(func._schema.arguments, args, strict=False)]
        arguments += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
        uses = [
            (self.memory.get(key_of(x)), one.alias_info is not None and one.alias_info.is_write)
            for one, value in arguments
            for x in tree_leaves(value)
            if isinstance(x, Tensor)
        ]  # what was made before the simulation began lies on the device, and is not watched
        on_host = bool(uses) and all(memory is not None and memory.home == HOST for memory, _ in uses)
        who = HOST if on_host else self.current.name
        if who != HOST:
            self.learn(who, self.clocks[HOST])  # a stream begins nothing before the host has asked for it
        clock = self.clocks[who]
        clock[who] += 1
        if not func.is_view and func.overloadpacket not in LOOKS_ONLY:
            for memory, writes in uses:
                if memory is not None:
                    self.use(memory, who, writes, str(func))
        return who

    def use(self, memory: Memory, who: str, writes: bool, op: str) -> None:
        clock = self.clocks[who]
        before = memory.used.items() if writes else [memory.written]
        for other, time in before:
            if clock.get(other, 0) < time:
                self.races.append(f"{op} on {who} does not come after {other} {time}")
        memory.used[who] = clock[who]
        if writes:
            memory.written = (who, clock[who])

    def free_dead(self) -> None:
        """Take note of storages that have died: the stream they were made on may use their memory from here on."""
        for key in [key for key, memory in self.memory.items() if memory.reference.expired()]:
            memory = self.memory.pop(key)
            if memory.home == HOST:
                continue  # torch's own allocator of pinned memory sees to that
            for who, time in memory.used.items():
                if who not in memory.told and self.clocks[memory.home].get(who, 0) < time:
                    self.races.append(f"memory of {memory.home} is freed while {who} uses it")

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Stands in for `Tensor.record_stream`."""
        self.memory[key_of(tensor)].told.add(stream.name)


def key_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def take_cpu_for_a_device(patch: pytest.MonkeyPatch, streams: Simulation | None) -> None:
    """Let sac believe that tensors on the CPU lie on a device, with these streams or with none."""
    patch.setattr(host_copies, "has_own_memory", lambda device: True)
    for module in (host_copies, slots):
        patch.setattr(module, "streams_of", lambda device: streams)


@contextlib.contextmanager
def simulated_streams(patch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    """Let sac take the CPU for a device with streams; the block fails if it leaves a race behind."""
    simulation = Simulation()
    take_cpu_for_a_device(patch, simulation)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: simulation.record_stream(tensor, stream))
    with simulation:
        yield simulation
        simulation.free_dead()
