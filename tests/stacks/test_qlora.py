"""sac.apply on a model in 4 bits by bitsandbytes, with adapters of PEFT."""

from __future__ import annotations

from typing import Any

import sac
from tests.stacks import qlora_models as models
from tests.support.recording import Recorder

PRODUCT, DEQUANTISE = "bitsandbytes.gemm_4bit", "bitsandbytes.dequantize_4bit"


def ran(value: Any) -> Recorder:
    """What one step runs, after a first one."""
    model = sac.apply(models.build(), value)
    models.loss(model).backward()
    with Recorder() as seen:
        models.loss(model).backward()
    return seen


def test_products_in_4_bits_are_matmuls_to_a_policy_and_are_dequantised_once() -> None:
    """The last of a layer feeds a sum that nothing reads, so that full recomputation stops before it."""
    plain, full, selective = (ran(value) for value in ("none", "full", "selective"))
    each = models.LAYERS * models.LINEARS
    assert (plain.count(PRODUCT), full.count(PRODUCT)) == (each, 2 * each - models.LAYERS)
    # The scales of a weight in 4 bits are attributes of it, so the block is replayed: no product runs again.
    assert selective.count(PRODUCT) == each
    assert plain.count(DEQUANTISE) == full.count(DEQUANTISE) == selective.count(DEQUANTISE)
