"""What the allocator of a GPU says at the marks of a step; that of the CPU is tested by all tests of budgets."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import torch

from sac.memory_timeline import meter_of


class Allocator:
    """The counters of torch's caching allocator."""

    def __init__(self) -> None:
        self.live = self.peak = 1000

    def change(self, count: int) -> None:
        self.live += count
        self.peak = max(self.peak, self.live)

    def reset(self, device: torch.device) -> None:
        self.peak = self.live


def test_levels_of_a_gpu() -> None:
    allocator, device = Allocator(), torch.device("cuda", 0)
    with patch.multiple(
        torch.cuda,
        memory_allocated=lambda one: allocator.live,
        max_memory_allocated=lambda one: allocator.peak,
        reset_peak_memory_stats=allocator.reset,
        get_device_properties=lambda one: SimpleNamespace(total_memory=80),
    ):
        meter = meter_of(device)
        assert meter is not None
        allocator.change(500)
        allocator.change(-500)  # before the step
        meter.start(meter.live([]))
        for change in (24, -8, 100, -100):
            allocator.change(change)
            if change < 0:
                meter.mark()
        assert meter.stop() == [(1024, 1016), (1116, 1016)]
        assert meter.memory_bytes == 80
        assert meter.block_bytes == 512


def test_levels_of_the_cpu() -> None:
    meter = meter_of(torch.device("cpu"))
    assert meter is not None
    known = torch.empty(256)
    live = meter.live([known, known.view(16, 16), known[:3]])
    assert live == 1024
    meter.start(live)
    assert not meter.is_free()
    held = torch.empty(100)
    del held
    meter.mark()
    held = torch.empty(25)
    meter.mark()
    assert meter.stop() == [(1424, 1024), (1124, 1124)]
    assert held.numel()
    assert meter.is_free()


def test_other_devices_have_no_meter() -> None:
    assert meter_of(torch.device("meta")) is None
