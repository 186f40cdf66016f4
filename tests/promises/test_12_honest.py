"""`sac.report` says what was really kept: its numbers against storages that were seen to live."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import (
    FULL,
    FunctionBlock,
    Stack,
    alternate,
    llama_stack,
    policy,
    save,
    selective,
    square,
    tokens,
    whole,
)
from tests.support.model_zoo import tiny
from tests.support.recording import kept_bytes
from tests.support.simulated_streams import simulated_streams
from tests.support.training import built

ATTENTION_AND_ALTERNATING = selective(policy(save("attention"), alternate("matmul")))


def routed(block: FunctionBlock, x: Tensor) -> Tensor:
    weights, chosen = (x @ block.a).softmax(-1).topk(2)
    return (x @ block.b).gather(1, chosen) * weights


def sliced(block: FunctionBlock, x: Tensor) -> Tensor:
    return ((x @ block.a)[:1] * 2).sin()


def routed_stack() -> nn.Module:
    return Stack(FunctionBlock(routed))


def sliced_stack() -> nn.Module:
    return Stack(FunctionBlock(sliced))


CASES: dict[str, tuple[Any, Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "full": (FULL, llama_stack, tokens),
    "all products": (selective(policy(save("matmul"))), llama_stack, tokens),
    "one linear": (selective(policy(save("matmul", module="mlp.gate_proj"))), llama_stack, tokens),
    "attention and alternating": (ATTENTION_AND_ALTERNATING, llama_stack, tokens),
    "products and norms": (selective(policy(save(["matmul", "aten.rsqrt", "aten.mul"]))), llama_stack, tokens),
    "must-save in full": (FULL, routed_stack, square),
    "small view": (selective(policy(save("matmul"))), sliced_stack, square),
}


@pytest.mark.parametrize(("value", "build", "make_input"), CASES.values(), ids=CASES.keys())
def test_bytes_are_those_that_live(value: Any, build: Any, make_input: Any) -> None:
    model = sac.apply(built(build), value)
    inputs = make_input()
    measured = kept_bytes(model, tuple(x.requires_grad_() for x in inputs))
    report = sac.report(model)
    first_input = inputs[0].untyped_storage().nbytes()  # made by the test, and so not measured
    held = any(kind.input_bytes for kind in report.kinds)
    assert report.kept_bytes - (first_input if held else 0) == measured


@pytest.mark.parametrize(("value", "build", "make_input"), CASES.values(), ids=CASES.keys())
def test_bytes_of_the_rules_add_up(value: Any, build: Any, make_input: Any) -> None:
    model = sac.apply(built(build), value)
    model(*make_input())
    for kind in sac.report(model).kinds:
        assert sum(use.saved_bytes for use in kind.rules) == kind.saved_bytes
        assert kind.kept_bytes == kind.saved_bytes + kind.input_bytes


def copied_view(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).sin()[:2] @ block.b


def test_bytes_of_a_rule_are_those_of_the_copied_view() -> None:
    model = sac.apply(built(lambda: Stack(FunctionBlock(copied_view))), selective(policy(save("aten.sin"))))
    model(*square())
    [kind] = sac.report(model).kinds
    assert kind.saved_bytes == 64
    assert [use.saved_bytes for use in kind.rules] == [64]


SHOWN = """activation checkpointing: selective, 2 regions, policy test
blocks.0-1 (x2): keeps 12.2 KiB per region (10.2 KiB saved, 2.0 KiB of inputs)
  rule rule-0: 1 call, 2.2 KiB saved
  rule rule-1: 7 calls, 8.0 KiB saved
  freed, since backward never reads it: 2.0 KiB
  recomputed by default, dearest first: aten.mul.Tensor (x9, 20.0 KiB), aten.add.Tensor (x6, 8.1 KiB), \
