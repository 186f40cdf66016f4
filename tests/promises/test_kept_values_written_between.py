"""What a replay starts from, written to between forward and backward, is computed again."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

import sac


class Block(nn.Module):
    """``op`` is the one whose result is kept and returned: a product, or a norm, which has several results."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ self.first if self.op == "mm" else nn.functional.layer_norm(x, (8,), self.first[0])
        return h, h.exp() @ self.second  # backward needs the result of exp, which starts from h


def hooks(packs: bool) -> contextlib.AbstractContextManager[None]:
    """Those of torch leave a tensor on the CPU where it is."""
    return torch.autograd.graph.save_on_cpu() if packs else contextlib.nullcontext()


def gradients(op: str, *, packs: bool = False, **settings: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleList([Block(op)])
    x = torch.randn(4, 8, requires_grad=True)
    if settings:
        rules = [{"id": "kept", "ops": f"aten.{op}", "do": "save"}]
        policy = {"schema": "sac/v1", "name": "one-op", "rules": rules}
        sac.apply(model, {"mode": "selective", "policy": policy, "blocks": ["*"], **settings})
    for _ in range(2):
        with hooks(packs):
            h, out = model[0](x)
        with torch.no_grad():
            h.zero_()
        out.sum().backward()
    return [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]


@pytest.mark.parametrize("verify", ["first", "always", "never"])
@pytest.mark.parametrize("engine", ["replay", "rerun"])
@pytest.mark.parametrize("op", ["mm", "native_layer_norm"])
@pytest.mark.parametrize("packs", [False, True])
def test_a_write_to_a_result_that_is_kept_is_not_seen_by_backward(
    packs: bool, op: str, engine: str, verify: str
) -> None:
    plain, ours = gradients(op), gradients(op, packs=packs, engine=engine, verify=verify)
    assert len(plain) == len(ours) == 3
    assert all(map(torch.equal, plain, ours))


class Loaded(nn.Module):
    """Adds to a tensor that the blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, load: Tensor) -> Tensor:
        load.add_(x.detach().mean(0))
        return torch.tanh(x - torch.tanh(load)) @ self.weight


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("packs", [False, True])
def test_an_input_that_later_blocks_write_to(packs: bool, verify: str) -> None:
    """Also if hooks around the regions have packed it."""
    found = []
    for value in ("none", {"mode": "selective", "policy": "general", "engine": "replay", "verify": verify}):
        torch.manual_seed(0)
        model = nn.ModuleList(Loaded() for _ in range(3))
        sac.apply(model, {"mode": value} if value == "none" else {**value, "blocks": ["*"]})
        x, load = torch.randn(3, 4), torch.zeros(4)
        with hooks(packs):
            for block in model:
                x = block(x, load)
        x.square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
