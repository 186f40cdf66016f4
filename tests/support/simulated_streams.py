"""Streams of a device, simulated on the CPU, that find every access to memory which no wait orders.

While a `Simulation` is active, tensors that ops make lie "on the device" and the ops that use them run on the current
simulated stream; pinned tensors lie on the host. Each stream, and the host, has a vector clock: what it knows to be
over on the others. An access that does not know of an earlier one to the same bytes (one of them a write) is a race.
So one run speaks for all interleavings that the waits allow. Memory that dies goes back to the stream it was made on:
its uses on other streams must be known there by then, or the allocator told of them (`record_stream`).

Copies on side streams are late: the target is poisoned, and filled when a compute stream or the host waits for the
copy. Who reads too early, or overwrites the source too early, gets wrong bytes. For schedules there is a clock: copies
take bytes / `bytes_per_second`, `work` takes the seconds that it is given, and waits stall.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sac.stores import contiguous as slots
from sac.stores import transfers
from sac.torch_private import UnseenByModes

HOST = "host"
POISON = 0xA5
# At shape and storage: they neither read nor write the data.
LOOKS_ONLY = (torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.set_)
Clock = dict[str, int]


@dataclass
class Range:
    """Some bytes of a storage: who wrote them last and when, and the last uses."""

    written: tuple[str, int] | None = None
    used: Clock = field(default_factory=dict)


@dataclass
class Memory:
    """One storage: who made it, and the uses of its bytes, by first and last byte."""

    reference: StorageWeakRef
    home: str
    size: int
    ranges: dict[tuple[int, int], Range]
    told: set[str] = field(default_factory=set)  # streams that record_stream named


class Event:
    """What a stream knew when it recorded this, and its time."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.knows: Clock = {}
        self.seconds = 0.0

    def synchronize(self) -> None:
        self.simulation.log.append("the host waits")
        self.simulation.learn(HOST, self.knows)

    def elapsed_time(self, other: Event) -> float:
        return (other.seconds - self.seconds) * 1e3


