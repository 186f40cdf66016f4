"""Recomputation runs under the autocast of the forward, whatever autocast backward runs under."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from sac.engine.thread_state import Autocast
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


@pytest.mark.parametrize("forward", SURROUNDINGS)
def test_everything_about_it_is_seen_and_put_back(forward: str) -> None:
    seen = Noted()

    def body(x: Tensor) -> Tensor:
        seen.append(autocast_now())
        return x.sin().cos()

    x = torch.ones(2, requires_grad=True)
    with SURROUNDINGS[forward]():
        out = sac.checkpoint(body, x)
    with cast(FP16, cache_enabled=False)():
        before = autocast_now()
        out.sum().backward()
        assert autocast_now() == before
    first, second = seen
    assert first == second


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


def test_a_device_type_that_only_the_inputs_have_is_seen() -> None:
    """A CPU build knows of CUDA's autocast, and a meta tensor has none."""
    meta = torch.ones(2, device="meta")
    autocast = Autocast([torch.ones(2), meta, _Elsewhere()])  # type: ignore[list-item]
    torch.set_autocast_dtype("xpu", BF16)
    try:
        with ExitStack() as stack:
            autocast.enter_on(stack)
            assert torch.get_autocast_dtype("xpu") == FP16
        assert torch.get_autocast_dtype("xpu") == BF16
    finally:
        torch.set_autocast_dtype("xpu", FP16)


class _Elsewhere:
    """What is asked of a tensor on a device that is not at hand."""

    is_cpu = is_cuda = False
    device = torch.device("xpu")


def test_nothing_is_entered_where_autocast_is_the_same() -> None:
    """Neither off nor on: the cache of the surrounding autocast stays in use."""
    for surrounding in ("off", "bf16"):
        with SURROUNDINGS[surrounding](), ExitStack() as stack:
            Autocast([torch.ones(2)]).enter_on(stack)
            assert torch.autocast_increment_nesting() == 1 + (surrounding == "bf16")
            torch.autocast_decrement_nesting()
