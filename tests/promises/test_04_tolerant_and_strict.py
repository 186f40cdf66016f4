"""Recomputation may run ops that forward did not, and may not be given another op's saved value.

torch's plain checkpoint passes every test of the first half; its selective one raises "not found in storage".
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import sac
from sac.errors import RegionError
from tests.support.blocks import (
    ENTRIES,
    FULL,
    FunctionBlock,
    Stack,
    alternate,
    install,
    llama_stack,
    policy,
    save,
    selective,
    square,
    with_dropout,
)
from tests.support.training import assert_same, assert_same_training, built, plain_backward, train

ON_EACH_ENTRY = pytest.mark.parametrize("entry", ENTRIES)
MATMULS = selective(policy(save("matmul")))


def extra_op_in_recompute(block: FunctionBlock, x: Tensor) -> Tensor:
    """A profiler range and a logged sum, both of recomputation only."""
    if block.runs == 2:
        with torch.profiler.record_function("again"):
            x.detach().sum()
    h = x @ block.a
    if block.runs == 2:
        h.detach().view(-1).mean()
    return (F.dropout(h, 0.3, True).sin() @ block.b).cos()


@ON_EACH_ENTRY
@pytest.mark.parametrize(
    "rule", [save("matmul"), save("*"), alternate("*")], ids=["matmuls", "everything", "every 2nd"]
)
def test_ops_of_recompute_only_just_run(entry: str, rule: dict[str, Any]) -> None:
    assert_same_training(
        lambda: Stack(FunctionBlock(extra_op_in_recompute)), selective(policy(rule)), entry=entry, make_input=square
    )


def backward_under_flop_counter(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Any]:
    """FlopCounterMode decomposes ops, so it shows a mode below it other ops than forward ran."""
    with FlopCounterMode(display=False):
        return plain_backward(loss, inputs, parameters)


@ON_EACH_ENTRY
@pytest.mark.parametrize("default", ["save", "recompute"])
def test_flop_counter_around_backward_only(entry: str, default: str) -> None:
    value = selective(policy(save(["matmul", "attention"]), default=default))
    assert_same_training(
        lambda: with_dropout(llama_stack()), value, entry=entry, backward=backward_under_flop_counter, steps=2
    )


def swaps_in_recompute(block: FunctionBlock, x: Tensor) -> Tensor:
    """Two products of one shape, in another order on the second run: replay by index hands out the wrong one."""
    if block.runs % 2:
        left = x @ block.a
        right = x @ block.b
    else:
        right = x @ block.b
        left = x @ block.a
    return left.sin() * right.cos()


def swaps_inputs_in_recompute(block: FunctionBlock, x: Tensor) -> Tensor:
    """As above with intermediate values instead of parameters."""
    low, high = x * 2, x * 3
    if block.runs % 2:
        left = low @ block.a
        right = high @ block.a
    else:
        right = high @ block.a
        left = low @ block.a
    return left.sin() * right.cos()


@ON_EACH_ENTRY
@pytest.mark.parametrize("body", [swaps_in_recompute, swaps_inputs_in_recompute])
@pytest.mark.parametrize("rule", [save("matmul"), save("*")], ids=["matmuls", "everything"])
def test_swapped_ops_never_silently_get_each_others_value(entry: str, body: Any, rule: dict[str, Any]) -> None:
    """Either the right gradients, or an error that names the op; stock is silently wrong."""
    value = selective(policy(rule), verify="always")
    refused = ""
    try:
        assert_same_training(lambda: Stack(FunctionBlock(body)), value, entry=entry, make_input=square)
    except sac.SacError as error:
        refused = str(error)
    assert not refused or "aten." in refused, refused


def alike_sums(block: FunctionBlock, x: Tensor) -> Tensor:
    """Two sums of one shape, of products with the same outside tensors: only their history tells them apart."""
    left, right = x @ block.a, x @ block.b
    left = left * block.cos[:8] + left.neg() * block.sin[:8]
    right = right * block.cos[:8] + right.neg() * block.sin[:8]
    return left.sin() * right.cos()


@ON_EACH_ENTRY
@pytest.mark.parametrize("op", ["aten.add", "aten.mul", "aten.neg", "aten.mm"])
@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_one_of_several_alike_ops_is_saved(entry: str, op: str, index: int) -> None:
    """Stock passes this one: it counts. Matching by where arguments came from must not mix them up."""

    def build() -> Stack:
        block = FunctionBlock(alike_sums)
        block.register_buffer("cos", torch.randn(16, 8))
        block.register_buffer("sin", torch.randn(16, 8))
        return Stack(block)

    value = selective(policy(save(op, call={"index": index}, optional=True)))
    assert_same_training(build, value, entry=entry, make_input=square, steps=2)


def twins(block: FunctionBlock, x: Tensor) -> Tensor:
    """The same product four times, two of them written to: nothing but their order tells them apart."""
    first, second, third, fourth = x @ block.a, x @ block.a, x @ block.a, x @ block.a
    second.add_(x)
    fourth.mul_(2.0)
    return first.sin() * second.cos() * third.tanh() + (x + 1).masked_fill_(x > 0, 0.5) * fourth.sin()


@ON_EACH_ENTRY
@pytest.mark.parametrize("kept", [[0], [1], [2], [3], [0, 2], [1, 3], [0, 1, 2]], ids=str)
def test_twin_ops_of_which_some_are_written_to(entry: str, kept: list[int]) -> None:
    value = selective(policy(save("aten.mm", call={"index": kept})))
    assert_same_training(lambda: Stack(FunctionBlock(twins)), value, entry=entry, make_input=square, steps=2)


def changes_shape_in_recompute(block: FunctionBlock, x: Tensor) -> Tensor:
    """The product has another shape on the second run: nothing that was kept can stand for it."""
    rows = x if block.runs % 2 else x[:4]
    h = (rows @ block.a).sin() @ block.b
    return h.cos().sum() + x.sum()


@pytest.mark.parametrize("earlier", [0, 2])
@pytest.mark.parametrize("value", [FULL, {**MATMULS, "engine": "rerun"}], ids=["full", "matmuls"])
def test_changed_shape_raises_and_names_the_region(value: Any, earlier: int) -> None:
    """In the first step, and in one whose values are not compared any more."""
    block = FunctionBlock(lambda block, x: changes_shape_in_recompute(block, x) if changes else x @ block.a)
    model = sac.apply(built(lambda: Stack(block)), value)
    for _ in range(earlier):
        changes = False
        model(*square()).sum().backward()
    changes = True
    loss = model(*square())
    with pytest.raises(sac.SacError) as caught:
        loss.backward()
    text = str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert "blocks.0" in text, text
    assert value is FULL or "aten.mm.default in the region itself" in text, text
    assert "8, 8" in text, text  # both sides
    assert "4, 8" in text, text


def one_more_in_recompute(block: FunctionBlock, x: Tensor) -> Tensor:
    """A product comes first on the second run: without an error, each would get the result of the one before it."""
    if block.runs == 2:
        x.cos() @ block.a
    return ((x @ block.a).sin() @ block.a).sin().cos()


def test_a_call_more_than_in_forward_is_an_error_that_names_it() -> None:
    model = install(built(lambda: Stack(FunctionBlock(one_more_in_recompute))), MATMULS, "apply, rerun")
    with pytest.raises(RegionError, match=r"aten\.mm\.default in the region itself runs more often than in forward"):
        model(*square()).sum().backward()


def fails_in_recompute(block: FunctionBlock, x: Tensor) -> Tensor:
    if block.runs == 2:
        raise KeyError("the user's own")
    return (x @ block.a).sin().cos()


def test_error_of_recompute_is_raised_as_it_is() -> None:
    model = install(built(lambda: Stack(FunctionBlock(fails_in_recompute))), MATMULS, "apply, rerun")
    loss = model(*square()).sum()
    with pytest.raises(KeyError, match="the user's own"):
        loss.backward()
    assert train(built(llama_stack))  # nothing of the failed recomputation is left on the process


@pytest.mark.parametrize(
    "rule", [save("matmul"), save("*"), alternate("*")], ids=["matmuls", "everything", "every 2nd"]
)
@pytest.mark.parametrize(
    "body",
    [
        extra_op_in_recompute,
        swaps_in_recompute,
        swaps_inputs_in_recompute,
        changes_shape_in_recompute,
        fails_in_recompute,
    ],
)
def test_what_the_second_run_would_do_is_nothing_to_replay(body: Any, rule: dict[str, Any]) -> None:
    """It runs ops alone: each of these bodies, which are another function when they run again, runs once."""
    value, build = selective(policy(rule)), functools.partial(built, lambda: Stack(FunctionBlock(body)))
    model = install(build(), value, "apply, replay")
    assert_same(train(build(), make_input=square), train(model, make_input=square))
    assert model.blocks[0].runs == 1


def parts_in_another_order(block: FunctionBlock, x: Tensor) -> Tensor:
    first, second = (x @ block.a).chunk(2)
    if block.runs % 2:  # runs are counted in both passes
        u, v = first.sin(), second.sin()
    else:
        v, u = second.sin(), first.sin()
    return torch.cat([2 * u, v])


@pytest.mark.parametrize(
    "value", [FULL, selective(policy({**save("attention"), "optional": True}), engine="rerun")], ids=["full", "rerun"]
)
def test_two_parts_of_one_value_are_told_apart(value: dict[str, Any]) -> None:
    """Autograd saves both; their shapes are equal, and so are their storages."""
    model = sac.apply(built(lambda: Stack(FunctionBlock(parts_in_another_order))), {**value, "verify": "always"})
    loss = model(*square()).sum()
    with pytest.raises(RegionError) as error:
        loss.backward()
    assert re.match(r"blocks.0: saved tensor 1 .*in the region itself.* in recomputation", str(error.value))
