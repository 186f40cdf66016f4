"""Live bytes of a device at the marks of a step, and the peak between them, as its allocator counts them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sac.memory_timeline import StepMemory
from sac.planner.ledger import CUDA_BLOCK, Ledger
from sac.tensors import storage_bytes, tensor_parts
from sac.torch_private import profiler_is_on


class Level(NamedTuple):
    """Bytes at one mark: the peak since the mark before it, and those that are live now."""

    peak: int
    live: int


class Meter(Protocol):
    """Measures one step: ``start``, ``mark`` at each instant (in any thread of autograd), ``stop`` outside of backward.

    ``block_bytes``: the allocator rounds sizes up to a multiple of this. ``memory_bytes``: of the device. ``live``:
    the bytes that are live now; ``known``: the tensors that count where the allocator cannot be asked. ``is_free``:
    whether a step can be measured now. ``is_here``: whether one that has begun can be ended in this thread.
    """

    block_bytes: int
    memory_bytes: int

    def live(self, known: Iterable[Tensor]) -> int: ...  # noqa: D102
    def is_free(self) -> bool: ...  # noqa: D102
    def is_here(self) -> bool: ...  # noqa: D102
    def start(self, live: int) -> None: ...  # noqa: D102
    def mark(self) -> None: ...  # noqa: D102
    def stop(self) -> list[Level]: ...  # noqa: D102


class LedgerMeter:
    """Asks the ledger of a step on tensors without data; see ``Meter``."""

    memory_bytes = 0

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.block_bytes = ledger, ledger.block_bytes
        self._levels: list[Level] = []

    def live(self, known: Iterable[Tensor]) -> int:  # noqa: D102
        return self._ledger.live

    def is_free(self) -> bool:  # noqa: D102
        return True

    def is_here(self) -> bool:  # noqa: D102
        return True

    def start(self, live: int) -> None:  # noqa: D102
        self._levels, self._ledger.peak = [], live

    def mark(self) -> None:  # noqa: D102
        self._levels.append(Level(self._ledger.peak, self._ledger.live))
        self._ledger.peak = self._ledger.live

    def stop(self) -> list[Level]:  # noqa: D102
        return self._levels


class CudaMeter:
    """Asks the caching allocator, whose peak is reset at each mark of a measured step; see ``Meter``."""

    block_bytes = CUDA_BLOCK

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
        self._levels: list[Level] = []

    def live(self, known: Iterable[Tensor]) -> int:  # noqa: D102
        return torch.cuda.memory_allocated(self._device)

    def is_free(self) -> bool:  # noqa: D102
        return True

    def is_here(self) -> bool:  # noqa: D102
        return True

    def start(self, live: int) -> None:  # noqa: D102
        self._levels = []
        torch.cuda.reset_peak_memory_stats(self._device)

    def mark(self) -> None:  # noqa: D102
        peak = torch.cuda.max_memory_allocated(self._device)
        self._levels.append(Level(peak, torch.cuda.memory_allocated(self._device)))
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> list[Level]:  # noqa: D102
        return self._levels


class CpuMeter:
    """Has torch's profiler record each allocation; of memory at the start, that of known tensors counts.

    See ``Meter``. A thread has one profiler at most.
    """

    block_bytes = 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def __init__(self) -> None:
        self._memory: StepMemory | None = None
        self._live = 0

    def live(self, known: Iterable[Tensor]) -> int:  # noqa: D102
        parts = (part for tensor in known for part in tensor_parts(tensor) if part.device.type == "cpu")
        return sum({part.untyped_storage()._cdata: storage_bytes(part) for part in parts}.values())

    def is_free(self) -> bool:  # noqa: D102
        return not profiler_is_on()

    def is_here(self) -> bool:  # noqa: D102
        return self._memory is None or self._memory.is_here()

    def start(self, live: int) -> None:  # noqa: D102
        self._live, self._memory = live, StepMemory()

    def mark(self) -> None:  # noqa: D102
        if self._memory is not None:
            self._memory.mark()

    def stop(self) -> list[Level]:  # noqa: D102
        memory, self._memory = self._memory, None
        return [Level(self._live + peak, self._live + live) for peak, live in memory.stop()] if memory else []


def meter_of(device: torch.device) -> Meter | None:
    """Return the meter of a device, or None if there is none for its type."""
    if device.type == "cuda":
        return CudaMeter(device)
    return CpuMeter() if device.type == "cpu" else None
