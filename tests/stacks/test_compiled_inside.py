"""Something compiled inside an eager region: exact, one piece to rules, and reported.

That it stays compiled, attention by `flex_attention` too, is in tests/dangers/test_10_compiled_parts.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.errors import RegionError, SacWarning
from sac.reporting import decisions_of
from tests.support.blocks import FULL, alternate, llama_stack, policy, save, selective, tokens
from tests.support.compiling import vectorised_inductor
from tests.support.training import assert_same, built, train

ATTENTION_AND_PRODUCTS = selective(policy(save("attention"), alternate("matmul")))
STEPS = 3

# -- Parts of a Llama-like block


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


def training(
    compile_it: Callable[..., None], value: Any, *, warn: str = "error", apply_first: bool = False, **how: Any
) -> tuple[dict[str, Any], nn.Module]:
    """Three steps: the regions' first call, which is recorded, and calls that rest on it."""
    torch._dynamo.reset()
    model = built(llama_stack)
    if apply_first:
        sac.apply(model, value)
    compile_it(model, **how)
    if not apply_first:
        sac.apply(model, value)
    with warnings.catch_warnings():
        if warn:
            warnings.simplefilter(warn, SacWarning)  # type: ignore[arg-type]
        seen = train(model, steps=STEPS)
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in seen.items()}, model


@cache
def without_us(compile_it: Callable[..., None]) -> dict[str, Any]:
    return training(compile_it, "none", backend="aot_eager")[0]


@pytest.mark.parametrize("compile_it", [forwards, parts, wrapped_parts])
def test_full_is_exact(compile_it: Callable[..., None]) -> None:
    ours, model = training(compile_it, FULL, backend="aot_eager")  # there is no rule that could miss anything
    assert_same(without_us(compile_it), ours)
    (kind,) = sac.report(model).kinds
    if compile_it is forwards:  # the region keeps its input and nothing of the compiled graph's
        assert (kind.saved_bytes, kind.input_bytes) == (0, tokens()[0].nbytes)


@pytest.mark.parametrize("compile_it", [parts, wrapped_parts])
def test_rules_that_miss_something_are_told(compile_it: Callable[..., None]) -> None:
    with pytest.warns(SacWarning, match="which sac sees as one piece: rules do not apply to modules and ops inside"):
        ours, _ = training(compile_it, ATTENTION_AND_PRODUCTS, warn="", backend="aot_eager")
    assert_same(without_us(compile_it), ours)


def test_a_part_that_is_compiled_after_apply() -> None:
    value = selective(policy(save("matmul", module="self_attn.k_proj")))
    ours, _ = training(parts, value, warn="ignore", apply_first=True, backend="aot_eager")
    assert_same(without_us(parts), ours)


def inductor(**options: bool) -> dict[str, Any]:
    return {"backend": "inductor", "options": options}


@pytest.mark.slow
@vectorised_inductor
def test_wrong_order_with_rules_that_reach_nothing_is_an_error_with_the_reason() -> None:
    with (
        pytest.warns(SacWarning, match="torch.compile was applied to a part of the region"),
        pytest.raises(RegionError),
    ):
        training(forwards, selective(policy(save("matmul")), strict=True), warn="", **inductor())


@pytest.mark.slow
@vectorised_inductor
def test_a_compiled_graph_can_be_saved_as_a_whole() -> None:
    how = inductor(wrap_inductor_compiled_regions=True)
    expected, _ = training(wrapped_parts, "none", **how)
    ours, model = training(wrapped_parts, selective(policy(save("compiled"))), **how)
    assert_same(expected, ours)
    rows = [row for row in decisions_of(model) if row.op == "higher_order.inductor_compiled_code"]
    assert [row.decision for row in rows] == ["save"]
    (kind,) = sac.report(model).kinds
    assert (kind.rules[0].hits, kind.rules[0].saved_bytes > 0) == (1, True)
