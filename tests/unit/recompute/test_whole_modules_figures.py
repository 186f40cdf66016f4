"""What modules saved as a whole cost: their FLOPs once, no dispatch mode, and the bytes that autograd keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from sac.reporting import decisions_of
from sac.tools.comparison import count_flops
from tests.stacks.composition import differences, forward_done, outcome
from tests.support import whole_module_blocks as blocks
from tests.support.blocks import FULL, llama_stack, policy, save, selective, square, tokens
from tests.support.training import assert_same_training, built, train
from tests.support.whole_module_blocks import EVERY, RUNS, WIDTH, stack_of, whole

ALONE = selective(policy(whole(EVERY)))
SQUARE = WIDTH * WIDTH * 4  # bytes of one matrix
# Bodies whose matrix products are all inside modules, and that give a dispatch mode nothing to do.
INSIDE = (
    blocks.called_twice,
    blocks.in_other_order,
    blocks.same_module_twice,
    blocks.inside_each_other,
    blocks.keywords,
    blocks.identity,
    blocks.result_written,
    blocks.batch_norm,
    blocks.dropout,
    blocks.without_gradient,
    blocks.returns_none,
    blocks.structures,
    blocks.frozen,
)


@pytest.mark.parametrize("rules", [(), (save("matmul", optional=True),)], ids=["alone", "and products"])
@pytest.mark.parametrize("body", blocks.BODIES, ids=lambda body: body.__name__)
def test_training_is_the_same(body: Callable[..., Any], rules: tuple[Any, ...]) -> None:
    value = selective(policy(whole(EVERY), *rules))
    assert_same_training(lambda: stack_of(body), value, steps=3, make_input=square)


def step(model: Any, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        torch.manual_seed(1)
        loss = model(*(x.detach().requires_grad_() for x in inputs)).square().sum()
        forward_done()
        loss.backward()
        return loss

    return run


@pytest.mark.parametrize("body", INSIDE, ids=lambda body: body.__name__)
def test_saved_modules_are_not_run_again(body: Callable[..., Any]) -> None:
    plain, ours = built(lambda: stack_of(body)), sac.apply(built(lambda: stack_of(body)), ALONE)
    inputs = square()
    for _ in range(3):
        RUNS.clear()
        flops = count_flops(step(plain, inputs))
        runs = len(RUNS)
        assert count_flops(step(ours, inputs)) == flops
        assert len(RUNS) == 2 * runs


def test_bytes_are_those_of_the_result_and_of_what_autograd_keeps_inside() -> None:
    def body(block: Any, x: Tensor) -> Tensor:
        return (block.part(x.exp()) + 1).cos()

    def kept(value: Any) -> int:
        model = sac.apply(built(lambda: stack_of(body)), value)
        inputs = square()
        for _ in range(2):
            step(model, inputs)()
        found = outcome(step(model, inputs), model, steps=1).kept_bytes
        if value is not FULL:
            (kind,) = sac.report(model).kinds
            assert kind.saved_bytes == kind.rules[0].saved_bytes == 3 * SQUARE
            assert (kind.rules[0].hits, kind.count) == (1, 2)
        return found

    # The product's left side, the sine's argument, and the module's result; the left side is no input of the region.
    assert kept(selective(policy(whole("part")))) - kept(FULL) == 2 * 3 * SQUARE


def test_the_region_itself_saved_as_a_whole_costs_what_it_costs_without_us() -> None:
    plain, ours = built(llama_stack), sac.apply(built(llama_stack), selective(policy(whole("", id="all"))))
    inputs = tokens()
    train(ours, steps=2)
    for parameter, twin in zip(ours.parameters(), plain.parameters(), strict=True):
        parameter.data.copy_(twin.data)
        parameter.grad = None
    expected, found = outcome(step(plain, inputs), plain), outcome(step(ours, inputs), ours)
    assert differences(found, expected) == []
    assert (found.flops, found.kept_bytes) == (expected.flops, expected.kept_bytes)
    (kind,) = sac.report(ours).kinds
    assert kind.rules[0].hits
    assert kind.saved_bytes == kind.rules[0].saved_bytes > 0


@pytest.mark.parametrize("first", [True, False])
def test_the_first_rule_that_matches_a_module_decides(first: bool) -> None:
    rules = [whole("mlp", "recompute"), whole("{self_attn,mlp}")]
    model = sac.apply(built(llama_stack), selective(policy(*(rules if first else rules[::-1]))))
    with pytest.warns() if not first else _nothing():
        train(model, steps=2)
    saved = [row.module for row in decisions_of(model) if row.op.startswith("module ")]
    assert saved == (["self_attn"] if first else ["self_attn", "mlp"])


def test_recompute_of_a_module_is_the_exception_from_a_default_that_saves() -> None:
    value = selective(policy(whole("mlp", "recompute"), default="save"))
    model = sac.apply(built(llama_stack), value)
    plain = built(llama_stack)
    inputs = tokens()
    again = 2 * count_flops(lambda: plain.blocks[0].mlp.gate_proj(inputs[0]))  # down_proj is stopped before
    difference = count_flops(step(model, inputs)) - count_flops(step(plain, inputs))
    assert difference == 2 * again
    rows = [row for row in decisions_of(model) if row.module.startswith("mlp") and row.op.startswith("aten.mm")]
    assert {(row.decision, row.reason) for row in rows} == {("recompute", "rule rule-0")}


def test_a_row_tells_of_each_saved_module() -> None:
    model = sac.apply(built(llama_stack), selective(policy(whole("mlp", id="gated"))))
    inputs = tokens()
    step(model, inputs)()
    (row,) = (row for row in decisions_of(model) if row.rule)
    flops = count_flops(lambda: model.blocks[0].mlp(inputs[0]))
    assert (row.module, row.op, row.call, row.decision, row.reason) == (
        "mlp", "module GatedMLP", 0, "save", "rule gated",
    )  # fmt: skip
    assert (row.flops, row.bytes) == (flops, 2 * 8 * 32 * 4)
    assert not any(row.module.startswith("mlp.") for row in decisions_of(model))


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()
