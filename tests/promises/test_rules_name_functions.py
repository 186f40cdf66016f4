"""A rule that names an autograd Function saves the results of its calls: replay does not call it again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac

calls: list[str] = []


class Cubed(torch.autograd.Function):
    """``kernel``: the result comes from where no op is seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: bool) -> Tensor:
        calls.append("forward")
        ctx.save_for_backward(x)
        if not kernel:
            return x * x * x
        out = torch.empty_like(x)
        out.numpy()[...] = x.detach().numpy() ** 3
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x, None


class Block(nn.Module):
    def __init__(self, kernel: bool) -> None:
        super().__init__()
        self.inner, self.out, self.kernel = nn.Linear(8, 8), nn.Linear(8, 8), kernel

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(Cubed.apply(self.inner(x).tanh(), self.kernel).sin())


def trained(kernel: bool, rules: list[dict[str, Any]] | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleList([Block(kernel), Block(kernel)]))
    layers = nn.Sequential(*model[0])
    if rules is not None:
        policy = {"schema": "sac/v1", "name": "kernels", "rules": rules}
        sac.apply(layers, {"mode": "selective", "policy": policy, "blocks": ["*"], "strict": True})
    gradients = []
    for _ in range(3):
        calls.clear()
        layers(torch.ones(4, 8)).square().sum().backward()
        gradients += [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]
    return gradients


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("name", ["Cubed", "*.Cubed", "Cub*"])
def test_a_saved_function_is_not_called_again(kernel: bool, name: str) -> None:
    expected = trained(kernel, None)
    found = trained(kernel, [{"id": "cubed", "function": name, "do": "save"}])
    assert calls == ["forward"] * 2
    assert all(map(torch.equal, expected, found))


def test_a_function_that_no_rule_saves_is_called_again_if_it_is_a_kernel() -> None:
    expected = trained(True, None)
    found = trained(True, [{"id": "sums", "ops": "aten.sin", "do": "save"}])
    assert calls == ["forward"] * 4
    assert all(map(torch.equal, expected, found))
