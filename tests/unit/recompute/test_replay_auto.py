"""`engine: auto`: replay where it is as good as rerun in every respect, and rerun without a word where it is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import sac
from sac.errors import RegionError, SacWarning
from tests.support.blocks import FULL, FunctionBlock, Stack, policy, save, selective, square
from tests.support.replay_programs import POLICIES, applied, block_of, python_runs
from tests.support.training import assert_same, built, train

MATMULS = POLICIES["matmuls"]
Body = Callable[[FunctionBlock, Tensor], Tensor]


def two_products(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).sin() @ block.b


def trained(value: Any, body: Body, **training: Any) -> tuple[dict[str, Tensor], Stack]:
    """Three steps in which a warning is an error."""
    model = applied(block_of(body), value)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        return train(model, steps=3, **{"make_input": square, **training}), model


def engines(model: nn.Module) -> tuple[str, str]:
    """What the report says: the last call's engine, and why the kind is not replayed."""
    (kind,) = sac.report(model).kinds
    return kind.engine, kind.no_replay


def test_auto_replays() -> None:
    for engine in ({}, {"engine": "auto"}):
        seen, model = trained(selective(MATMULS, **engine), two_products)
        assert_same(train(built(block_of(two_products)), steps=3, make_input=square), seen)
        assert (engines(model), python_runs(model)) == (("replay", ""), 3)


NOT_REPLAYED: dict[str, tuple[Any, str]] = {
    "full": (FULL, ""),
    "no rules": (selective(policy()), ""),
    "rerun": (selective(MATMULS, engine="rerun"), "rerun"),
}


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_what_auto_does_not_replay(name: str) -> None:
    value, engine = NOT_REPLAYED[name]
    model = applied(block_of(two_products), value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)  # the rule on a module that is not there
        for _ in range(3):
            model(*square()).sum().backward()
    assert engines(model) == (engine, "")


# Where replay gives way

with torch.inference_mode():
    OFFSET = torch.ones(8, 8)


def exp_unseen(x: Tensor) -> Tensor:
    """As in a compiled function: autograd saves what no mode has seen."""
    guard = torch._C._DisableTorchDispatch()
    out = x.exp()
    del guard
    return out


def is_made_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    return exp_unseen((x @ block.a) * 0.1) @ block.b


def is_made_unseen_last(block: FunctionBlock, x: Tensor) -> Tensor:
    return exp_unseen(((x @ block.a).sin() @ block.b) * 0.1)


def was_made_in_inference_mode(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a + OFFSET).sin() @ block.b


def goes_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h.detach().numpy()[:] *= 2
    return (h.cos() @ block.b).sin() * x


NO_OP_MADE_IT = "autograd reads a tensor that no op made and that is no input, parameter or module attribute"
GIVES_WAY: dict[Body, str] = {
    is_made_unseen: NO_OP_MADE_IT,
    is_made_unseen_last: NO_OP_MADE_IT,
    was_made_in_inference_mode: NO_OP_MADE_IT.replace("autograd", "aten.add.Tensor"),
    goes_unseen: "saved tensor 2 (float32[8, 8]) is replayed with other values than forward had",
}


@pytest.mark.parametrize("body", GIVES_WAY, ids=lambda body: body.__name__)
def test_giving_way_is_reported_and_nothing_else_says_it(body: Body) -> None:
    rule = policy(save("matmul", call={"index": 1}))  # the second product, so that the first is recomputed
    chosen = POLICIES["nothing"] if body is goes_unseen else rule
    seen, model = trained(selective(chosen), body)
    assert_same(train(built(block_of(body)), steps=3, make_input=square), seen)
    assert engines(model) == ("rerun", GIVES_WAY[body])
    assert python_runs(model) >= 3
    assert f"run again as Python, not replayed: {GIVES_WAY[body]}" in str(sac.report(model))


# Tensors from outside


def reads_outside(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a + block.outside).sin() @ block.b


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_a_tensor_from_outside_that_is_written_to_before_backward_is_an_error(kind: str) -> None:
    def build() -> Stack:
        block = FunctionBlock(reads_outside)
        if kind == "buffer":
            block.register_buffer("outside", torch.ones(8, 8))
        else:
            block.outside = torch.ones(8, 8)
        return Stack(block)

    model = applied(build, selective(MATMULS))
    out = model(torch.randn(8, 8))
    model.blocks[0].outside.fill_(1)
    with pytest.raises(
        RegionError, match=r"outside the region \(float32\[8, 8\]\) was changed in place after the forward"
    ):
        out.square().sum().backward()


# Hooks


def test_inside_hooks_auto_is_rerun() -> None:
    model = applied(block_of(two_products), selective(MATMULS))
    for _ in range(2):
        with save_on_cpu():
            out = model(*square())
        out.sum().backward()
        assert engines(model) == ("rerun", "")
    model(*square()).sum().backward()
    assert engines(model) == ("replay", "")


def test_a_region_in_a_region_is_rerun() -> None:
    model = applied(lambda: Stack(FunctionBlock(two_products), FunctionBlock(two_products)), selective(MATMULS))
    for _ in range(2):
        sac.checkpoint(model, *square()).sum().backward()
        assert engines(model) == ("rerun", "")
