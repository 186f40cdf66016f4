"""Something compiled inside an eager region: exact, recomputed as one piece, and said so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.errors import RegionError, SacWarning
from sac.reporting import decisions_of
from tests.support.blocks import FULL, alternate, llama_stack, policy, save, selective, tokens
from tests.support.training import assert_same, built, train

ATTENTION_AND_PRODUCTS = selective(policy(save("attention"), alternate("matmul")))


def forwards(model: nn.Module, **how: Any) -> None:
    """The wrong order: the region comes to lie around what is compiled."""
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **how)


def parts(model: nn.Module, **how: Any) -> None:
    for block in model.blocks:
        block.mlp.compile(**how)


def wrapped_parts(model: nn.Module, **how: Any) -> None:
    for block in model.blocks:
        block.mlp = torch.compile(block.mlp, **how)


def functions(model: nn.Module, **how: Any) -> None:
    """What no module tells: a function that the block's own code calls."""
    for block in model.blocks:
        block.mlp.forward = torch.compile(type(block.mlp).forward.__get__(block.mlp), **how)


def training(compile_it: Callable[..., None], value: Any, **how: Any) -> tuple[dict[str, Any], nn.Module]:
    """Three steps: the regions' first call, which is recorded, and calls that rest on it."""
    torch._dynamo.reset()
    model = built(llama_stack)
    compile_it(model, **how)
    sac.apply(model, value)
    seen = train(model, steps=3)
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in seen.items()}, model


INSIDE = {"forwards": forwards, "parts": parts, "wrapped parts": wrapped_parts, "functions": functions}


@pytest.mark.parametrize("compile_it", INSIDE.values(), ids=INSIDE.keys())
def test_full_is_exact_and_the_report_says_what_it_is_blind_to(compile_it: Callable[..., None]) -> None:
    expected, _ = training(compile_it, "none", backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)  # there is no rule that could miss anything
        ours, model = training(compile_it, FULL, backend="aot_eager")
    assert_same(expected, ours)
    (kind,) = sac.report(model).kinds
    assert kind.compiled_graphs == 1
    assert "compiled graphs inside, each one piece that rules do not look into: 1" in str(sac.report(model))


@pytest.mark.parametrize("compile_it", [parts, wrapped_parts, functions])
def test_rules_that_miss_something_are_told(compile_it: Callable[..., None]) -> None:
    expected, _ = training(compile_it, "none", backend="aot_eager")
    with pytest.warns(SacWarning) as caught:
        ours, _ = training(compile_it, ATTENTION_AND_PRODUCTS, backend="aot_eager")
    assert [str(one.message) for one in caught if issubclass(one.category, SacWarning)] == [
        "blocks.0 and 1 more regions: torch.compile was applied to a part of the region, which sac sees as one "
        "piece: rules do not apply to modules and ops inside of it, and it runs again as a whole\n"
        "    fix: compile the whole block or model instead, after sac.apply: block.compile() or torch.compile(model)"
    ]
    assert_same(expected, ours)


def test_nothing_is_said_where_nothing_is_compiled() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        _, model = training(lambda model: None, ATTENTION_AND_PRODUCTS)
    assert [kind.compiled_graphs for kind in sac.report(model).kinds] == [0]


def inductor(**options: bool) -> dict[str, Any]:
    return {"backend": "inductor", "options": options}


@pytest.mark.slow
def test_wrong_order_with_rules_that_reach_nothing_is_an_error_with_the_reason() -> None:
    with (
        pytest.warns(SacWarning, match="torch.compile was applied to a part of the region"),
        pytest.raises(RegionError),
    ):
        training(forwards, selective(policy(save("matmul")), strict=True), **inductor())


@pytest.mark.slow
def test_a_compiled_graph_can_be_saved_as_a_whole() -> None:
    wraps = {"wrap_inductor_compiled_regions": True}
    value = selective(policy(save("compiled")))
    expected, _ = training(wrapped_parts, "none", **inductor(**wraps))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        ours, model = training(wrapped_parts, value, **inductor(**wraps))
    assert_same(expected, ours)
    rows = [row for row in decisions_of(model) if row.op == "higher_order.inductor_compiled_code"]
    assert [row.decision for row in rows] == ["save"]
    (kind,) = sac.report(model).kinds
    assert (kind.rules[0].hits, kind.rules[0].saved_bytes > 0) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("value", [FULL, selective(policy(save("matmul", module="self_attn.**")))])
def test_inductor_inside_is_exact(value: Any) -> None:
    """The same graphs run in recomputation, so that even inductor's own bits repeat."""
    expected, _ = training(wrapped_parts, "none", **inductor())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        ours, _ = training(wrapped_parts, value, **inductor())
    assert_same(expected, ours)


def test_input_of_all_regions_is_what_is_kept() -> None:
    """A region around a compiled block keeps its input and nothing of the compiled graph's."""
    _, model = training(forwards, FULL, backend="aot_eager")
    (x,) = tokens()
    (kind,) = sac.report(model).kinds
    assert (kind.saved_bytes, kind.input_bytes) == (0, x.nbytes)
