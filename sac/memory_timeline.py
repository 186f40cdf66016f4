"""Memory over one call from the allocator's view: torch's profiler records every allocation, and we sum them up.

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
from torch.profiler import ProfilerActivity, profile, record_function

from sac.errors import Problem, SacError

_MARK_PREFIX = "sac.mark:"
_START, _END, _HERE = "<start>", "<end>", "<here>"


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
