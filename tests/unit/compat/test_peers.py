"""What differs from torch, DeepSpeed, fairscale and xformers by design, as far as no other test checks it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import ConfigError


def test_keywords_that_torch_would_take_go_to_the_function() -> None:
    def region(x: Tensor, *, context_fn: float, debug: float) -> Tensor:
        return x * context_fn * debug

    x = torch.ones(2, requires_grad=True)
    sac.checkpoint(region, x, context_fn=3.0, debug=5.0).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 15.0))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU())


def with_ops(ops: list[str]) -> dict[str, Any]:
    rules = [{"id": "listed", "ops": ops, "do": "save"}] if ops else []
    policy = {"schema": "sac/v1", "name": "listed", "default": "recompute", **({"rules": rules} if rules else {})}
    return {"mode": "selective", "policy": policy, "blocks": ["blocks.*"]}


@pytest.mark.parametrize("ops", [[], ["aten.relu"], ["aten.relu", "aten.addmm"], ["*"]], ids=len)
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_list_of_ops_is_a_policy(ops: list[str], needs_grad: bool, autocast: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Module()
    plain.blocks = nn.ModuleList(layers() for _ in range(3))
    listed = sac.apply(copy.deepcopy(plain), with_ops(ops))
    x = torch.rand(4, 10)
    gradients = []
    for model in (plain, listed):
        h = given = x.clone().requires_grad_(needs_grad)
        with torch.autocast("cpu", enabled=autocast):
            for block in model.blocks:
                h = block(h)
        h.sum().backward()
        gradients.append([given.grad] * needs_grad + [one.grad for one in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_function_is_no_policy() -> None:
    with pytest.raises(ConfigError, match="policy"):
        sac.apply(nn.Sequential(layers()), {"mode": "selective", "policy": lambda ctx, op, *args: True})
