"""How long a step has waited for copies is what the device says, and is asked for by reports alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.stores import stalls, transfers
from sac.stores.transfers import TransferLimits
from tests.support.blocks import ENGINES, FULL, llama_stack, policy, selective, tokens
from tests.support.simulated_streams import Simulation, simulated_streams
from tests.support.training import built

OFFLOADS = policy({"ops": "matmul", "do": "offload"})
SPEED = float(1 << 20)  # bytes per second


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    monkeypatch.setattr(transfers, "LIMITS", TransferLimits(smallest=1, in_flight=0, ahead=0))
    with simulated_streams(monkeypatch) as simulation:
        simulation.bytes_per_second = SPEED
        yield simulation
    assert simulation.races == []


def stepped(value: Any, device: Simulation | None = None) -> nn.Module:
    """A model after a step, whose regions have been busy for a while in between."""
    model = sac.apply(built(lambda: llama_stack(3)), value)
    for block in model.blocks if device is not None else ():
        block.register_forward_hook(lambda *_: device.work(0.01))
    model(*tokens()).square().sum().backward()
    return model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("windows", [{}, {"in_flight": 20000, "ahead": 20000}], ids=["at once", "windows"])
@pytest.mark.parametrize("inputs", [False, True], ids=["", "inputs"])
def test_the_report_has_all_waits(device, engine, windows, inputs):
    value = selective({**OFFLOADS, "offload": {"min_bytes": 1, "inputs": inputs, **windows}}, engine=engine)
    model = stepped(value, device)
    waited = device.stalls["main"] * 1e3
    assert waited > 0
    assert sac.report(model).stall_ms == pytest.approx(waited)
    assert sac.report(model).scalars()["sac/stall_ms"] == pytest.approx(waited)


def test_inputs_alone(device):
    model = stepped({**FULL, "store": "host"}, device)
    assert sac.report(model).stall_ms == pytest.approx(device.stalls["main"] * 1e3)


def test_only_a_report_waits_for_the_device(device):
    model = stepped(selective({**OFFLOADS, "offload": {"inputs": True}}))
    assert "the host waits" not in device.log
    sac.report(model)
    assert "the host waits" in device.log


def test_report_and_trace_say_it(device):
    told = str(sac.report(stepped(selective(OFFLOADS))))
    each = 16384 / SPEED * 1e3
    assert (
        f"  offloaded by rule rule-0: 16.0 KiB to host memory\n  waits for copies, per region: {2 * each:.2f} ms"
        in told
    )
    found = sac.trace(built(llama_stack), tokens(), selective(OFFLOADS))
    assert (
        f"\n  offloaded by rule rule-0: 16.0 KiB to host memory\n  waits for copies, per region: {2 * each:.2f} ms"
        in (str(found))
    )
    assert [one["stall_ms"] for of in found.to_dict()["offloaded"].values() for one in of] == [pytest.approx(2 * each)]


def test_a_device_without_times_says_nothing_of_stalls():
    model = stepped(selective(OFFLOADS))
    assert sac.report(model).stall_ms is None
    assert "waits for copies" not in str(sac.report(model))
    found = sac.trace(built(llama_stack), tokens(), selective(OFFLOADS))
    assert "\n  offloaded by rule rule-0: 16.0 KiB held on the device: device memory is host memory" in str(found)


def test_copies_of_a_model_know_no_waits(device):
    model = stepped(selective(OFFLOADS))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert sac.report(again).stall_ms is None


def test_many_backward_passes_leave_no_more_events(device, monkeypatch):
    monkeypatch.setattr(stalls, "_MOST", 4)
    model = sac.apply(built(llama_stack), selective(OFFLOADS))
    loss = model(*tokens()).square().sum()
    for _ in range(6):
        loss.backward(retain_graph=True)
    assert all(len(one.region.stats.stalls._timed) <= 4 for one in regions_of(model))
    assert sac.report(model).stall_ms > 0


@pytest.mark.gpu
def test_on_a_gpu():
    build = lambda: llama_stack(3).cuda()  # noqa: E731
    model = sac.apply(built(build), selective({**OFFLOADS, "offload": {"min_bytes": 1, "in_flight": 0}}))
    inputs = [one.cuda() for one in tokens()]
    for mode in ("default", "error"):  # a first step pins memory
        torch.cuda.set_sync_debug_mode(mode)
        try:
            model(*inputs).square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    report = sac.report(model)
    assert report.offloaded_bytes > 0
    assert report.stall_ms is not None
    assert report.stall_ms >= 0
