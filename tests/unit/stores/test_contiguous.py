"""One buffer with slots for inputs: its memory, who holds the slots, and errors when none is free or none fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sac
from sac.errors import RegionError
from sac.full import FullConfig
from sac.stores.contiguous import ContiguousBuffer
from tests.support.cases import WIDTH, layer
from tests.support.recording import Recorder, without_collector


def slots(count: int) -> FullConfig:
    return FullConfig(store="contiguous", num_checkpoints=count)


def name() -> str:
    return "argument 0"


def numbers(value: float, count: int = 4) -> Tensor:
    return torch.full((count,), value)


# -- The memory


def test_memory_is_one_piece_made_once() -> None:
    config, model, recorder = slots(3), layer(), Recorder()
    for _ in range(4):
        with recorder:
            h = torch.randn(4, WIDTH)
            for _ in range(3):
                h = sac.checkpoint(model, h, config=config)
            h.sum().backward()
    # Three slots of 4 x 8 floats. No other op makes as much.
    assert [size for _, size in recorder._made.values() if size == 3 * 128] == [3 * 128]


def test_another_size_may_come_when_all_is_free_and_old_memory_goes_before_the_new_is_made() -> None:
    config, model = slots(2), layer()
    for rows in (4, 7, 1, 4):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        expected = torch.autograd.grad(model(model(x)).sum(), x)[0]
        out = sac.checkpoint(model, sac.checkpoint(model, x, config=config), config=config)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    buffer, recorder = ContiguousBuffer(2), Recorder()
    with without_collector(), recorder:
        for count in (100, 50):
            buffer.put(numbers(1.0, count), name)
            assert recorder.live_bytes() == 2 * 4 * count


# -- Errors lose nothing


def test_one_checkpoint_too_many() -> None:
    config, model, x = slots(2), layer(), torch.randn(4, WIDTH, requires_grad=True)
    outputs = [sac.checkpoint(model, x, config=config) for _ in range(2)]
    told = r"argument 0: no slot of the contiguous buffer is free: each of its 2 .*\n    fix: let num_checkpoints be"
    with pytest.raises(RegionError, match=told):
        sac.checkpoint(lambda *, hidden: model(hidden), hidden=x, config=config)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    for out in outputs:
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    assert torch.equal(torch.autograd.grad(sac.checkpoint(model, x, config=config).sum(), x)[0], expected)


OTHERS: dict[str, Callable[[], Tensor]] = {
    "24 elements of float32 on cpu": lambda: torch.randn(3, WIDTH),
    "32 elements of float64 on cpu": lambda: torch.randn(4, WIDTH).double(),
    "32 elements of float32 on meta": lambda: torch.empty(4, WIDTH, device="meta"),
}


@pytest.mark.parametrize("told", OTHERS)
def test_inputs_that_differ(told: str) -> None:
    config, x = slots(3), torch.randn(4, WIDTH, requires_grad=True)
    out = sac.checkpoint(torch.sin, x, config=config)
    other = OTHERS[told]().requires_grad_()
    with pytest.raises(RegionError, match=f"argument 0: it has {told}, but .* 32 elements of float32 on cpu"):
        sac.checkpoint(torch.sin, other, config=config)
    out.sum().backward()
    assert torch.equal(x.grad, x.cos())
    sac.checkpoint(torch.sin, other, config=config).sum().backward()


# -- Slots come back


def test_backward_of_before_a_reset_never_reads_what_another_region_put() -> None:
    config, x, y = slots(1), torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    before = sac.checkpoint(torch.sin, x, config=config)
    config.reset()
    after = sac.checkpoint(torch.sin, y, config=config)
    before.sum().backward()
    after.sum().backward()
    assert torch.equal(x.grad, x.cos())
    assert torch.equal(y.grad, y.cos())


def test_retained_graph_keeps_its_slot() -> None:
    config, x = slots(1), torch.randn(4, requires_grad=True)
    with without_collector():
        out = sac.checkpoint(torch.sin, x, config=config).sum()
        out.backward(retain_graph=True)
        with pytest.raises(RegionError, match="each of its 1"):
            sac.checkpoint(torch.sin, x, config=config)
        out.backward()
        sac.checkpoint(torch.sin, x, config=config).sum().backward()
    assert torch.equal(x.grad, x.cos() + x.cos() + x.cos())
