"""What happens where regions begin and end under DeepSpeed's `synchronize` and `profile`."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import sac.compat.deepspeed as checkpointing
from sac.compat import deepspeed as deepspeed_profile
from tests.support.runs import Noted
from tests.unit.compat.programs import WIDTH

WAITS = Noted()  # what the region can reach is put back before it runs again

pytestmark = pytest.mark.usefixtures("nothing_is_configured")


@pytest.fixture(name="waits")
def _waits(monkeypatch) -> Noted:
    """Records each wait for the device."""
    WAITS.clear()
    monkeypatch.setattr(deepspeed_profile, "synchronize_device", partial(WAITS.append, "wait"))
    return WAITS


def region(x: Tensor) -> Tensor:
    """Tells when it runs, and when its backward does."""
    WAITS.append("run")
    out = x.sin().exp()
    if out.requires_grad:
        out.register_hook(lambda grad: WAITS.append("backward"))
    return out.cos()


def test_the_device_is_waited_for_at_each_boundary(call, waits):
    checkpointing.configure(None, synchronize=True)
    x = torch.randn(4, requires_grad=True)
    h = x * 1
    h.register_hook(lambda grad: waits.append("before"))
    out = call(region, h) * 2
    assert waits == ["wait", "run", "wait"]
    out.register_hook(lambda grad: waits.append("after"))
    waits.clear()
    out.sum().backward()
    assert waits[:2] == ["after", "wait"]
    assert waits.count("wait") == 2
    assert waits[-2:] in (["wait", "before"], ["before", "wait"])  # both happen when the gradient has arrived at h
    assert waits.index("run") > 1


def measured(monkeypatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(deepspeed_profile.time, "perf_counter", lambda: next(ticks) / 1000)
    checkpointing.configure(None, profile=True)
    x = torch.randn(4, WIDTH, requires_grad=True)
    linear, norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    for _ in range(3):
        checkpointing.checkpoint(linear, checkpointing.non_reentrant_checkpoint(norm, x))
    checkpointing.checkpoint(linear, x).sum().backward()


def test_the_table(monkeypatch):
    measured(monkeypatch)
    assert checkpointing.profile_table() == (
        "  region      forwards   ms per forward   backwards   ms per backward\n"
        " ────────────────────────────────────────────────────────────────────\n"
        "  LayerNorm          3            1.000           0             0.000\n"
        "  Linear             4            1.000           1             1.000"
    )
    checkpointing.configure(None)
    assert "ms per backward" in checkpointing.profile_table()


def test_hooks_do_not_pile_up_on_a_leaf(call):
    """A leaf outlives the graphs of all steps: what measures a region goes with the region's graph."""
    checkpointing.configure(None, profile=True)
    x = torch.randn(4, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for step in range(4):
            out = call(torch.sin, x)
            if step % 2:
                out.sum().backward()
            del out
            assert not x._backward_hooks
    finally:
        gc.enable()
