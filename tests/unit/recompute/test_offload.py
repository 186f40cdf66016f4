"""`do: offload`: a saved value that waits on the host is a saved value; on a simulated device with late copies."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import sac
from sac.blocks.install import regions_of
from sac.engine.settings import Settings
from sac.errors import RegionError, SacWarning
from sac.full import FullConfig
from sac.stores import transfers
from sac.stores.transfers import TransferLimits
from tests.support.blocks import (
    ENGINES,
    FULL,
    FunctionBlock,
    Stack,
    llama_stack,
    policy,
    save,
    selective,
    square,
    tokens,
    with_dropout,
)
from tests.support.defects import DEFECTS
from tests.support.pairs import in_pairs
from tests.support.recording import without_collector
from tests.support.simulated_streams import Simulation, simulated_streams
from tests.support.simulated_streams import is_idle as has_nothing
from tests.support.training import (
    assert_same_training,
    built,
    gradient_penalty,
    inputs_then_weights,
    plain_backward,
)

AT_ONCE = TransferLimits(smallest=1, in_flight=0, ahead=1 << 20)  # everything leaves the device
SPARED = TransferLimits(smallest=1, in_flight=4096, ahead=4096)


def offload(ops: str | list[str], **matchers: Any) -> dict[str, Any]:
    return {"ops": ops, **matchers, "do": "offload"}


POLICIES: dict[str, dict[str, Any]] = {
    "products": policy(offload("matmul")),
    "every op": policy(offload("*")),
    "by default": policy(default="offload"),
    "products, attention saved": policy(save("attention"), offload("matmul")),
    "every second product": policy(offload("matmul", call={"every": 2}, optional=True)),
    "whole modules": policy({"module": "{mlp,inner}", "do": "offload", "optional": True}),
    "whole modules and products": policy(
        {"module": "{mlp,inner}", "do": "offload", "optional": True}, offload("matmul", optional=True)
    ),
    "whole blocks": policy({"module": "", "do": "offload"}),
}


def in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h.add_(1).relu_()
    return (h[:2].sin().sum() * h) @ block.b


def views(block: FunctionBlock, x: Tensor) -> Tensor:
    """A view with an offset, a transposed one, a broadcast one, and both of two halves."""
    h = x @ block.a
    left, right = h.chunk(2)
    mixed = torch.cat([left * right, left.t().reshape_as(left).sin() * right[0].expand_as(left).exp()])
    return mixed @ block.b


def routed(block: FunctionBlock, x: Tensor) -> Tensor:
    values, which = (x @ block.a).topk(3)
    return (values.softmax(-1) @ x[which[0]]) @ block.b


def nested(around: Callable[..., Tensor], block: FunctionBlock, x: Tensor) -> Tensor:
    """A region inside, of sac or torch, whose gradients are those of its function."""
    h = around(lambda h: ((h @ block.a).sin() @ block.b).tanh(), x @ block.a)
    return (h.sin() @ block.b).cos() @ block.a


def stack_of(run: Callable[..., Tensor]) -> nn.Module:
    return Stack(FunctionBlock(run), FunctionBlock(run))


NESTED: dict[str, Callable[..., Tensor]] = {
    "nested, sac": partial(nested, sac.checkpoint),
    "nested, sac, on the host": partial(nested, partial(sac.checkpoint, config=FullConfig(store="host"))),
    "nested, torch": partial(nested, partial(checkpoint, use_reentrant=False)),
}
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, ...]]]] = {
    "llama": (lambda: with_dropout(llama_stack(), attention=0.2), tokens),
    "in place and a view": (lambda: Stack(FunctionBlock(in_place)), square),
    "views": (lambda: Stack(FunctionBlock(views), FunctionBlock(views)), square),
    "routed": (lambda: Stack(FunctionBlock(routed), FunctionBlock(routed)), square),
    **{name: (partial(stack_of, run), square) for name, run in NESTED.items()},
    **{defect.id: (defect.build, square) for defect in DEFECTS},
}
BACKWARDS = {"once": plain_backward, "inputs, then weights": inputs_then_weights, "twice": gradient_penalty}
DEFECT_IDS = {defect.id for defect in DEFECTS}


def does_not_use_all_weights(name: str, engine: str, program: str, backward: str, spares: bool) -> bool:
    return program in DEFECT_IDS and backward == "inputs, then weights"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    monkeypatch.setattr(transfers, "LIMITS", AT_ONCE)
    with simulated_streams(monkeypatch) as simulation:
        yield simulation
    assert simulation.races == []


def is_idle(model: nn.Module) -> bool:
    """Whether nothing of the model waits on the host or is on its way."""
    gc.collect()
    found = {id(one.applied.settings.transfers): one.applied.settings.transfers for one in regions_of(model)}
    return all(one is None or has_nothing(one) for of in found.values() for one in of._of.values())


def figures(model: nn.Module) -> list[tuple[int, int, dict[str, int]]]:
    """Of the first rule, for each region: bytes on the host, bytes spared, and bytes held by reason."""
    found = [one.region.stats.offloads[0] for one in regions_of(model)]
    return [(one.host_bytes, one.spared_bytes, one.held_bytes) for one in found]


# The same gradients


@in_pairs(
    name=POLICIES.keys(),
    engine=ENGINES,
    program=PROGRAMS.keys(),
    backward=BACKWARDS.keys(),
    spares=(False, True),
    unless=does_not_use_all_weights,
)
def test_same_training(monkeypatch, name, engine, program, backward, spares):
    build, make_input = PROGRAMS[program]
    monkeypatch.setattr(transfers, "LIMITS", SPARED if spares else AT_ONCE)
    value = selective(POLICIES[name], engine=engine)
    with simulated_streams(monkeypatch) as simulation:
        assert_same_training(build, value, make_input=make_input, backward=BACKWARDS[backward])
    assert simulation.races == []


@pytest.mark.parametrize("name", ["products", "whole modules", "whole blocks"])
def test_inputs_on_the_host_as_well(device, name):
    assert_same_training(llama_stack, selective(POLICIES[name], store="host", keep="all"), steps=2)


@pytest.mark.parametrize("engine", ENGINES)
def test_several_micro_batches_in_flight(device, engine):
    plain, ours = built(llama_stack), built(llama_stack)
    sac.apply(ours, selective(POLICIES["products"], engine=engine))
    for model in (plain, ours):
        torch.manual_seed(5)
        outs = [model(*tokens()) for _ in range(3)]
        for out in (outs[1], outs[0], outs[2]):
            out.square().sum().backward()
        del out, outs
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert is_idle(ours)


@pytest.mark.parametrize("engine", ENGINES)
def test_calls_on_other_streams(device, engine):
    """Streams are asked for in each call: forward and backward of each step run on another one."""
    plain, ours = built(llama_stack), built(llama_stack)
    sac.apply(ours, selective(POLICIES["products"], engine=engine))
    main, other = device.current_stream(), device.stream_named("other")
    for step in range(3):
        (x,) = tokens()
        plain(x).square().sum().backward()
        stream = other if step % 2 else main
        other.wait_stream(main)
        with device.stream(stream):
            ours(x).square().sum().backward()
        main.wait_stream(other)
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


# What is sent, and what stays


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


@pytest.mark.parametrize("engine", ENGINES)
def test_device_holds_no_more_than_with_recomputation(device, engine):
    nothing = kept_on_device(device, selective(policy(), engine=engine))
    saved = kept_on_device(device, selective(policy(save("matmul")), engine=engine))
    sent = kept_on_device(device, selective(POLICIES["products"], engine=engine))
    assert nothing == sent < saved


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["products", "every op", "whole modules", "whole blocks"])
def test_nothing_is_left_when_graphs_are_gone(device, engine, name):
    model = sac.apply(built(llama_stack), selective(POLICIES[name], engine=engine))
    with without_collector():
        for step in range(4):
            out = model(*tokens())
            if step != 1:  # a graph that is dropped without a backward
                out.sum().backward(inputs=[*model.parameters()][:1] if step == 2 else None)
            del out
            for one in regions_of(model):
                assert all(of is None or has_nothing(of) for of in one.applied.settings.transfers._of.values())


def test_forward_without_grad_sends_nothing(device):
    model = sac.apply(built(llama_stack), selective(POLICIES["products"]))
    with torch.no_grad():
        model(*tokens())
    assert not [line for line in device.log if line.endswith("copies")]


class Keeping(nn.Module):
    """Keeps a value that a rule offloads, and changes it before backward if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.weight
        self.kept = h.detach()
        return h.sin() @ self.weight


