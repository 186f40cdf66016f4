"""`sac.is_recomputing` is true while a region's Python runs again, and at no other time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac

seen: list[bool] = []


class Kernel(torch.autograd.Function):
    """Its result comes from where no op is seen, so that replay calls it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        seen.append(sac.is_recomputing())
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        out.numpy()[...] = x.detach().numpy() * 2
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Logging(nn.Module):
    """Notes what it is told, before an op or, with ``calls``, in a function of its own; in backward it may fail."""

    def __init__(self, calls: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.linear, self.calls, self.fails = nn.Linear(4, 4), calls, fails

    def forward(self, x: Tensor) -> Tensor:
        if self.calls:
            return Kernel.apply(self.linear(x).tanh()).sin()
        seen.append(sac.is_recomputing())
        if self.fails and sac.is_recomputing():
            raise ValueError("again")
        return self.linear(x).sin().exp()


def trained(block: nn.Module, value: Any, grad: bool = True) -> list[bool]:
    model = nn.Module()
    model.blocks = nn.ModuleList([block])
    sac.apply(model, {**value, "blocks": ["blocks.*"]})
    seen.clear()
    with torch.set_grad_enabled(grad):
        out = block(torch.ones(2, 4, requires_grad=True))
    seen.append(sac.is_recomputing())
    if grad:
        out.sum().backward()
    assert not sac.is_recomputing()
    return seen


POLICY = {"schema": "sac/v1", "name": "nothing", "rules": [{"id": "sines", "ops": "aten.sin", "do": "save"}]}
REPLAY = {"mode": "selective", "policy": POLICY, "engine": "replay"}


@pytest.mark.parametrize(
    ("value", "calls", "expected"),
    [
        ({"mode": "full"}, False, [False, False, True]),
        ({"mode": "full", "use_reentrant": True}, False, [False, False, True]),
        ({**REPLAY, "engine": "rerun"}, False, [False, False, True]),
        (REPLAY, False, [False, False]),  # no Python runs again
        (REPLAY, True, [False, False, True]),
    ],
    ids=["full", "reentrant", "rerun", "replay", "replay calls a function"],
)
def test_it_is_true_in_the_second_run_of_a_forward(value: Any, calls: bool, expected: list[bool]) -> None:
    assert trained(Logging(calls), value) == expected
    assert trained(Logging(calls), value, grad=False) == [False, False]


def test_an_error_in_the_second_run_ends_it() -> None:
    with pytest.raises(ValueError, match="again"):
        trained(Logging(fails=True), {"mode": "full"})
    assert not sac.is_recomputing()
