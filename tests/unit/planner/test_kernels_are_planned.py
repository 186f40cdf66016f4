"""Kernels in autograd Functions and named units are options of a plan as ops are: priced, and saved by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.planner.planning import make_plan
from tests.support.training import built
from tests.unit.planner.small_training import trained, within

HEADS, WIDTH, LENGTH = 4, 32, 64


def has_data(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.is_meta


class FlashAttnFunc(torch.autograd.Function):
    """Attention by a kernel that torch does not see, for queries of (batch, length, heads, width)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        if has_data(q):
            heads = (one.detach().clone().transpose(1, 2) for one in (q, k, v))
            given = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
            out.numpy()[...] = given.numpy()
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        return (grad * v) * out, (grad * q) * out, grad * k


def scaled(x: Tensor) -> Tensor:
    return torch.softmax(x * x, -1).sin()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scaled = sac.unit("scaled", scaled)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)) for part in (self.q, self.k, self.v))
        return x + self.out(self.scaled(FlashAttnFunc.apply(q, k, v).flatten(-2)))


class Language(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


X = torch.arange(4 * LENGTH).reshape(4, LENGTH) % 64


def plan_of(share: str, x: Tensor, **more: Any) -> Any:
    return make_plan(built(Language).to(x.device), (x,), share, loss_fn=lambda out: out.square().mean(), **more)


def test_attention_in_a_function_is_saved_first() -> None:
    """Of long rows it costs most per byte. The save-set names it, as it names torch's own."""
    made = plan_of("30%", torch.zeros(4, 4096, dtype=torch.long, device="meta"), device="h100")
    plan, _, full, _ = made.rows
    assert plan.peak <= made.budget
    assert any(rule.ops == ("attention",) for rule in made.policy.rules)
    assert plan.flops < 0.05 * full.flops


def test_a_named_unit_is_saved_by_its_name() -> None:
    shares = (40, 60, 20, 80)
    assert any("scaled" in rule.unit for share in shares for rule in plan_of(f"{share}%", X).policy.rules)


@pytest.mark.parametrize("part", [0.3, 0.7])
def test_a_budget_in_the_config_is_met(part: float) -> None:
    low, high = (max(trained(value, model=built(Language)).peaks) for value in ({"mode": "full"}, None))
    budget = int(low + part * (high - low))
    found = trained(within(budget), model=built(Language), steps=5)
    assert max(found.peaks) <= budget
    assert found.is_equal(trained(None, model=built(Language), steps=5))
    assert "not planned" not in str(sac.report(found.model))
