"""Live bytes of a device at the marks of a step, and the peak between them, as its allocator counts them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

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


class Meter(ABC):
    """Measures one step: ``start``, ``mark`` at each instant (in any thread of autograd), ``stop`` outside of backward.

    ``block_bytes``: the allocator rounds sizes up to a multiple of this. ``memory_bytes``: of the device.
    """

    block_bytes = 1
    memory_bytes = 0
    _levels: list[Level]

    @abstractmethod
    def live(self, known: Iterable[Tensor]) -> int:
        """Return the bytes that are live now; ``known``: the tensors that count where the allocator cannot be asked."""

    @abstractmethod
    def _level(self) -> Level:
        """Return the level at this instant, and begin to look for the next peak."""

    def is_free(self) -> bool:
        """Return whether a step can be measured now."""
        return True

    def is_here(self) -> bool:
        """Return whether a step that has begun can be ended in this thread."""
        return True

    def start(self, live: int) -> None:
        """Begin a step, with ``live`` bytes."""
        self._level()
        self._levels = []

    def mark(self) -> None:
        """Mark the present instant."""
        self._levels.append(self._level())

    def stop(self) -> list[Level]:
        """End the step, and return the level at each mark."""
        return self._levels


class LedgerMeter(Meter):
    """Asks the ledger of a step on tensors without data."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.block_bytes = ledger, ledger.block_bytes

    def live(self, known: Iterable[Tensor]) -> int:
        """See ``Meter``."""
        return self._ledger.live

    def _level(self) -> Level:
        level = Level(self._ledger.peak, self._ledger.live)
        self._ledger.peak = self._ledger.live
        return level


class CudaMeter(Meter):
    """Asks the caching allocator, whose peak is reset at each mark of a measured step."""

    block_bytes = CUDA_BLOCK

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)

    def live(self, known: Iterable[Tensor]) -> int:
        """See ``Meter``."""
        return torch.cuda.memory_allocated(self._device)

    def _level(self) -> Level:
        level = Level(torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        return level


class CpuMeter(Meter):
    """Has torch's profiler record each allocation. Memory that is not of a known tensor at the start does not count."""

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def __init__(self) -> None:
        self._memory: StepMemory | None = None
        self._live = 0

    def live(self, known: Iterable[Tensor]) -> int:
        """See ``Meter``."""
        parts = (part for tensor in known for part in tensor_parts(tensor) if part.device.type == "cpu")
        return sum({part.untyped_storage()._cdata: storage_bytes(part) for part in parts}.values())

    def is_free(self) -> bool:
        """See ``Meter``. A thread has one profiler at most."""
        return not profiler_is_on()

    def is_here(self) -> bool:
        """See ``Meter``."""
        return self._memory is None or self._memory.is_here()

    def start(self, live: int) -> None:
        """See ``Meter``."""
        self._live, self._memory = live, StepMemory()

    def mark(self) -> None:
        """See ``Meter``."""
        if self._memory is not None:
            self._memory.mark()

    def stop(self) -> list[Level]:
        """See ``Meter``."""
        memory, self._memory = self._memory, None
        return [Level(self._live + peak, self._live + live) for peak, live in memory.stop()] if memory else []

    def _level(self) -> Level:
        raise NotImplementedError  # known at the end only


def meter_of(device: torch.device) -> Meter | None:
    """Return the meter of a device, or None if there is none for its type."""
    if device.type == "cuda":
        return CudaMeter(device)
    return CpuMeter() if device.type == "cpu" else None
