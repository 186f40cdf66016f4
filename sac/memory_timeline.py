"""Memory over one call, or at marks in a step, from the allocator's view; on a CPU, torch's profiler records it.

This module does not know what sac keeps, so it is an independent check of the bytes that sac reports.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from sac.errors import Problem, SacError
from sac.tensors import storage_address, storage_bytes, tensor_parts
from sac.torch_private import profiler_is_on, tree_leaves

_MARK_PREFIX = "sac.mark:"
_START, _END, _HERE = "<start>", "<end>", "<here>"
CUDA_BLOCK = 512  # bytes; torch's caching allocator rounds sizes up to a multiple of this


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Live bytes over one call, counting only memory allocated in it; freeing older memory does not count.

    At ``times_ms[i]``, in milliseconds from the start of the call, the live bytes became ``live_bytes[i]``. ``marks``
    holds, per name passed to ``mark``, each pair of time and live bytes.
    """

    times_ms: tuple[float, ...]
    live_bytes: tuple[int, ...]
    peak_bytes: int
    end_bytes: int
    marks: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)

    def at(self, name: str) -> int:
        """Return the live bytes at the last ``mark(name)``; raises ``KeyError`` if there was none."""
        return self.marks[name][-1][1]


@dataclass(frozen=True, slots=True)
class _Event:
    time_ns: int
    delta_bytes: int = 0
    address: int = 0
    mark: str = ""


def mark(name: str) -> None:
    """Name the current instant of the call that ``measure_memory`` measures; does nothing outside of one."""
    with record_function(_MARK_PREFIX + name):
        pass