class Stream:
    """One simulated stream; `log` of the simulation tells what was asked of it."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name

    def record_event(self, event: Event | None = None) -> Event:
        if event is None:  # those with times say nothing of the order
            self.simulation.log.append(f"{self.name} records")
        event = event or Event(self.simulation)
        event.knows, event.seconds = dict(self.simulation.clocks[self.name]), self.simulation.seconds[self.name]
        return event

    def wait_event(self, event: Event) -> None:
        self.simulation.log.append(f"{self.name} waits")
        self.simulation.stall(self.name, event.seconds)
        self.simulation.learn(self.name, event.knows)

    def wait_stream(self, other: Stream) -> None:
        self.simulation.log.append(f"{self.name} waits for {other.name}")
        self.simulation.stall(self.name, self.simulation.seconds[other.name])
        self.simulation.learn(self.name, self.simulation.clocks[other.name])


class Simulation(TorchDispatchMode):
    """See above. `races` holds what was found, `log` who recorded, waited and copied, in order.

    It stands in for torch's device module too: `Stream`, `Event`, `stream` and so on are those of `torch.cuda`.
    """

    def __init__(self, bytes_per_second: float = float("inf")) -> None:
        super().__init__()
        self.clocks: dict[str, Clock] = {HOST: {HOST: 1}}
        self.memory: dict[int, Memory] = {}
        self.races: list[str] = []
        self.log: list[str] = []
        self.made = 0
        self.late: dict[str, deque[tuple[int, Callable[[], None]]]] = {}  # per side stream: time, what to do
        self.bytes_per_second = bytes_per_second
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.stalls: defaultdict[str, float] = defaultdict(float)
        self.device_bytes = self.peak_bytes = 0
        self.pinned_bytes: list[int] = []
        self.is_capturing = False
        self.current = self.stream_named("main")

    # What sac asks of a device module

    def Stream(self, device: Any = None) -> Stream:
        self.made += 1
        self.late[f"side {self.made}"] = deque()
        return self.stream_named(f"side {self.made}")

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    # The simulation

    def stream_named(self, name: str) -> Stream:
        self.clocks.setdefault(name, {name: 1})
        return Stream(self, name)

    def work(self, seconds: float) -> None:
        """Let the current stream be busy."""
        self.seconds[self.current.name] += seconds

    def stall(self, name: str, until: float) -> None:
        self.stalls[name] += max(0.0, until - self.seconds[name])
        self.seconds[name] = max(self.seconds[name], until)

    def learn(self, name: str, knows: Clock) -> None:
        """From now on `name` comes after all that `knows` tells."""
        self.free_dead()
        self.come_after(name, knows)

    def come_after(self, name: str, knows: Clock) -> None:
        clock = self.clocks[name]
        knows = dict(knows)
        if name in self.late:  # it will wait when it gets there
            self.late[name].append((clock[name], lambda: self.catch_up(knows)))
        else:
            self.catch_up(knows)
        for other, time in knows.items():
            clock[other] = max(clock.get(other, 0), time)

    def catch_up(self, knows: Clock) -> None:
        """Do what side streams have put off, up to these times."""
        for other in self.late.keys() & knows.keys():
            waiting = self.late[other]
            while waiting and waiting[0][0] <= knows[other]:
                waiting.popleft()[1]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        self.free_dead()
        is_pinned = bool(kwargs.get("pin_memory"))
        if is_pinned:
            kwargs["pin_memory"] = False
        given = {key_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        is_async = (func is torch.ops.aten.copy_.default and len(args) > 2) or kwargs.get("non_blocking")
        is_late = is_async and self.current.name in self.late and func is torch.ops.aten.copy_.default
        result = args[0] if is_late else func(*args, **kwargs)
        returned = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        made = [x for x in returned if key_of(x) not in given and key_of(x) not in self.memory]
        if is_async:
            self.log.append(f"{self.current.name} copies")
        who = self.enqueue(args, kwargs, func)
        if is_late:
            self.seconds[who] += args[0].nbytes / self.bytes_per_second
            self.late[who].append((self.clocks[who][who], late_copy(args[0], args[1])))
        maker = HOST if is_pinned else who
        for x in made:
            time, size = self.clocks[maker][maker], x.untyped_storage().nbytes()
            whole = {(0, size): Range((maker, time), {maker: time})}
            self.memory[key_of(x)] = Memory(StorageWeakRef(x.untyped_storage()), maker, size, whole)
            if is_pinned:
                self.pinned_bytes.append(size)
            else:
                self.device_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.device_bytes)
        return result

    def enqueue(self, args: Any, kwargs: Any, func: Any) -> str:
        """Let the host, or the current stream, run one op now; return who."""
        arguments = [*zip(func._schema.arguments, args, strict=False)]
        arguments += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
        uses = [
            (self.memory.get(key_of(x)), x, one.alias_info is not None and one.alias_info.is_write)
            for one, value in arguments
            for x in tree_leaves(value)
            if isinstance(x, Tensor)
        ]  # what was made before the simulation began lies on the device, and is not watched
        on_host = bool(uses) and all(memory is not None and memory.home == HOST for memory, _, _ in uses)
        who = HOST if on_host else self.current.name
        if who != HOST:
            self.come_after(who, self.clocks[HOST])  # a stream begins nothing before the host has asked for it
        clock = self.clocks[who]
        clock[who] += 1
        if not func.is_view and func.overloadpacket not in LOOKS_ONLY:
            for memory, x, writes in uses:
                if memory is not None:
                    self.use(memory, bytes_in(x), who, writes, str(func))
        return who

    def use(self, memory: Memory, place: tuple[int, int], who: str, writes: bool, op: str) -> None:
        first, last = place
        clock = self.clocks[who]
        for (begin, end), known in [*memory.ranges.items()]:
            if begin >= last or first >= end:
                continue
            before = known.used.items() if writes else [known.written] if known.written else []
            for other, time in before:
                if clock.get(other, 0) < time:
                    self.races.append(f"{op} on {who} does not come after {other} {time}")
            if writes and first <= begin and end <= last:
                del memory.ranges[begin, end]
        if first < last:
            known = memory.ranges.setdefault(place, Range())
            known.used[who] = clock[who]
            if writes:
                known.written = (who, clock[who])

    def free_dead(self) -> None:
        """Take note of storages that have died: the stream they were made on may use their memory from here on."""
        expired = torch.UntypedStorage._expired  # the method of the reference takes five times as long
        for key in [key for key, memory in [*self.memory.items()] if expired(memory.reference.cdata)]:
            memory = self.memory.pop(key)
            if memory.home == HOST:
                continue  # torch's own allocator of pinned memory sees to that
            self.device_bytes -= memory.size
            uses = [use for known in memory.ranges.values() for use in known.used.items()]
            for who, time in uses:
                if who not in memory.told and self.clocks[memory.home].get(who, 0) < time:
                    self.races.append(f"memory of {memory.home} is freed while {who} uses it")

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Stands in for `Tensor.record_stream`."""
        self.memory[key_of(tensor)].told.add(stream.name)


def key_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def bytes_in(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the byte after its last."""
    if not tensor.numel():
        return 0, 0
    size, first = tensor.element_size(), tensor.storage_offset()
    extent = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (first + extent) * size


def late_copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    """Poison the target; return what copies, if both are still alive then, and keeps neither alive."""
    ends = [(StorageWeakRef(x.untyped_storage()), x.dtype, *place_of(x)) for x in (target, source)]
    guard = UnseenByModes()
    torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage())[slice(*bytes_in(target))].fill_(POISON)
    del guard

    def copy() -> None:
        guard = UnseenByModes()
        storages = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference, *_ in ends]
        if None not in storages:
            one, other = (
                torch.empty(0, dtype=dtype).set_(storage, *place)
                for storage, (_, dtype, *place) in zip(storages, ends, strict=True)
            )
            one.copy_(other)
        del guard

    return copy


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def is_idle(of_device: transfers.Transfers) -> bool:
    """Whether nothing is held: on the device, on its way, or in host memory."""
    return not len(of_device._flying) and not of_device.used_host_bytes()


def take_cpu_for_a_device(patch: pytest.MonkeyPatch, streams: Simulation) -> None:
    """Let sac believe that tensors on the CPU lie on a device with these streams."""
    for module in (transfers, slots):
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
