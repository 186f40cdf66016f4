"""The rerun engine with and without the library: the same numbers, kept bytes, report, ops in backward and FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import sac
from sac.recompute.rerun import RerunState, SavedValue
from tests.support.blocks import FULL, FunctionBlock, Stack, llama_stack, policy, save, selective, square, tokens
from tests.support.custom_ops import lucky
from tests.support.native_engine import assert_same_with_library, error_of, needs_library, recorded, with_library
from tests.support.replay_programs import POLICIES, applied, block_of, gradients
from tests.support.training import assert_same, built, train
from tests.unit.native.test_engine_programs import (
    NATIVE,
    Nested,
    branches,
    branches_on_values,
    inside,
    longer_each_time,
    other_numbers,
)
from tests.unit.recompute.test_replay_kinds_of_ops import BODIES as KINDS
from tests.unit.recompute.test_replay_random_numbers import BODIES as RANDOM
from tests.unit.recompute.test_replay_random_numbers import holding_a_generator

pytestmark = needs_library
OUTSIDE = np.linspace(0.5, 1, 8, dtype=np.float32)
SAVE = RerunState.save


def rerun(chosen: dict[str, Any], **more: Any) -> dict[str, Any]:
    return selective(chosen, engine="rerun", **more)


ON_TWO = pytest.mark.parametrize("name", ["matmuls", "every second op"])


@ON_TWO
@pytest.mark.parametrize("program", NATIVE)
def test_kinds_of_ops(program: str, name: str) -> None:
    assert_same_with_library(block_of(NATIVE[program]), rerun(POLICIES[name]), ops=1 if name == "matmuls" else None)


@pytest.mark.slow
@ON_TWO
@pytest.mark.parametrize("program", sorted(KINDS.keys() - {"either_branch"}))  # rerun cannot run `torch.cond`
def test_programs_of_replay(program: str, name: str) -> None:
    assert_same_with_library(block_of(KINDS[program]), rerun(POLICIES[name]), ops=None)


@pytest.mark.slow
@ON_TWO
@pytest.mark.parametrize("program", RANDOM)
def test_programs_that_draw(program: str, name: str) -> None:
    assert_same_with_library(holding_a_generator(RANDOM[program]), rerun(POLICIES[name]), ops=None)


def routes(block: FunctionBlock, x: Tensor) -> Tensor:
    """A mixture of experts: under `full`, too, what it chooses is kept."""
    weights, chosen = (x @ block.a).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for expert in range(3):
        row, slot = (chosen % 3 == expert).nonzero(as_tuple=True)
        out.index_add_(0, row, (x[row] @ block.b).sin() * weights[row, slot, None])
    return out


def draws_from_its_own(block: FunctionBlock, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(block.calls)
    return (x @ block.a).sin() * torch.rand(8, 8, generator=generator) @ block.b


def writes_late(block: FunctionBlock, x: Tensor) -> Tensor:
    return F.rrelu((x @ block.a).cos() @ block.b, training=True)


@pytest.mark.parametrize("function", [draws_from_its_own, writes_late], ids=lambda one: one.__name__)
@pytest.mark.parametrize("value", [FULL, {**FULL, "store": "host"}], ids=["full", "inputs on the host"])
def test_full(function: Callable[..., Tensor], value: dict[str, Any]) -> None:
    def build() -> Stack:
        return Stack(FunctionBlock(function), FunctionBlock(function))

    seen = assert_same_with_library(build, value, ops=3)
    assert min(seen.rerun[-2:]) >= 3


def writes_to_its_own(block: FunctionBlock, x: Tensor) -> Tensor:
    out = torch.zeros(8, 8)
    out.add_((x @ block.a).sin()).mul_(0.5)
    out[2:].copy_(x[2:])
    out.relu_()
    return out @ block.b


def writes_to_what_is_saved(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    g = h.detach().sin()
    h.mul_(2)
    return (g + h) @ block.b


def writes_to_its_input(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.add_(0.25)
    return (x @ block.a).cos() @ block.b


def writes_to_a_view_of_what_is_saved(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    total = h.detach().sum()
    h[0].zero_()
    return h.exp() @ block.b + total


def test_writes_to_what_the_region_has_made_run_in_the_library() -> None:
    seen = assert_same_with_library(block_of(writes_to_its_own), rerun(POLICIES["matmuls"]), ops=6)
    assert seen.rerun[-1] >= 6  # zeros, sin, add_, mul_, copy_ and relu_, in both passes


@pytest.mark.parametrize("value", [rerun(POLICIES["matmuls"]), rerun(POLICIES["every second op"]), FULL])
@pytest.mark.parametrize(
    "function",
    [writes_to_its_own, writes_to_what_is_saved, writes_to_its_input, writes_to_a_view_of_what_is_saved],
    ids=lambda one: one.__name__,
)
def test_writes(function: Callable[..., Tensor], value: dict[str, Any]) -> None:
    assert_same_with_library(block_of(function), value, ops=None)


@ON_TWO
@pytest.mark.parametrize("function", [branches, branches_on_values, longer_each_time, other_numbers])
def test_programs_that_differ_from_step_to_step(function: Callable[..., Tensor], name: str) -> None:
    assert_same_with_library(block_of(function), rerun(POLICIES[name]), steps=5, ops=None)


@ON_TWO
def test_a_gradient_taken_inside(name: str) -> None:
    """While a recomputation runs inside of the forward, ops go to Python, which records none of them."""
    assert_same_with_library(block_of(inside), rerun(POLICIES[name]), ops=None)


@ON_TWO
def test_nested_regions(name: str) -> None:
    value = {**rerun(POLICIES[name]), "blocks": ["blocks.*", "blocks.*.inner"]}
    assert_same_with_library(lambda: Stack(Nested(), Nested()), value, ops=None)


def test_a_decoder() -> None:
    seen = assert_same_with_library(lambda: llama_stack(3), rerun(POLICIES["matmuls"]), make_input=tokens, ops=40)
    assert min(seen.rerun[-3:]) >= 30


def test_python_and_the_library_sign_alike() -> None:
    """What runs in C++ in one pass runs in Python in the other: the calls are matched, and nothing saved runs again.

    The `sin` reads a saved result, so Python notes that in forward, and `lucky` is an op of others, which Python signs
    in both passes; in recomputation, the library runs the `sin`.
    """

    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).sin()
        return lucky(h.cos()) * (h.exp() @ block.b)

    assert_same_with_library(block_of(function), rerun(POLICIES["matmuls"]), ops=1)


def test_calls_on_two_parts_are_told_apart() -> None:
    """In recomputation they run in the other order, and each is given its own result."""

    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        first, second = (x @ block.a).chunk(2)
        if block.runs % 2:  # runs are counted in both passes
            u, v = first @ block.b, second @ block.b
        else:
            v, u = second @ block.b, first @ block.b
        return torch.cat([u.sin() * v, v.cos()])

    assert_same_with_library(block_of(function), rerun(POLICIES["matmuls"]), ops=1)


def test_what_is_read_is_kept() -> None:
    """The library runs what reads the saved result, which Python keeps for it."""

    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        return (x @ block.a).sin().exp() @ block.b

    assert_same_with_library(block_of(function), rerun(policy(save("aten.sin"))), ops=1)


def test_weights_that_an_earlier_region_has_cast() -> None:
    """In forward a cast weight comes from outside of the second region; in recomputation it is cast there."""

    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        return (F.linear(F.linear(x, block.a).sin().exp(), block.b) @ block.a).tanh()

    def build() -> Stack:
        model = Stack(FunctionBlock(function), FunctionBlock(function))
        model.blocks[1].a, model.blocks[1].b = model.blocks[0].a, model.blocks[0].b
        return model

    value = rerun(policy({**save("attention"), "optional": True}))
    assert_same_with_library(build, value, around_forward=lambda: torch.autocast("cpu", torch.bfloat16), ops=3)


def test_a_mode_around_forward_alone() -> None:
    """Calls have the same signatures under a mode that watches the forward, and without it in backward."""

    def step(model: nn.Module) -> None:
        with FlopCounterMode(display=False):
            out = model(*tokens())
        out.sum().backward()

    models = []
    for native in (True, False):
        with with_library(native):
            model = sac.apply(built(llama_stack), rerun(POLICIES["matmuls"]))
            for _ in range(3):
                step(model)
            models.append(model)
    plain = built(llama_stack)
    for _ in range(3):
        step(plain)
    for model in models:
        assert_same(gradients(plain), gradients(model))


def test_another_value_is_found() -> None:
    """The same error: recomputation computes with another parameter than forward did."""

    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        h = x @ (block.a if block.runs % 2 else block.b)  # runs are counted in both passes
        return (h.sin() * h.cos()) @ block.b

    rules = policy({**save("attention"), "optional": True})
    assert "in recomputation it is" in error_of(lambda: applied(block_of(function), rerun(rules)))


def test_the_report_counts_its_ops() -> None:
    with with_library(), recorded() as seen:
        model = sac.apply(built(block_of(draws_from_its_own)), FULL)
        train(model, steps=3, make_input=square)
    assert sac.report(model).to_dict()["native_ops"] == seen.ops[-1] > 0


def test_saved_calls_are_described_alike() -> None:
    """What the library describes of a saved call's arguments is what Python does: other matches and errors use it."""

    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).softmax(-1) * 2.0 + torch.from_numpy(OUTSIDE)
        values, at = h.topk(3, sorted=False)
        found = torch.addmm(x[:, :3], h, block.b[:, :3], beta=0.5).sum(-1, keepdim=True, dtype=torch.float64)
        spread, mean = torch.var_mean(h, (0, 1), correction=2)
        rows = F.layer_norm(h[at[:, 0]], (8,))[:, :3]
        return h.gather(1, at).sin() * values + found.float() + spread + mean + rows

    described = []
    value = rerun(policy({"ops": "aten.sin", "do": "recompute"}, save("*")))
    for native in (False, True):
        saved: list[SavedValue] = []

        def noting(state: RerunState, one: SavedValue, *args: Any, saved: Any = saved, **more: Any) -> None:
            saved.append(one)
            SAVE(state, one, *args, **more)

        with with_library(native), mock.patch.object(RerunState, "save", noting):
            train(applied(block_of(function), value), make_input=square, steps=2)
        described.append([(str(one.site.op), without_ids(one.description)) for one in saved])
    assert len(described[0]) >= 2 * 14
    assert described[0] == described[1]


def without_ids(description: Any) -> Any:
    """A description without value ids, which are other ones where Python has signed a call."""
    if isinstance(description, tuple) and len(description) == 3 and isinstance(description[1], bool):
        return description[1:]
    return tuple(map(without_ids, description)) if isinstance(description, tuple) else description
