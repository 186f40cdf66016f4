"""`fully_shard` (FSDP2): regions before and after it, units inside regions, accumulated gradients, all its settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.stacks.composes import (
    assert_composes,
    assert_everything_figures,
    assert_full_figures,
    assert_same_gradients,
    outcomes,
)
from tests.stacks.data_parallel import fsdp2
from tests.support.ranks import run_ranks

EXPERTS: dict[str, Any] = {"block": "experts", "nested": True}
ACCUMULATE: dict[str, Any] = {"micro_batches": 2, "reshard_in_between": False}


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("full", {}),
        ("selective", {}),
        ("selective", {"order": "after", "micro_batches": 2}),
        ("full", {"bf16": True, "prefetch": True}),
        ("selective", {"reshard_after_forward": False}),
        ("full", {"offload": True}),
        ("full", {"unshard_first": True}),
        ("selective", {"frozen": ("embed", "blocks.0", "norm")}),
    ],
    ids=str,
)
def test_composes(mode: str, options: dict[str, Any]) -> None:
    assert_composes("fsdp2", mode, **options)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("full", {}),
        ("selective", {}),
        ("full", {"order": "after", "bf16": True}),
        ("full", ACCUMULATE),
        ("selective", ACCUMULATE),
        ("selective", {"unshard_first": True}),
        ("full", {"prefetch": True}),
    ],
    ids=str,
)
def test_units_inside_a_region(mode: str, options: dict[str, Any]) -> None:
    assert_composes("fsdp2", mode, **EXPERTS, **options)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="tells what torch 2.13 does")
def test_stock_selective_checkpointing_fails_where_a_unit_is_still_gathered() -> None:
    assert all("not found in storage" in error for error in run_ranks(2, error_of_stock))


def error_of_stock() -> str:
    with pytest.raises(Exception) as caught:
        fsdp2("torch selective", **EXPERTS, **ACCUMULATE)
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, EXPERTS | ACCUMULATE, EXPERTS | {"unshard_first": True}], ids=str)
def test_saving_everything_keeps_no_gathered_weights(options: dict[str, Any]) -> None:
    assert_same_gradients("fsdp2", "selective, everything", **options)
    assert_everything_figures("fsdp2", "selective, everything", **options)


def test_four_ranks_that_reshard_to_two() -> None:
    assert_composes("fsdp2", "selective", world=4, reshard_after_forward=2)


@pytest.mark.parametrize("options", [{}, EXPERTS | ACCUMULATE], ids=str)
def test_reentrant(options: dict[str, Any]) -> None:
    assert_same_gradients("fsdp2", "full, reentrant", **options)
    assert_full_figures("fsdp2", "full, reentrant", **options)


@pytest.mark.parametrize(
    ("mode", "options"),
    [("full, inputs on the host", {}), ("selective, inputs on the host", EXPERTS | ACCUMULATE)],
    ids=str,
)
def test_inputs_on_the_host(mode: str, options: dict[str, Any]) -> None:
    assert_same_gradients("fsdp2", mode, **options)
    whole = outcomes("fsdp2", mode.split(",")[0], **options)[0]
    assert outcomes("fsdp2", mode, **options)[0].flops == whole.flops


@pytest.mark.parametrize(
    ("mode", "options"), [("selective, scattered", {}), ("full, scattered", EXPERTS | ACCUMULATE)], ids=str
)
def test_inputs_scattered_over_the_ranks(mode: str, options: dict[str, Any]) -> None:
    """The ranks have the same data, as tensor-parallel ones do; each keeps its half of the inputs."""
    assert_same_gradients("fsdp2", mode, same_data=True, **options)
    ours = outcomes("fsdp2", mode, same_data=True, **options)[0]
    whole = outcomes("fsdp2", mode.split(",")[0], same_data=True, **options)[0]
    assert ours.kept_bytes < whole.kept_bytes
    assert ours.flops == whole.flops
