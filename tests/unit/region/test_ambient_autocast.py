"""Recomputation runs under the autocast of the forward, whatever autocast backward runs under."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from tests.support.blocks import FunctionBlock
from tests.support.pairs import in_pairs
from tests.support.runs import Noted
from tests.support.stateful import WAYS, Surrounding, Way, as_it_is, stack_of, stepped
from tests.support.training import assert_same

BF16, FP16 = torch.bfloat16, torch.float16


def cast(dtype: torch.dtype, **options: Any) -> Surrounding:
    return lambda: torch.autocast("cpu", dtype, **options)


@contextmanager
def both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Any:
    with outer, inner:
        yield


SURROUNDINGS: dict[str, Surrounding] = {
    "off": nullcontext,
    "bf16": cast(BF16),
    "fp16": cast(FP16),
    "no cache": cast(BF16, cache_enabled=False),
    "disabled in bf16": lambda: both(cast(BF16)(), cast(BF16, enabled=False)()),
    "disabled in fp16": lambda: both(cast(FP16)(), cast(FP16, enabled=False)()),
    "fp16 in bf16": lambda: both(cast(BF16)(), cast(FP16)()),
    "enabled in disabled": lambda: both(cast(BF16, enabled=False)(), cast(FP16)()),
}


def products(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x.float() @ block.a).sin()
    with torch.autocast("cpu", enabled=False):
        h = h.float() @ block.b
    with torch.autocast("cpu"):  # takes its dtype over from what surrounds the region
        return (h.cos() @ block.a).sigmoid() @ block.b.tanh()


@in_pairs(forward=SURROUNDINGS.keys(), backward=["off", "bf16", "fp16"], way=WAYS)
def test_recomputation_runs_under_the_autocast_of_forward(forward: str, backward: str, way: Way) -> None:
    around = {"forward": SURROUNDINGS[forward], "backward": SURROUNDINGS[backward]}
    plain = stepped(stack_of(products), as_it_is, **around)
    assert_same(plain, stepped(stack_of(products), way, **around))


def autocast_now() -> Any:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def test_autocast_is_put_back_when_recomputation_raises() -> None:
    runs = Noted()

    def body(x: Tensor) -> Tensor:
        runs.append(autocast_now())
        if len(runs) == 2:
            raise KeyError("the user's own")
        return x.sin().cos()

    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", BF16):
        out = sac.checkpoint(body, x)
    before = autocast_now()
    with pytest.raises(KeyError):
        out.sum().backward()
    assert autocast_now() == before
    out.sum().backward()
    assert runs[0] == runs[1] == runs[2] != before