@pytest.mark.parametrize("engine", ENGINES)
def test_what_others_hold_stays(device, engine):
    model = sac.apply(built(lambda: Stack(Keeping())), selective(POLICIES["products"], engine=engine))
    out = model(*square())
    assert figures(model) == [(0, 0, {"held elsewhere too": 256})]
    out.sum().backward()
    assert model.blocks[0].kept is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_result_of_the_region_stays(device, engine):
    model = sac.apply(
        built(lambda: Stack(FunctionBlock(lambda block, x: (x @ block.a).sin() @ block.b))),
        selective(policy(offload("*")), engine=engine),
    )
    out = model(*square())
    assert figures(model)[0][0] == 2 * 256  # the first product and its sine
    out.square().sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("store", ["host", "contiguous+host"])
def test_inputs_on_the_host_next_to_rules_that_offload(device, engine, store):
    slots = {"num_checkpoints": 2} if "contiguous" in store else {}
    value = selective(POLICIES["products"], engine=engine, store=store, **slots)
    assert_same_training(llama_stack, value, make_input=tokens)
    model = sac.apply(built(llama_stack), value)
    model(*tokens())
    assert [kind.input_host_bytes for kind in sac.report(model).kinds] == [2048]
    assert len({id(one.applied.settings.transfers) for one in regions_of(model)}) == 1


