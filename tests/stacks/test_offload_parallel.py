"""`do: offload` under FSDP2, DDP, tensor and sequence parallelism on two ranks: gradients as without sac."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stacks.composes import outcomes
from tests.stacks.composition import differences
from tests.stacks.offloading import on_a_device
from tests.support.ranks import run_ranks

STACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP": ("data_parallel:ddp", {}),
    "FSDP2": ("data_parallel:fsdp2", {"micro_batches": 2}),
    "tensor parallel": ("model_parallel:tensor_parallel", {}),
    "DTensor": ("model_parallel:tensor_parallel", {"kind": "dtensor"}),
    "sequence parallel": ("model_parallel:tensor_parallel", {"kind": "sequence"}),
}


@pytest.mark.parametrize("name", STACKS)
def test_same_gradients(name: str) -> None:
    stack, options = STACKS[name]
    plain = outcomes(stack, "none", **options)
    for (found, copies, races), reference in zip(run_ranks(2, on_a_device, stack, options), plain, strict=True):
        assert differences(found, reference) == []
        assert copies > 0
        assert races == []