aten.cat (x2, 4.0 KiB), aten.pow.Tensor_Scalar (x2, 4.0 KiB), aten.silu (x1, 4.0 KiB)"""


def test_print() -> None:
    model = sac.apply(built(llama_stack), ATTENTION_AND_ALTERNATING)
    model(*tokens())
    report = sac.report(model)
    assert str(report) == SHOWN


def test_rules_of_a_region() -> None:
    model = sac.apply(built(llama_stack), ATTENTION_AND_ALTERNATING)
    model(*tokens())
    [kind] = sac.report(model).kinds
    attention, products = kind.rules
    # The result (2 x 8 x 32 floats) and its log-sum-exp (2 x 4 x 8); products: q, v, the gate; down is dead.
    assert (attention.rule, attention.hits, attention.saved_bytes) == ("rule-0", 1, 2048 + 256)
    assert (products.rule, products.hits, products.saved_bytes) == ("rule-1", 7, 2048 + 2048 + 4096)
    assert kind.dead_bytes == 2048
    assert (kind.regions, kind.count, kind.calls) == ("blocks.0-1 (x2)", 2, 2)


def test_before_the_first_forward() -> None:
    report = sac.report(sac.apply(built(llama_stack), ATTENTION_AND_ALTERNATING))
    assert report.kept_bytes == 0
    assert report.zero_hit_rules == ()
    assert [(kind.count, kind.calls, kind.saved_bytes, kind.unmatched) for kind in report.kinds] == [(2, 0, 0, ())]
    assert str(report) == (
        "activation checkpointing: selective, 2 regions, policy test\n"
        "no forward with grad has run yet\n"
        "blocks.0-1 (x2): keeps 0 B per region (0 B saved, 0 B of inputs)"
    )


def test_a_model_without_regions_has_a_report_that_says_so() -> None:
    for model in (built(llama_stack), sac.apply(built(llama_stack), "none")):
        report = sac.report(model)
        assert str(report) == "activation checkpointing: none, 0 regions on this model"
        assert report.to_dict()["kinds"] == ()
        assert report.kept_bytes == 0


def test_plain_values() -> None:
    model = sac.apply(built(llama_stack), ATTENTION_AND_ALTERNATING)
    model(*tokens())
    report = sac.report(model)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["mode"] == "selective"
    assert plain["kept_bytes"] == report.kept_bytes
    assert plain["kinds"][0]["kept_bytes"] == report.kinds[0].kept_bytes
    assert plain["kinds"][0]["rules"][0] == {"rule": "rule-0", "hits": 1, "saved_bytes": 2304, "recomputes": False}
    assert plain["kinds"][0]["unmatched"][0]["op"] == "aten.mul.Tensor"


def test_zero_hit_rules() -> None:
    model = sac.apply(built(llama_stack), selective(policy(save("matmul"), save("convolution", optional=True))))
    model(*tokens())
    report = sac.report(model)
    assert report.zero_hit_rules == ("rule-1",)
    assert "rules without a call: rule-1" in str(report).splitlines()


def test_must_save_is_told() -> None:
    model = sac.apply(built(routed_stack), FULL)
    model(*square())
    [kind] = sac.report(model).kinds
    # topk of 8 rows: two floats and two integers of eight bytes each
    assert [(use.rule, use.hits, use.saved_bytes) for use in kind.rules] == [("must-save", 1, 8 * 2 * (4 + 8))]


def test_default_that_saves_is_told() -> None:
    value = selective(policy({"ops": "aten.mm", "do": "recompute"}, default="save"))
    model = sac.apply(built(llama_stack), value)
    model(*(x.requires_grad_() for x in tokens()))
    [kind] = sac.report(model).kinds
    assert [use.rule for use in kind.rules] == ["rule-0", "default"]
    assert kind.rules[1].saved_bytes > 0
    assert kind.rules[1].hits > 0


def test_dearest_ops_that_nothing_matched() -> None:
    model = sac.apply(built(llama_stack), selective(policy(save("attention"))))
    model(*tokens())
    [kind] = sac.report(model).kinds
    first = kind.unmatched[0]
    d, hidden, rows = 32, 64, 2 * 8
    assert (first.op, first.calls) == ("aten.mm.default", 7)
    assert first.flops == 2 * rows * d * (4 * d + 3 * hidden)
    assert first.bytes == 4 * rows * (5 * d + 2 * hidden)
    assert len(kind.unmatched) == 5


def test_regions_that_differ_are_told_apart() -> None:
    model = sac.apply(built(lambda: llama_stack(3)), selective(policy(save("matmul", layers={"first": 1}))))
    model(*tokens())
    kinds = sac.report(model).kinds
    assert [(kind.regions, kind.count) for kind in kinds] == [("blocks.0", 1), ("blocks.1-2 (x2)", 2)]
    assert [kind.saved_bytes > 0 for kind in kinds] == [True, False]


@pytest.mark.slow
def test_a_frozen_tower_keeps_nothing() -> None:
    model, inputs = tiny("llava")
    model.model.vision_tower.requires_grad_(False)
    sac.apply(model, "selective")
    model(**inputs)
    vision, language = sac.report(model).kinds
    assert (vision.regions, vision.kept_bytes) == ("model.vision_tower.encoder.layers.0-1 (x2)", 0)
    assert language.kept_bytes > 0


# -- Inputs: those that autograd holds, and those that sac holds

NEVER_RECOMPUTED: dict[str, Any] = {
    "the block itself, else recomputed": selective(policy(whole(""))),
    "everything by glob": selective(policy(save("*"))),
    **{f"default, {engine}": selective(policy(default="save"), engine=engine) for engine in ("replay", "rerun")},
}


def products(block: FunctionBlock, x: Tensor) -> Tensor:
    return torch.relu(x @ block.a) @ block.b


def reads_no_input(block: FunctionBlock, x: Tensor) -> Tensor:
    return torch.relu(x + 1) @ block.b


def reads_a_view(block: FunctionBlock, x: Tensor) -> Tensor:
    return torch.cat((x[:2] @ block.a, x[2:] @ block.b)).sin()


@pytest.mark.parametrize("name", NEVER_RECOMPUTED)
@pytest.mark.parametrize("body", [products, reads_no_input, reads_a_view])
def test_inputs_count_where_backward_of_the_model_alone_reads_them(body: Callable[..., Any], name: str) -> None:
    model = sac.apply(built(lambda: Stack(*(FunctionBlock(body) for _ in range(3)))), NEVER_RECOMPUTED[name])
    for _ in range(2):
        x = square()[0].requires_grad_()
        model(x).sum().backward()
        expected = 0 if body is reads_no_input else x.nbytes
        assert [kind.input_bytes for kind in sac.report(model).kinds] == [expected]


@pytest.mark.parametrize("value", [FULL, selective(policy(save("matmul")))], ids=["full", "selective"])
def test_copies_of_buffers_from_before_the_forward_are_counted(value: Any) -> None:
    block = FunctionBlock(lambda block, x: block.norm(x @ block.a).sin() @ block.b, norm=nn.BatchNorm1d(8))
    model, (x,) = sac.apply(Stack(block), value), square()
    model(x).sum().backward()
    (kind,) = sac.report(model).kinds
    assert kind.input_bytes == x.nbytes + sum(buffer.nbytes for buffer in model.buffers())


STORES = {
    "host": ({"store": "host"}, "the first floating-point one is kept in host memory"),
    "contiguous": (
        {"store": "contiguous", "num_checkpoints": 2, "keep": "all"},
        "all floating-point ones are kept in buffers of 2 slots",
    ),
    "contiguous+host": (
        {"store": "contiguous+host", "num_checkpoints": 2, "keep": lambda position, tensor: True},
        "those that `keep` chooses are kept in host memory",
    ),
}


@pytest.mark.parametrize("mode", [FULL, ATTENTION_AND_ALTERNATING], ids=["full", "selective"])
@pytest.mark.parametrize(("store", "told"), STORES.values(), ids=STORES.keys())
def test_inputs_kept_elsewhere(mode: Any, store: dict[str, Any], told: str) -> None:
    model = sac.apply(built(llama_stack), {**mode, **store})
    [x] = tokens()
    x.requires_grad_()
    measured = kept_bytes(model, (x,))
    report = sac.report(model)
    assert [kind.input_bytes for kind in report.kinds] == [2048]
    assert report.to_dict()["input_host_bytes"] == 0  # of an input on the CPU the copy lies where the input does
    buffered = 2 * 2048 if store["store"] == "contiguous" else 0  # made in an earlier step, and so not measured
    assert report.kept_bytes == measured + buffered
    assert report.kept_inputs == report.to_dict()["kept_inputs"] == told
    assert str(report).splitlines()[1] == f"of each region's inputs: {told}"


def test_inputs_kept_in_host_memory_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sac.apply(built(llama_stack), {**FULL, "store": "host"})
    with simulated_streams(monkeypatch):
        model(*tokens())
    report = sac.report(model)
    [kind] = report.kinds
    assert (kind.input_bytes, kind.input_host_bytes, kind.kept_bytes) == (0, 2048, 0)
    assert str(report) == (
        "activation checkpointing: full, 2 regions\n"
        "of each region's inputs: the first floating-point one is kept in host memory\n"
        "blocks.0-1 (x2): keeps 0 B per region (0 B saved, 0 B of inputs; 2.0 KiB of inputs in host memory)\n"
        + "\n".join(str(report).splitlines()[3:])
    )
    plain = json.loads(json.dumps(report.to_dict()))
    assert (plain["kept_bytes"], plain["input_host_bytes"]) == (0, 4096)
    assert plain["kinds"][0]["input_host_bytes"] == 2048