def test_small_storages_stay(device, monkeypatch):
    monkeypatch.setattr(transfers, "LIMITS", TransferLimits(smallest=4096, in_flight=0))
    model = sac.apply(built(llama_stack), selective(POLICIES["products"]))
    model(*tokens())
    for moved, _, held in figures(model):
        assert moved + sum(held.values()) == 16384
        assert moved == 2 * 4096 or held == {"small": 16384 - moved}


@pytest.mark.parametrize("engine", ENGINES)
def test_last_regions_are_spared(device, monkeypatch, engine):
    monkeypatch.setattr(transfers, "LIMITS", TransferLimits(smallest=1, in_flight=20000))
    model = sac.apply(built(lambda: llama_stack(3)), selective(POLICIES["products"], engine=engine))
    model(*tokens()).sum().backward()
    assert figures(model)[-1][:2] == (16384, 16384)
    assert figures(model)[0][1] == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_around_the_region_decide(device, engine):
    def around(model: nn.Module) -> None:
        with save_on_cpu():
            out = model(*tokens())
        out.sum().backward()

    plain, ours = built(llama_stack), built(llama_stack)
    sac.apply(ours, selective(POLICIES["products"], engine=engine))
    for model in (plain, ours):
        torch.manual_seed(2)
        around(model)
    assert {reason for _, _, held in figures(ours) for reason in held} == {"hooks around the region decide"}
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_host_without_room(device, monkeypatch, engine):
    monkeypatch.setattr(transfers, "LIMITS", TransferLimits(smallest=1, in_flight=0, host=8192))
    value = selective(POLICIES["products"], engine=engine)
    assert_same_training(llama_stack, value, steps=2)
    model = sac.apply(built(llama_stack), value)
    out = model(*tokens())
    held = [held for _, _, held in figures(model)]
    assert sum(one.get("no room on the host", 0) for one in held) >= 2 * 16384 - 8192
    out.sum().backward()


@pytest.mark.parametrize("name", ["by default", "whole blocks", "products"])
def test_forward_mode_holds_values(device, name):
    """A value on the host would come back without its tangent."""
    found = []
    for value in (None, selective(POLICIES[name])):
        model = built(lambda: Stack(FunctionBlock(views), FunctionBlock(views)))
        model = model if value is None else sac.apply(model, value)
        torch.manual_seed(4)
        (x,), (tangent,) = square(), square()
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(x.requires_grad_(), tangent))
            moved = forward_ad.unpack_dual(out).tangent
            found.append([moved.detach(), *torch.autograd.grad(moved.sum() + out.sum(), [x, *model.parameters()])])
    assert all(map(torch.equal, *found))


