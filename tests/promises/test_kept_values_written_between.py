"""A kept value that is a result of the region, written to between forward and backward, is computed again."""

from __future__ import annotations

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


def gradients(op: str, **settings: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleList([Block(op)])
    x = torch.randn(4, 8, requires_grad=True)
    if settings:
        rules = [{"id": "kept", "ops": f"aten.{op}", "do": "save"}]
        policy = {"schema": "sac/v1", "name": "one-op", "rules": rules}
        sac.apply(model, {"mode": "selective", "policy": policy, "blocks": ["*"], **settings})
    for _ in range(2):
        h, out = model[0](x)
        with torch.no_grad():
            h.zero_()
        out.sum().backward()
    return [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]


@pytest.mark.parametrize("verify", ["first", "always", "never"])
@pytest.mark.parametrize("engine", ["replay", "rerun"])
@pytest.mark.parametrize("op", ["mm", "native_layer_norm"])
def test_a_write_to_a_result_that_is_kept_is_not_seen_by_backward(op: str, engine: str, verify: str) -> None:
    plain, ours = gradients(op), gradients(op, engine=engine, verify=verify)
    assert len(plain) == len(ours) == 3
    assert all(map(torch.equal, plain, ours))
