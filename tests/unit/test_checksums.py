"""The checksum by which a replayed value is compared with that of the forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sac import checksums as module
from sac.checksums import Sums, checksum, find_different
from sac.memory_timeline import measure_memory

SIZES = (1, 7, 64, 5_000, 40_000, 300_001)  # up to a CRC of the whole, and past it
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.complex128)


def same(left: Sums, right: Sums) -> bool:
    return not find_different([(left, right)])


def values(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    return x > 0 if dtype is torch.bool else (10 * x).to(dtype)


@pytest.fixture(params=["cpu", "like a device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sums that another device has are formed on the CPU too."""
    if request.param != "cpu":
        monkeypatch.setattr(module, "_SMALL_BYTES", -1)
        monkeypatch.setattr(module, "_crc", lambda part, size: hash(part.view(torch.uint8).numpy().tobytes()))
    return str(request.param)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit": lambda x: _with(x, x.numel() // 2, lambda bits: bits ^ 1),
    "the sign of one": lambda x: _with(x, x.numel() // 3, lambda bits: bits ^ -(1 << 31)),
    "all signs": lambda x: -x,
    "the signs of every second": lambda x: x * torch.tensor([1.0, -1.0]).repeat(x.numel() // 2 + 1)[: x.numel()],
    "two change places": lambda x: x[[1, 0, *range(2, x.numel())]],
    "turned by a power of two": lambda x: x.roll(1 << (x.numel().bit_length() // 2)),
    "reversed": lambda x: x.flip(0),
    "sorted": lambda x: x.sort().values,
    "the last one": lambda x: _with(x, x.numel() - 1, lambda bits: bits + 1),
}


def _with(x: Tensor, place: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    bits = x.view(torch.int32).clone()
    bits[place] = change(bits[place])
    return bits.view(x.dtype)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("size", SIZES[1:])
def test_a_change_is_seen(size: int, name: str, way: str) -> None:
    x = values(size)
    assert not torch.equal(x.view(torch.int32), CHANGES[name](x).view(torch.int32))
    assert not same(checksum(x), checksum(CHANGES[name](x)))


@pytest.mark.parametrize("constant", [1.0, -0.0, 3.0, torch.inf, torch.nan])
def test_zeros_that_become_one_constant_are_seen(constant: float, way: str) -> None:
    for size in (64, 1 << 16, 1021 * 4, 1 << 20):
        assert not same(checksum(torch.zeros(size)), checksum(torch.full((size,), constant)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_equal_bits_have_equal_checksums(size: int, dtype: torch.dtype) -> None:
    x = values(size, dtype)
    assert same(checksum(x), checksum(x.clone()))
    other = x.clone()
    other[-1] = ~other[-1] if dtype is torch.bool else other[-1] + 100
    assert not same(checksum(x), checksum(other))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "columns": lambda x: x[:, 1:-1],
    "from the second value": lambda x: x.view(-1)[1:],
    "expanded": lambda x: x[:1].expand(3, -1),
    "every second": lambda x: x[::2, ::2],
}


@pytest.mark.parametrize("rows", [8, 700])
@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str, rows: int) -> None:
    x = values(rows * rows).view(rows, rows)
    view = VIEWS[name](x)
    assert same(checksum(view), checksum(VIEWS[name](x.clone())))
    assert same(checksum(view, in_order=True), checksum(view.contiguous(), in_order=True))
    changed = x.clone()
    changed[0, 2] += 1
    assert same(checksum(view), checksum(VIEWS[name](changed))) == torch.equal(view, VIEWS[name](changed))


def test_of_a_large_tensor_nothing_is_allocated_but_the_sums() -> None:
    x = values(1 << 20).view(1 << 10, 1 << 10)
    assert measure_memory(lambda: checksum(x)).peak_bytes < 64 * 1024
    assert measure_memory(lambda: checksum(x.t())).peak_bytes < 64 * 1024
