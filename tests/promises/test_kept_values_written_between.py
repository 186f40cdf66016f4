"""A kept value that is a result of the region, written to between forward and backward, is computed again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import sac


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ self.first
        return product, product.exp() @ self.second  # backward needs the result of exp, which starts from the product


def gradients(checkpointed: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleList([Block()])
    if checkpointed:
        rules = [{"id": "product", "ops": "aten.mm", "do": "save"}]
        policy = {"schema": "sac/v1", "name": "products", "rules": rules}
        sac.apply(
            model, {"mode": "selective", "policy": policy, "blocks": ["*"], "engine": "replay", "verify": "never"}
        )
    block = model[0]
    x = torch.ones(4, 8, requires_grad=True)
    product, out = block(x)
    with torch.no_grad():
        product.zero_()
    out.sum().backward()
    assert x.grad is not None
    return [x.grad, *(parameter.grad for parameter in block.parameters() if parameter.grad is not None)]


def test_a_write_to_a_result_that_is_kept_is_not_seen_by_backward() -> None:
    assert all(map(torch.equal, gradients(False), gradients(True)))
