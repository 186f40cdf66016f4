"""sac.apply on a model in 4 bits by bitsandbytes, with adapters of PEFT."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import sac
from tests.stacks import qlora_models as models
from tests.stacks.composition import assert_full_and_selective
from tests.stacks.other_trainers import qlora
from tests.support.recording import Recorder

PRODUCT, DEQUANTISE = "bitsandbytes.gemm_4bit", "bitsandbytes.dequantize_4bit"


@pytest.mark.parametrize(
    "adapter",
    [
        {},
        {"lora_dropout": 0.1},
        {"use_dora": True},
    ],
    ids=["lora", "dropout", "dora"],
)
def test_gradients_are_equal_and_kept_bytes_fall(adapter: dict[str, Any]) -> None:
    assert_full_and_selective(functools.partial(qlora, **adapter))


def ran(value: Any) -> Recorder:
    """What one step runs, after a first one."""
    model = sac.apply(models.build(), value)
    models.loss(model).backward()
    with Recorder() as seen:
        models.loss(model).backward()
    return seen


def test_products_in_4_bits_are_matmuls_to_a_policy() -> None:
    """The last of a layer feeds a sum that nothing reads, so that full recomputation stops before it."""
    plain, full, selective = (ran(value).count(PRODUCT) for value in ("none", "full", "selective"))
    each = models.LAYERS * models.LINEARS
    assert (plain, full) == (each, 2 * each - models.LAYERS)
    # `adapters` saves the sums with an adapter's result; the block runs again as Python, and with it their first terms.
    assert selective == plain + models.LAYERS * len(models.ADAPTED)


def test_recomputation_dequantises_no_more_than_backward_needs() -> None:
    assert [ran(value).count(DEQUANTISE) for value in ("full", "selective")] == [ran("none").count(DEQUANTISE)] * 2


def test_gradients_reach_the_adapters_alone() -> None:
    assert all("lora_" in name for name in qlora("selective").gradients)
