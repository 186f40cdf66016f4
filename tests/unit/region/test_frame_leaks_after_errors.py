"""What a failed recomputation held is free when its graph is dropped, without the cycle collector."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from tests.support.blocks import FULL, FunctionBlock, Stack, policy, save, selective, under_each_engine
from tests.support.custom_ops import Luck, lucky
from tests.support.recording import without_collector
from tests.support.stores import STORES

VALUES: dict[str, dict[str, Any]] = under_each_engine(
    {
        "full": FULL,
        "full, reentrant": {**FULL, "use_reentrant": True},
        "selective": selective(policy(save("matmul"))),
        **{f"full, {name}": {**FULL, **store} for name, store in STORES.items()},
        **{f"selective, {name}": selective(policy(save("matmul")), **store) for name, store in STORES.items()},
    }
)


def body(block: FunctionBlock, x: Tensor) -> Tensor:
    h = lucky(x @ block.a).sin()
    return (h @ block.b).topk(4).values.cos()


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_inputs_and_saved_values_are_free_after_an_error_in_recomputation(value: dict[str, Any]) -> None:
    model = sac.apply(Stack(FunctionBlock(body)), value)
    with without_collector():
        for _ in range(4):  # more than the store has slots
            x = torch.randn(8, 8)
            seen = weakref.ref(x)
            loss = model(x).sum()
            Luck.left = False
            try:
                loss.backward()
            except ValueError:
                pass
            else:
                raise AssertionError("nothing was recomputed")
            finally:
                Luck.left = True
            del x, loss
            assert seen() is None
