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
from tests.support.blocks import FULL, FunctionBlock, Stack, policy, selective, square
from tests.support.training import assert_same, built, train
from tests.support.ways import POLICIES

Body = Callable[[FunctionBlock, Tensor], Tensor]
MATMULS = selective(POLICIES["matmuls"])


def two_products(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).sin() @ block.b


def stack(body: Body = two_products, value: Any = "none") -> Stack:
    return sac.apply(built(lambda: Stack(FunctionBlock(body))), value)


def engines(model: nn.Module) -> tuple[str, str]:
    """What the report says: the last call's engine, and why the kind is not replayed."""
    (kind,) = sac.report(model).kinds
    return kind.engine, kind.no_replay


def assert_same_in_three_steps(body: Body, model: Stack) -> None:
    """Hold that training is as without us, and that nothing warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        assert_same(train(stack(body), steps=3, make_input=square), train(model, steps=3, make_input=square))


CHOICES: dict[str, tuple[Any, str, int]] = {
    # name: (value, the engine in the report, how often Python runs in three steps)
    "matmuls": (MATMULS, "replay", 3),
    "matmuls, rerun": ({**MATMULS, "engine": "rerun"}, "rerun", 6),
    "full": (FULL, "", 6),
    "no rules": (selective(policy()), "", 6),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_auto_replays(name: str) -> None:
    value, engine, runs = CHOICES[name]
    model = stack(value=value)
    assert_same_in_three_steps(two_products, model)
    assert (engines(model), model.blocks[0].runs) == ((engine, ""), runs)


# -- Where replay gives way

with torch.inference_mode():
    OFFSET = torch.ones(8, 8)


def is_made_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    """As in a compiled function: autograd saves what no mode has seen."""
    h = ((x @ block.a).sin() @ block.b) * 0.1
    guard = torch._C._DisableTorchDispatch()
    out = h.exp()
    del guard
    return out


def was_made_in_inference_mode(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a + OFFSET).sin() @ block.b


def goes_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h.detach().numpy()[:] *= 2
    return (h.cos() @ block.b).sin() * x


def results_written_to_arguments(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        values, places = torch.empty(8, 1), torch.empty(8, 1, dtype=torch.long)
        torch.max(x, 1, keepdim=True, out=(values, places))
    return (x @ block.a).sin() * values * places


def lies_elsewhere(block: FunctionBlock, x: Tensor) -> Tensor:
    other = x.detach() * 3
    moved = torch.empty(0).set_(other)
    other.add_(1)
    return (x @ block.a).sin() * moved


def takes_a_storage(block: FunctionBlock, x: Tensor) -> Tensor:
    doubled = x.detach() * 2
    return (x @ block.a).sin() * torch.empty(0).set_(doubled.untyped_storage(), 0, doubled.shape, doubled.stride())


NO_OP_MADE_IT = "reads a tensor that no op made and that is no input, parameter or module attribute"
GIVES_WAY: dict[Body, str] = {
    is_made_unseen: f"autograd {NO_OP_MADE_IT}",
    was_made_in_inference_mode: f"aten.add.Tensor {NO_OP_MADE_IT}",
    goes_unseen: "saved tensor 2 (float32[8, 8]) is replayed with other values than forward had",
    results_written_to_arguments: "aten.max.dim_max reads memory that no op has written to",
    lies_elsewhere: "aten.set_.source_Tensor gives a tensor other memory",
    takes_a_storage: "aten.set_.source_Storage_storage_offset takes a storage",
}


@pytest.mark.parametrize("body", GIVES_WAY, ids=lambda body: body.__name__)
def test_giving_way_is_reported_and_nothing_else_says_it(body: Body) -> None:
    """Unless replay was asked for: then a warning says it, once."""
    model, why = stack(body, selective(POLICIES["nothing"])), GIVES_WAY[body]
    assert_same_in_three_steps(body, model)
    assert engines(model) == ("rerun", why)
    assert model.blocks[0].runs > 3
    assert f"run again as Python, not replayed: {why}" in str(sac.report(model))
    asked = stack(body, selective(POLICIES["nothing"], engine="replay", verify="always"))
    with pytest.warns(SacWarning) as said:
        ours = train(asked, steps=3, make_input=square)
    assert_same(train(stack(body), steps=3, make_input=square), ours)
    assert [str(one.message).startswith(f"blocks.0: replay cannot be used here: {why}") for one in said] == [True]


def test_a_tensor_from_outside_that_is_written_to_before_backward_is_an_error() -> None:
    model = stack(lambda block, x: (x @ block.a + block.outside).sin() @ block.b, MATMULS)
    model.blocks[0].register_buffer("outside", torch.ones(8, 8))
    out = model(torch.randn(8, 8))
    model.blocks[0].outside.fill_(1)
    told = r"outside the region \(float32\[8, 8\]\) was changed in place after the forward"
    with pytest.raises(RegionError, match=told):
        out.square().sum().backward()


def test_below_hooks_and_in_a_region_auto_is_rerun() -> None:
    model = stack(value=MATMULS)
    for _ in range(2):
        with save_on_cpu():
            out = model(*square())
        out.sum().backward()
        assert engines(model) == ("rerun", "")
        sac.checkpoint(model, *square()).sum().backward()
        assert engines(model) == ("rerun", "")
    model(*square()).sum().backward()
    assert engines(model) == ("replay", "")
