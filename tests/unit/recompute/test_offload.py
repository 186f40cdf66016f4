"""`do: offload`: a saved value that waits on the host is a saved value; on a simulated device with late copies."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import sac
from sac.blocks.install import regions_of
from sac.errors import RegionError, SacWarning
from sac.stores import transfers
from sac.stores.transfers import TransferLimits
from tests.support.blocks import ENGINES, FULL, FunctionBlock, Stack, llama_stack, policy, save, selective, tokens
from tests.support.oracle import train_program
from tests.support.pairs import in_pairs
from tests.support.programs import CATALOGUE
from tests.support.recording import without_collector
from tests.support.simulated_streams import Simulation, is_idle, simulated_streams
from tests.support.training import (
    assert_same,
    assert_same_training,
    built,
    gradient_penalty,
    inputs_then_weights,
    plain_backward,
    train,
)
from tests.support.ways import Way

AT_ONCE = TransferLimits(smallest=1, in_flight=0, ahead=1 << 20)  # everything leaves the device
SPARED = TransferLimits(smallest=1, in_flight=4096, ahead=4096)
PRODUCTS_BYTES = 16384  # of the products in a block


def offload(ops: str, **matchers: Any) -> dict[str, Any]:
    return {"ops": ops, **matchers, "do": "offload", "optional": True}


MODULES = {"module": "{mlp,up}", "do": "offload", "optional": True}
POLICIES: dict[str, dict[str, Any]] = {
    "products": policy(offload("matmul")),
    "every op": policy(offload("*")),
    "by default": policy(default="offload"),
    "products, attention saved": policy(save("attention", optional=True), offload("matmul")),
    "every second product": policy(offload("matmul", call={"every": 2})),
    "whole modules": policy(MODULES),
    "whole modules and products": policy(MODULES, offload("matmul")),
    "whole blocks": policy({"module": "", "do": "offload"}),
}
PRODUCTS = selective(POLICIES["products"])
ON_EACH_ENGINE = pytest.mark.parametrize("engine", ENGINES)
PROGRAMS = [
    "llama_block",
    "activation_in_place",
    "view_then_write_to_the_base",
    "small_view_of_a_large_product",
    "mixture_of_experts",
]
# Attention has no double backward on the CPU.
BACKWARDS = {"once": plain_backward, "inputs, then weights": inputs_then_weights, "twice": gradient_penalty}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    monkeypatch.setattr(transfers, "LIMITS", AT_ONCE)
    with simulated_streams(monkeypatch) as simulation:
        yield simulation
    assert simulation.races == []


@in_pairs(
    name=[name for name in POLICIES if name not in ("products", "whole modules")],  # parts of others
    engine=ENGINES,
    program=PROGRAMS,
    backward=BACKWARDS.keys(),
    spares=(False, True),
    unless=lambda name, engine, program, backward, spares: (program, backward) == ("llama_block", "twice"),
)
def test_same_training(monkeypatch, name, engine, program, backward, spares):
    monkeypatch.setattr(transfers, "LIMITS", SPARED if spares else AT_ONCE)
    way = Way("offload", lambda model, _: sac.apply(model, selective(POLICIES[name], engine=engine)))
    expected = train_program(CATALOGUE[program], backward=BACKWARDS[backward])
    with simulated_streams(monkeypatch) as simulation:
        assert_same(expected, train_program(CATALOGUE[program], way, backward=BACKWARDS[backward]))
    assert simulation.races == []


@ON_EACH_ENGINE
def test_calls_on_other_streams(device, engine):
    """Streams are asked for in each call: forward and backward of each step run on another one."""
    plain, ours = built(llama_stack), sac.apply(built(llama_stack), {**PRODUCTS, "engine": engine})
    main, other = device.current_stream(), device.stream_named("other")
    for step in range(3):
        (x,) = tokens()
        plain(x).square().sum().backward()
        other.wait_stream(main)
        with device.stream(other if step % 2 else main):
            ours(x).square().sum().backward()
        main.wait_stream(other)
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


# -- What is sent, and what stays


def figures(model: nn.Module) -> list[tuple[int, dict[str, int]]]:
    """Of the first rule, for each region: bytes on the host, and bytes held by reason."""
    found = [one.region.stats.offloads[0] for one in regions_of(model)]
    return [(one.host_bytes, one.held_bytes) for one in found]


def kept_on_device(device: Simulation, value: Any) -> int:
    model = sac.apply(built(llama_stack), value)
    (x,) = tokens()
    for _ in range(2):
        gc.collect()  # what earlier tests have left behind must not be freed in between
        device.free_dead()
        before = device.device_bytes
        out = model(x)
        device.free_dead()
        held = device.device_bytes - before
        out.sum().backward()
        model.zero_grad()
        del out
    return held


@ON_EACH_ENGINE
def test_device_holds_no_more_than_with_recomputation(device, engine):
    values = (policy(), POLICIES["products"], policy(save("matmul")))
    nothing, sent, saved = (kept_on_device(device, selective(one, engine=engine)) for one in values)
    assert nothing == sent < saved


@ON_EACH_ENGINE
@pytest.mark.parametrize("name", ["every op", "whole modules"])
def test_nothing_is_left_when_graphs_are_gone(device, engine, name):
    model = sac.apply(built(llama_stack), selective(POLICIES[name], engine=engine))
    with without_collector():
        for step in range(4):
            out = model(*tokens())
            if step != 1:  # a graph that is dropped without a backward
                out.sum().backward(inputs=[*model.parameters()][:1] if step == 2 else None)
            del out
            for one in regions_of(model):
                assert all(of is None or is_idle(of) for of in one.applied.settings.transfers._of.values())


def keeps_its_product(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    block.kept = h.detach()
    return h.sin() @ block.b


@ON_EACH_ENGINE
def test_what_others_hold_stays(device, engine):
    model = sac.apply(built(lambda: Stack(FunctionBlock(keeps_its_product))), {**PRODUCTS, "engine": engine})
    model(torch.randn(8, 8)).sum().backward()
    assert figures(model) == [(0, {"held elsewhere too": 256})]


@ON_EACH_ENGINE
def test_hooks_around_the_region_decide(device, engine):
    value = {**PRODUCTS, "engine": engine}
    assert_same_training(llama_stack, value, around_forward=save_on_cpu)
    model = sac.apply(built(llama_stack), value)
    with save_on_cpu():
        out = model(*tokens())
    assert {reason for _, held in figures(model) for reason in held} == {"hooks around the region decide"}
    del out


@ON_EACH_ENGINE
def test_a_host_without_room_is_told_of_once(device, engine):
    model = sac.apply(built(llama_stack), {**PRODUCTS, "engine": engine, "host_memory": "8KiB"})
    with pytest.warns(SacWarning, match="of the 8.0 KiB that this process may pin, .* are in use") as told:
        ours = train(model, steps=2)
    assert len(told) == 1
    assert_same(train(built(llama_stack), steps=2), ours)
    held = [held for _, held in figures(model)]
    assert sum(one.get("no room on the host", 0) for one in held) >= 2 * PRODUCTS_BYTES - 8192


def test_memory_that_cannot_be_pinned_counts_as_full(device, monkeypatch):
    def refuse(size: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(transfers, "pinned_memory", refuse)
    model = sac.apply(built(llama_stack), PRODUCTS)
    with pytest.warns(SacWarning, match="may pin, 0 B are in use: CUDA error: out of memory\n"):
        model(*tokens()).sum().backward()
    assert figures(model) == [(0, {"no room on the host": PRODUCTS_BYTES})] * 2


@pytest.mark.parametrize("value", [PRODUCTS, {**FULL, "store": "host"}], ids=["offload", "host"])
def test_graph_capture_is_refused(device, value):
    model = sac.apply(built(llama_stack), value)
    device.is_capturing = True
    with pytest.raises(RegionError, match=r"offloading cannot be captured in a CUDA graph: .*\n    fix: capture no"):
        model(*tokens())


def test_report_of_what_is_on_the_host(device):
    model = sac.apply(built(llama_stack), PRODUCTS)
    model(*tokens()).sum().backward()
    report = sac.report(model)
    assert report.to_dict()["offloaded_bytes"] == report.scalars()["sac/offloaded_bytes"] == 2 * PRODUCTS_BYTES
    assert report.kinds[0].saved_bytes == 0
    told = str(report)
    assert "keeps 2.0 KiB per region (0 B saved, 2.0 KiB of inputs; 16.0 KiB offloaded to host memory)" in told
    assert "  offloaded by rule rule-0: 16.0 KiB to host memory" in told