def text_of_full_host(held: str, used: str) -> str:
    return (
        f"host_memory: {held} of values stay on the device, since host memory has no room for them: of the 8.0 KiB "
        f"that this process may pin, {used} are in use\n"
        "    fix: raise host_memory if the node has more, or offload less"
    )


def test_full_host_warns_once(device):
    model = sac.apply(built(llama_stack), selective(POLICIES["products"], host_memory="8KiB"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(*tokens()).sum().backward()
    assert [str(one.message) for one in caught] == [text_of_full_host("8.0 KiB", "8.0 KiB")]


def test_full_host_is_an_error_under_strict(device):
    model = sac.apply(built(llama_stack), selective(POLICIES["products"], host_memory="8KiB", strict=True))
    with pytest.raises(RegionError) as caught:
        model(*tokens())
    assert str(caught.value) == text_of_full_host("8.0 KiB", "8.0 KiB")


def test_memory_that_cannot_be_pinned_counts_as_full(device, monkeypatch):
    def refuse(size: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(transfers, "pinned_memory", refuse)
    model = sac.apply(built(llama_stack), selective(POLICIES["products"]))
    with pytest.warns(SacWarning, match="may pin, 0 B are in use: CUDA error: out of memory\n"):
        model(*tokens()).sum().backward()
    assert figures(model) == [(0, 0, {"no room on the host": 16384})] * 2


@pytest.mark.parametrize("value", [selective(POLICIES["products"]), {**FULL, "store": "host"}], ids=["offload", "host"])
def test_graph_capture_is_refused(device, value):
    model = sac.apply(built(llama_stack), value)
    device.is_capturing = True
    with pytest.raises(RegionError) as caught:
        model(*tokens())
    assert str(caught.value) == (
        "offload: offloading cannot be captured in a CUDA graph: its replays would allocate no host memory\n"
        "    fix: capture no region that offloads or has store host; save or recompute instead"
    )


# Where nothing is gained


@pytest.mark.parametrize("engine", ENGINES)
def test_values_in_host_memory_are_held_and_the_report_says_so(engine):
    assert_same_training(llama_stack, selective(POLICIES["products"], engine=engine))
    model = sac.apply(built(llama_stack), selective(POLICIES["products"], engine=engine))
    model(*tokens()).sum().backward()
    assert figures(model) == [(0, 0, {"device memory is host memory": 16384})] * 2
    told = str(sac.report(model))
    assert "  offloaded by rule rule-0: 16.0 KiB held on the device: device memory is host memory" in told
    assert {row.decision for row in sac.reporting.decisions_of(model)} == {"offload", "recompute"}


def test_report_of_what_is_on_the_host(device):
    model = sac.apply(built(llama_stack), selective(POLICIES["products"]))
    model(*tokens()).sum().backward()
    report = sac.report(model)
    assert report.offloaded_bytes == report.to_dict()["offloaded_bytes"] == 2 * 16384
    assert report.scalars()["sac/offloaded_bytes"] == 2 * 16384
    assert report.kinds[0].saved_bytes == 0
    told = str(report)
    assert "keeps 2.0 KiB per region (0 B saved, 2.0 KiB of inputs; 16.0 KiB offloaded to host memory)" in told
    assert "  offloaded by rule rule-0: 16.0 KiB to host memory" in told


def test_regions_without_offload_start_nothing(device):
    model = sac.apply(built(llama_stack), selective(policy(save("matmul"))))
    model(*tokens()).sum().backward()
    assert device.made == 0
    assert device.log == []
    assert Settings().transfers._of == {}


def test_a_block_that_is_saved_as_a_whole_runs_plainly_beside_rules_that_offload(device):
    model = built(llama_stack)
    sac.apply(model, selective(policy({"module": "", "layers": [1], "do": "save"}, offload("matmul"))))
    model(*tokens())
    first, second = (one.region for one in regions_of(model))
    assert [bool(one.group.table.offloads) for one in (first, second)] == [True, False]
    assert [bool(one.stats.offloads) for one in (first, second)] == [True, False]
