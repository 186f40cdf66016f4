"""What must not happen twice is saved by default: ops with effects, and kernels that communicate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sac

calls: list[str] = []


@torch.library.custom_op("sac_effects::sent", mutates_args=())
def sent(x: Tensor) -> Tensor:
    calls.append("sent")
    return x * 2


@sent.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


sent.register_autograd(lambda ctx, grad: grad * 2)
if not hasattr(torch.library, "EffectType"):
    pytest.skip("this torch registers no effects", allow_module_level=True)
torch.library._register_effectful_op("sac_effects::sent", torch.library.EffectType.ORDERED)


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        calls.append("reduced")
        out = torch.empty_like(x)
        out.numpy()[...] = x.detach().numpy() * 2
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Block(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.out, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.function(self.inner(x).tanh()).sin())


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(function: Any, value: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(function), Block(function))
    if value is not None:
        sac.apply(model, {**value, "blocks": ["*"]})
    found = []
    for _ in range(3):
        calls.clear()
        model(torch.ones(3, 4)).square().sum().backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return found


def rules(*rules: dict[str, str]) -> dict[str, Any]:
    return {"mode": "selective", "policy": {"schema": "sac/v1", "name": "p", "rules": [{"id": "r", **rules[0]}]}}


OTHER = rules({"ops": "aten.cos", "do": "save", "optional": True})  # type: ignore[dict-item]


@pytest.mark.parametrize("value", [{"mode": "full"}, OTHER, {**OTHER, "engine": "rerun"}])
def test_an_op_with_an_effect_runs_once(value: dict[str, Any]) -> None:
    expected = trained(sent, None)
    assert all(map(torch.equal, expected, trained(sent, value)))
    assert calls == ["sent"] * 2


def test_a_function_that_communicates_runs_once(group: None) -> None:
    expected = trained(Reduced.apply, None)
    assert all(map(torch.equal, expected, trained(Reduced.apply, OTHER)))
    assert calls == ["reduced"] * 2


def test_a_rule_has_a_function_that_communicates_run_again(group: None) -> None:
    expected = trained(Reduced.apply, None)
    again = trained(Reduced.apply, rules({"function": "Reduced", "do": "recompute"}) | {"engine": "replay"})
    assert all(map(torch.equal, expected, again))
    assert calls == ["reduced"] * 4
