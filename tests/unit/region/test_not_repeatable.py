"""Functions that do another thing in recomputation than in forward: an error that says what, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from sac.errors import RegionError
from tests.support.cases import WIDTH, hidden
from tests.support.runs import Noted


class Changing:
    """Runs `first`, and `then` from the second time on."""

    def __init__(self, first: Callable[..., Any], then: Callable[..., Any]) -> None:
        self.bodies = Noted(first, then)

    def __call__(self, h: Tensor) -> Any:
        body = self.bodies[0]
        del self.bodies[:-1]
        return body(h)


TO_THE_END = {"early_stop": False}
REENTRANT = {"use_reentrant": True}
CHANGES = [
    (TO_THE_END, torch.tanh, lambda h: h.tanh().tanh(), "it saved 2 tensors in recomputation, and 1 in forward"),
    (
        {},
        torch.tanh,
        lambda h: h[:2].tanh().repeat(2, 1),
        r"saved tensor 0 was float32\[4, 8\] in forward, but is float32\[2, 8\] in recomputation",
    ),
    (
        REENTRANT,
        torch.sin,
        lambda h: h.sin()[:2],
        r"result 0 was float32\[4, 8\] on cpu in forward and is float32\[2, 8\] on cpu in recomputation",
    ),
    (
        REENTRANT,
        torch.sin,
        Tensor.double,
        r"result 0 was float32\[4, 8\] on cpu in forward and is float64\[4, 8\] on cpu in recomputation",
    ),
    (
        REENTRANT,
        lambda h: (h.sin(), h.cos()),
        torch.sin,
        r"result 1 was float32\[4, 8\] on cpu in forward and is not a tensor in recomputation",
    ),
]


@pytest.mark.parametrize(("options", "first", "then", "told"), CHANGES)
def test_another_thing_in_recomputation_is_an_error(
    options: dict[str, Any], first: Callable[..., Any], then: Callable[..., Any], told: str
) -> None:
    x, h = hidden(4, WIDTH)
    *_, out = torch.utils._pytree.tree_leaves(sac.checkpoint(Changing(first, then), h, **options))
    with pytest.raises(RegionError, match=rf"Changing: {told}.*\n    fix: "):
        out.sum().backward()
    assert x.grad is None


def test_determinism_check_none_does_not_compare() -> None:
    x, h = hidden(4, WIDTH)
    body = Changing(lambda h: h.tanh(), lambda h: h.double().tanh().float())
    sac.checkpoint(body, h, determinism_check="none").sum().backward()
    assert x.grad is not None
