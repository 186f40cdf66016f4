"""The timeline is held against allocations whose sizes are known beforehand."""

import pytest
import torch

from sac.errors import SacError
from sac.memory_timeline import mark, measure_memory

KIB = 1024


def block(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_peak_and_end_are_those_of_known_allocations():
    def work() -> torch.Tensor:
        first = block(300)
        second = block(500)
        del first
        third = block(100)
        del second
        return third

    timeline = measure_memory(work)
    assert timeline.peak_bytes == 800 * KIB
    assert timeline.end_bytes == 100 * KIB
    assert timeline.live_bytes == tuple(kib * KIB for kib in (0, 300, 800, 500, 600, 100, 100))
    assert list(timeline.times_ms) == sorted(timeline.times_ms)
    assert (timeline.times_ms[0], len(timeline.times_ms)) == (0.0, len(timeline.live_bytes))


def test_marks_give_the_live_bytes_at_a_named_instant():
    def work() -> None:
        first = block(64)
        mark("first")
        second = block(32)
        mark("both")
        del first
        mark("first")
        del second

    timeline = measure_memory(work)
    assert timeline.at("both") == 96 * KIB
    assert [live for _, live in timeline.marks["first"]] == [64 * KIB, 32 * KIB]
    assert timeline.at("first") == 32 * KIB
    assert timeline.end_bytes == 0


def test_freeing_what_was_there_before_does_not_count():
    kept = [block(128)]
    timeline = measure_memory(kept.clear)
    assert (timeline.peak_bytes, timeline.end_bytes) == (0, 0)
    measure_memory(lambda: kept.append(block(256)))  # an earlier measurement has seen this one
    timeline = measure_memory(lambda: (kept.clear(), kept.append(block(64))))
    assert (timeline.peak_bytes, timeline.end_bytes) == (64 * KIB, 64 * KIB)


def test_other_devices_are_refused():
    with pytest.raises(SacError, match="memory cannot be measured on 'meta'"):
        measure_memory(lambda: None, "meta")


@pytest.mark.gpu
def test_cuda_peak_is_that_of_the_allocator():
    def work() -> torch.Tensor:
        first = torch.empty(8 * KIB * KIB, dtype=torch.uint8, device="cuda")
        second = torch.empty(4 * KIB * KIB, dtype=torch.uint8, device="cuda")
        mark("both")
        del first
        return second

    timeline = measure_memory(work, "cuda")
    assert timeline.peak_bytes == timeline.at("both") == 12 * KIB * KIB
    assert timeline.end_bytes == 4 * KIB * KIB