def measure_memory(fn: Callable[[], object], device: str | torch.device = "cpu") -> MemoryTimeline:
    """Run ``fn`` once and return its memory use on ``device`` (cpu or cuda) from the profiler's memory events.

    On CUDA the peak comes from the caching allocator's own counter; all other numbers come from the profiler.
    Memory that does not go through torch's allocators (oneDNN scratch, NCCL buffers) is not counted.
    Raises ``SacError`` for another device, or if this torch's profiler has no memory events.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise SacError(Problem("device", f"memory cannot be measured on '{device}'", "cpu, cuda"))
    start_bytes = _reset_allocator(device) if device.type == "cuda" else 0
    memory = StepMemory()
    try:
        result = fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        events = memory.events(device)
    del result  # kept alive until the end
    timeline = _timeline(events)
    if device.type == "cuda":
        timeline = replace(timeline, peak_bytes=torch.cuda.max_memory_allocated(device) - start_bytes)
    return timeline


class StepMemory:
    """Records the allocations from its creation until ``stop``, on the CPU with marks in between.

    Both have to be called outside of a backward, in the same thread: a profiler belongs to the state of its thread.
    """

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes to stderr at start and stop
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.__enter__()
        atexit.register(self._profiler.__exit__, None, None, None)  # a process that ends while it runs crashes
        mark(_START)

    def mark(self) -> None:
        """Mark the present instant."""
        mark(_HERE)

    def stop(self) -> list[tuple[int, int]]:
        """Return, for each mark, the peak since the one before it and the live bytes, both above the start."""
        levels, peak, live = [], 0, 0
        for event in self.events(torch.device("cpu")):
            live += event.delta_bytes
            peak = max(peak, live)
            if event.mark == _HERE:
                levels.append((peak, live))
                peak = live
        return levels

    def events(self, device: torch.device) -> list[_Event]:
        """Stop, and return the events on a device, without frees of memory that was allocated before the start.

        Nothing if another profiler was started or stopped meanwhile: then there are no events from the start to the
        end.
        """
        mark(_END)
        atexit.unregister(self._profiler.__exit__)
        self._profiler.__exit__(None, None, None)
        # Private: the profiler's public lists sum memory events per op and drop their times and addresses.
        # Names and fields are those of torch 2.13, checked by tests/unit/test_memory_timeline.py, which knows every
        # allocation that it makes.
        results: Any = getattr(self._profiler.profiler, "kineto_results", None)
        if results is None:
            found = f"the profiler of torch {torch.__version__} gives no memory events"
            raise SacError(Problem("torch", found, "2.11-2.13"))
        index = torch.cuda.current_device() if device == torch.device("cuda") else device.index
        nodes, events = list(results.experimental_event_tree()), []
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children)
            if node.name.startswith(_MARK_PREFIX):
                events.append(_Event(node.start_time_ns, mark=node.name.removeprefix(_MARK_PREFIX)))
            elif node.name == "[memory]":
                block = node.extra_fields
                if block.device.type == device.type and (device.type == "cpu" or block.device.index == index):
                    events.append(_Event(node.start_time_ns, block.alloc_size, block.ptr))
        events.sort(key=lambda event: event.time_ns)
        names = [event.mark for event in events]
        if _START not in names or _END not in names:
            return []
        return list(_without_older(events[names.index(_START) : names.index(_END) + 1]))


@dataclass
class Meter:
    """Measures a step on ``device``: ``start``, ``mark`` at each instant (in any thread of autograd), ``stop``.

    ``read``: returns the peak since it was called last, and the live bytes. None: torch's profiler records each
    allocation of the CPU, and memory that is not of a known tensor at the start does not count.
    ``block_bytes``: the allocator rounds sizes up to a multiple of this. ``memory_bytes``: of the device.
    """

    device: torch.device
    read: Callable[[], tuple[int, int]] | None = None
    block_bytes: int = 1
    memory_bytes: int = 0

    def bytes_of(self, values: Any) -> int:
        """Return the bytes of the storages of tensors in a pytree on the device, each once, as its allocator rounds."""
        parts = (part for leaf in tree_leaves(values) if isinstance(leaf, Tensor) for part in tensor_parts(leaf))
        sizes = {storage_address(part): storage_bytes(part) for part in parts if part.device == self.device}
        return sum(-(-size // self.block_bytes) * self.block_bytes for size in sizes.values())

    def live(self, known: Any) -> int:
        """Return the bytes that are live now; ``known``: what counts where the allocator cannot be asked."""
        return self.bytes_of(known) if self.read is None else self.read()[1]

    def is_free(self) -> bool:
        """Return whether a step can be measured now: a thread has one profiler at most."""
        return self.read is not None or not profiler_is_on()

    def start(self, live: int) -> None:
        """Begin a step, with ``live`` bytes."""
        self._levels: list[tuple[int, int]] = []
        if self.read is None:
            self._live, self._memory = live, StepMemory()
        else:
            self.read()

    def mark(self) -> None:
        """Mark the present instant."""
        if self.read is None:
            self._memory.mark()
        else:
            self._levels.append(self.read())

    def stop(self) -> list[tuple[int, int]]:
        """End the step, outside of backward; return for each mark the peak since the one before it, and live bytes."""
        above = self._memory.stop() if self.read is None else ()
        return [*self._levels, *((self._live + peak, self._live + live) for peak, live in above)]


def meter_of(device: torch.device) -> Meter | None:
    """Return the meter of a device, or None if there is none for its type."""
    if device.type == "cpu":
        return Meter(device, memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if device.type != "cuda":
        return None

    def read() -> tuple[int, int]:
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak, torch.cuda.memory_allocated(device)

    return Meter(device, read, CUDA_BLOCK, torch.cuda.get_device_properties(device).total_memory)


def _reset_allocator(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _without_older(events: list[_Event]) -> Iterator[_Event]:
    """Yield the events without frees of memory that was allocated before them.

    The CPU allocator does not know the size of a block allocated before the profiler started; worse, it may remember
    the size of another block that an earlier profiler saw at that address.
    """
    alive = set()
    for event in events:
        if event.delta_bytes > 0:
            alive.add(event.address)
        elif event.delta_bytes < 0 and event.address not in alive:
            continue
        else:
            alive.discard(event.address)
        yield event


def _timeline(events: list[_Event]) -> MemoryTimeline:
    if not events:
        found = "another profiler was started or stopped while memory was measured"
        raise SacError(Problem("torch", found, fix="measure without it"))
    start_ns = events[0].time_ns
    times_ms = tuple((event.time_ns - start_ns) / 1e6 for event in events)
    live_bytes = tuple(accumulate(event.delta_bytes for event in events))
    marks: dict[str, list[tuple[float, int]]] = {}
    for event, time_ms, live in zip(events, times_ms, live_bytes, strict=True):
        if event.mark:
            marks.setdefault(event.mark, []).append((time_ms, live))
    named = {name: tuple(points) for name, points in marks.items() if name not in (_START, _END)}
    return MemoryTimeline(times_ms, live_bytes, max(live_bytes), live_bytes[-1], named)
