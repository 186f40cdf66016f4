"""A rule that names an autograd Function saves the results of its calls: replay does not call it again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.reporting import decisions_of

MUL = "aten.mul.Tensor"
calls: list[str] = []
WIDTH, ROWS = 32, 4


OPS, KERNEL, OWN_MEMORY = "ops", "a kernel", "a kernel that allocates by itself"


class Cubed(torch.autograd.Function):
    """``way``: where its result comes from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: str) -> Tensor:
        calls.append("forward")
        ctx.save_for_backward(x)
        if way == OPS:
            return x * x * x
        if way == OWN_MEMORY:
            return torch.from_numpy(x.detach().numpy() ** 3)
        out = torch.empty_like(x)
        out.numpy()[...] = x.detach().numpy() ** 3
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x, None


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.out, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(Cubed.apply(self.inner(x).tanh(), self.way).sin())


def value_of(rules: list[dict[str, Any]], **policy: Any) -> dict[str, Any]:
    policy = {"schema": "sac/v1", "name": "kernels", "rules": rules, **policy}
    return {"mode": "selective", "policy": policy, "blocks": ["*"], "strict": True}


def trained(way: str, rules: list[dict[str, Any]] | None, **policy: Any) -> tuple[list[Tensor], nn.Module]:
    torch.manual_seed(0)
    layers = nn.Sequential(Block(way), Block(way))
    if rules is not None:
        sac.apply(layers, value_of(rules, **policy))
    gradients = []
    for _ in range(3):
        calls.clear()
        layers(torch.ones(ROWS, WIDTH)).square().sum().backward()
        gradients += [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]
    return gradients, layers


@pytest.mark.parametrize("way", [OPS, KERNEL, OWN_MEMORY])
@pytest.mark.parametrize("name", ["Cubed", "*.Cubed", "Cub*"])
def test_a_saved_function_is_not_called_again(way: str, name: str) -> None:
    expected, _ = trained(way, None)
    found, model = trained(way, [{"id": "cubed", "function": name, "do": "save"}])
    assert calls == ["forward"] * 2
    assert all(map(torch.equal, expected, found))
    assert sac.report(model).saved_bytes_by_rule() == {"cubed": 2 * ROWS * WIDTH * 4}


@pytest.mark.parametrize("way", [OPS, KERNEL, OWN_MEMORY])
@pytest.mark.parametrize("names_tensor", [False, True])
def test_a_function_may_be_called_with_keywords(way: str, names_tensor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one is a tensor, it is no unit that rules name: as if the function's results came from outside."""

    def forward(block: Block, x: Tensor) -> Tensor:
        h = block.inner(x).tanh()
        out = Cubed.apply(x=h, way=block.way) if names_tensor else Cubed.apply(h, way=block.way)
        return x + block.out(out.sin())

    monkeypatch.setattr(Block, "forward", forward)
    expected, _ = trained(way, None)
    rule = {"id": "cubed", "function": "Cubed", "do": "save", "optional": names_tensor}
    found, _ = trained(way, [rule])
    assert all(map(torch.equal, expected, found))
    assert names_tensor or calls == ["forward"] * 2


@pytest.mark.parametrize("way", [KERNEL, OWN_MEMORY])
def test_a_function_that_no_rule_saves_is_called_again_if_it_is_a_kernel(way: str) -> None:
    expected, _ = trained(way, None)
    found, _ = trained(way, [{"id": "sums", "ops": "aten.sin", "do": "save"}])
    assert calls == ["forward"] * 4
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize(
    "later", [[], [{"id": "products", "ops": "aten.mul", "do": "save", "optional": True}]], ids=["default", "rule"]
)
def test_a_rule_that_recomputes_a_function_decides_on_the_ops_inside(later: list[dict[str, Any]]) -> None:
    """Whatever later rules or the default say of these; an earlier rule is asked first."""
    rule, more = {"id": "cubed", "function": "Cubed", "do": "recompute"}, {} if later else {"default": "save"}
    expected, _ = trained(OPS, None)
    found, model = trained(OPS, [rule, *later], **more)
    assert all(map(torch.equal, expected, found))
    assert {(row.decision, row.rule) for row in decisions_of(model) if row.op == MUL} == {("recompute", "cubed")}
    assert sac.report(model).saved_bytes_by_rule().get("products", 0) == 0
    found, model = trained(OPS, [*later, rule], **more)
    assert all(map(torch.equal, expected, found))
    assert ("save" in {row.decision for row in decisions_of(model) if row.op == MUL}) == bool(later)
