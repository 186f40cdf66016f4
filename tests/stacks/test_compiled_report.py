"""What `sac.report` says of regions that only `torch.compile` ran: what the partitioner was told, and no bytes."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.engine.compiled import checkpoint_contexts
from sac.errors import SacWarning
from tests.stacks.test_compiled_inside import ATTENTION_AND_PRODUCTS
from tests.support.blocks import (
    FULL,
    Stack,
    alternate,
    llama_stack,
    policy,
    save,
    selective,
    square,
    tokens,
)
from tests.support.compiling import skip_if_results_are_not_told, train_compiled
from tests.support.pairs import in_turn
from tests.support.training import built

VALUES = {
    "full": FULL,
    "every product": selective(policy(save("matmul"))),
    "one linear": selective(policy(save("matmul", module="mlp.gate_proj"))),
    "attention, and products in turn": ATTENTION_AND_PRODUCTS,
    "the first call": selective(policy(save("aten.mm", call={"index": 0}, module="self_attn.*"))),
    "by layer": selective(policy(save("attention"), save("matmul", layers={"first": 1}))),
    "every second, by shape": selective(policy(alternate("matmul", shape=["_", 64]))),
}


def whole(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def blocks(model: nn.Module, backend: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


def eager_hits(value: Any) -> dict[str, list[int]]:
    model = sac.apply(built(llama_stack), value)
    model(*tokens())
    return {kind.regions: [use.hits for use in kind.rules if use.rule != "default"] for kind in sac.report(model).kinds}


@functools.cache
def compiled_report(name: str, compile_it: Any) -> Any:
    applied: list[nn.Module] = []
    _, log = train_compiled(
        llama_stack, lambda model: applied.append(sac.apply(model, VALUES[name])), compile_it=compile_it
    )
    assert log.backward
    return sac.report(applied[0])


@pytest.mark.parametrize(("compile_it", "name"), in_turn(list(VALUES), [(blocks,), (whole,)]))
def test_rules_match_as_often_as_in_eager(compile_it: Any, name: str) -> None:
    skip_if_results_are_not_told(VALUES[name])
    report = compiled_report(name, compile_it)
    told = {kind.regions: list(kind.traced.rules.values()) for kind in report.kinds if kind.traced is not None}
    eager = eager_hits(VALUES[name])
    assert told == {regions: [hits for hits in counts if hits] for regions, counts in eager.items()}
    assert all(kind.calls == 0 and kind.kept_bytes == 0 for kind in report.kinds)


def test_text_of_a_compiled_model() -> None:
    report = compiled_report("attention, and products in turn", whole)
    (kind,) = report.kinds
    assert kind.traced is not None
    assert kind.traced.saved == 5  # attention, and the 1st, 3rd, 5th and 7th of seven products
    assert str(report) == (
        "activation checkpointing: selective, 2 regions\n"
        f"blocks.0-1 (x2): compiled; decisions: save 5 calls, recompute {kind.traced.recomputed}\n"
        "  rule rule-0: 1 call\n"
        "  rule rule-1: 7 calls\n"
        "  the partitioner chooses what it keeps of these; their bytes are not counted here"
    )


def test_plain_values_hold_it() -> None:
    (kind,) = compiled_report("every product", whole).to_dict()["kinds"]
    assert (kind["traced"]["saved"], kind["traced"]["rules"]) == (7, {"rule-0": 7})
    assert kind["compiled_graphs"] == 0


def test_a_rule_without_a_hit_is_among_those_without() -> None:
    value = selective(policy(save("matmul"), save("convolution")))
    applied: list[nn.Module] = []
    train_compiled(llama_stack, lambda m: applied.append(sac.apply(m, value)))
    assert sac.report(applied[0]).zero_hit_rules == ("rule-1",)


def test_kinds_of_one_table_are_told_apart() -> None:
    """Blocks that differ in structure, under the same rules."""

    def build() -> nn.Module:
        model = llama_stack()
        model.blocks[1].mlp = nn.Linear(32, 32, bias=False)
        return model

    applied: list[nn.Module] = []
    train_compiled(build, lambda m: applied.append(sac.apply(m, VALUES["every product"])))
    assert [kind.traced.saved for kind in sac.report(applied[0]).kinds if kind.traced] == [7, 5]


def test_nothing_is_traced_before_the_first_step() -> None:
    model = sac.apply(built(llama_stack), VALUES["every product"])
    assert [kind.traced for kind in sac.report(model).kinds] == [None]


def test_rules_on_results_that_torch_does_not_show_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 is."""
    monkeypatch.setattr(sys.modules[checkpoint_contexts.__module__], "SHOWS_RESULTS_TO_POLICIES", False)
    value = selective(policy(save("attention"), save("matmul", shape=["_", 64])))
    with pytest.warns(SacWarning) as caught:
        train_compiled(llama_stack, lambda m: sac.apply(m, value))
    assert {str(one.message) for one in caught if issubclass(one.category, SacWarning)} == {
        'activation_checkpointing.policy.rules[1]: rule "rule-1" matches on the shape, dtype or size of results, '
        f"which torch {torch.__version__} does not show to a policy under torch.compile: it matches nothing there\n"
        "    fix: use a later torch, or say which op is meant by module or call"
    }


class FourProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ self.weight).sin()
        return x


@pytest.mark.parametrize(
    ("call", "saved"), [({"index": 1}, 1), ({"index": [0, 3]}, 2), ({"every": 2, "offset": 1}, 2)], ids=str
)
def test_calls_of_an_op_in_one_module_are_counted(call: Any, saved: int) -> None:
    value = selective(policy(save("aten.mm", call=call)))
    skip_if_results_are_not_told(value)
    model = sac.apply(built(lambda: Stack(FourProducts())), value)
    torch.compile(model, backend="aot_eager")(*square()).sum().backward()
    (kind,) = sac.report(model).to_dict()["kinds"]
    assert kind["traced"] == {"saved": saved, "recomputed": 8 - saved, "rules": {"rule-0": saved}, "offloads": False}


def test_what_rules_offload_is_saved_in_compiled_graphs() -> None:
    value = selective(policy({"ops": "matmul", "do": "offload"}))
    skip_if_results_are_not_told(value)
    model = sac.apply(built(lambda: Stack(FourProducts())), value)
    plain = built(lambda: Stack(FourProducts()))
    for one in (torch.compile(model, backend="aot_eager"), plain):
        torch.manual_seed(0)
        one(*square()).sum().backward()
    assert torch.equal(model.blocks[0].weight.grad, plain.blocks[0].weight.grad)
    report = sac.report(model)
    assert report.kinds[0].traced.saved == 4
    assert "a compiled graph offloads nothing: what rules offload is saved on the device" in str(report)
