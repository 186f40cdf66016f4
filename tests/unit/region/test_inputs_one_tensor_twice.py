"""A tensor that is passed as several arguments is one tensor again in recomputation: functions ask whether it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from sac.full import FullConfig
from tests.support.runs import Noted
from tests.support.training import assert_same

Call = Callable[..., Any]

STORES = {
    "whole": FullConfig(),
    "host": FullConfig(store="host"),
    "contiguous": FullConfig(store="contiguous", num_checkpoints=3),
    "contiguous, all": FullConfig(store="contiguous", num_checkpoints=3, keep="all"),
    "contiguous, the second": FullConfig(
        store="contiguous", num_checkpoints=3, keep=lambda position, tensor: position == 1
    ),
}
every_store = pytest.mark.parametrize("store", STORES.values(), ids=STORES.keys())
both_modes = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def plainly(function: Call, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def as_region(reentrant: bool, config: FullConfig | None = None) -> Call:
    return lambda function, *args, **kwargs: sac.checkpoint(
        function, *args, use_reentrant=reentrant, config=config, **kwargs
    )


def compared(run: Call, function: Call) -> dict[str, Tensor]:
    torch.manual_seed(0)
    function(run)
    torch.manual_seed(0)
    return function(run)  # the second call of one sort, which may go without a mode


@both_modes
def test_the_same_tensor_inside_containers_and_keywords(reentrant):
    ways = Noted()

    def function(a: Tensor, pair: list[Tensor], *, mask: Tensor, last: dict[str, Tensor]) -> Tensor:
        ways.append((a is pair[0], a is pair[1], a is last["a"], mask is last["mask"]))
        return (a * pair[0] * pair[1]).masked_fill(mask, 0.0)

    x, mask = torch.randn(4, requires_grad=True), torch.tensor([True, False, False, True])
    other = torch.randn(4, requires_grad=True)
    out = as_region(reentrant)(function, x, [x, other], mask=mask, last={"a": x, "mask": mask})
    out.sum().backward()
    assert ways == [(True, False, True, True)] * 2
    expected = torch.autograd.grad((x * x * other).masked_fill(mask, 0.0).sum(), [x, other])
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(other.grad, expected[1])


@every_store
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_write_through_one_argument_is_seen_through_the_other(needs_grad, store):
    def function(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        a.mul_(2.0)
        return (b * w).sin()

    def program(run: Call) -> dict[str, Tensor]:
        x, w = torch.randn(4, requires_grad=needs_grad), torch.randn(4, requires_grad=True)
        h = x * 3.0
        out = run(function, h, h, w)
        out.sum().backward()
        return {"out": out.detach(), "w": w.grad, "h": h.detach()} | ({"x": x.grad} if needs_grad else {})  # type: ignore[dict-item]

    assert_same(compared(plainly, program), compared(as_region(False, store), program))
