"""Kernels that give other values when they run again: the first step names them, later steps save their results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sac

counter = [0]


def drawn(x: Tensor) -> Tensor:
    """Rows in an order that changes from call to call, from where no op is seen."""
    counter[0] += 1
    out = torch.empty_like(x)
    out.numpy()[...] = x.detach().numpy()[torch.randperm(len(x), generator=torch.Generator().manual_seed(counter[0]))]
    return out


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.count = counter[0] + 1
        return drawn(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = torch.empty_like(grad)
        out[torch.randperm(len(grad), generator=torch.Generator().manual_seed(ctx.count))] = grad
        return out


class Block(nn.Module):
    def __init__(self, is_named: bool = False) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = sac.unit("dispatch", Dispatch.apply) if is_named else Dispatch.apply

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.function(self.inner(x)).tanh())


RULE = {"schema": "sac/v1", "name": "products", "rules": [{"id": "products", "ops": "aten.addmm", "do": "save"}]}
SELECTIVE = {"mode": "selective", "policy": RULE, "blocks": ["*"]}


def step(model: nn.Module) -> list[Tensor]:
    """Gradients of one step, in which the first call of a kernel draws as in every step."""
    model.zero_grad()
    counter[0] = 0
    model(torch.linspace(-1, 1, 32).view(8, 4)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def model_of(value: Any = None, *, is_named: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(is_named), Block(is_named))
    if value is not None:
        sac.apply(model, value)
    return model


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("engine", ["auto", "replay"])
def test_results_are_saved_after_a_warning(engine: str, is_named: bool) -> None:
    expected = step(model_of())
    model = model_of({**SELECTIVE, "engine": engine}, is_named=is_named)
    name = "unit dispatch" if is_named else "function Dispatch"
    with pytest.warns(UserWarning, match=f"1: {name} in the region itself gives other values") as found:
        first = step(model)
    texts = [str(one.message) for one in found if "other values" in str(one.message)]
    assert len(texts) == 1
    assert ("gradients of this step may differ" in texts[0]) is (engine == "auto")
    assert all(map(torch.equal, expected, first)) is (engine == "replay")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(torch.equal, expected, step(model)))
        assert all(map(torch.equal, expected, step(model)))
    assert f"rule must-save: 1 call, {4 * 8 * 4} B saved" in str(sac.report(model))


@pytest.mark.parametrize("rule", [{"function": "Dispatch"}, {"unit": "dispatch"}])
def test_a_rule_that_saves_it_is_exact_from_the_first_step(rule: dict[str, str]) -> None:
    rules = [{"id": "dispatch", **rule, "do": "save"}]
    model = model_of({**SELECTIVE, "policy": {**RULE, "rules": rules}}, is_named="unit" in rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(torch.equal, step(model_of()), step(model)))


@pytest.mark.parametrize("key", [{"strict": True}, {"verify": "always"}])
@pytest.mark.parametrize("value", [SELECTIVE, {"mode": "full", "blocks": ["*"]}])
def test_strict_raises(value: dict[str, Any], key: dict[str, Any]) -> None:
    with pytest.raises(sac.SacError, match=r"function Dispatch in the region itself"):
        step(model_of({**value, **key}))


class Noisy(nn.Module):
    """A block whose Python depends on a global, which a rerun does not restore."""

    noise = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        Noisy.noise *= 2
        return x + self.out((self.inner(x) * torch.full((4,), 1 + Noisy.noise)).tanh())


@pytest.mark.parametrize("value", [{"mode": "full"}, {**SELECTIVE, "engine": "rerun"}], ids=["full", "served"])
def test_always_compares_later_steps_too(value: dict[str, Any]) -> None:
    model, x = (
        sac.apply(nn.Sequential(Noisy(), Noisy()), {**value, "blocks": ["*"], "verify": "always"}),
        torch.ones(8, 4),
    )
    for _ in range(3):
        model(x).sum().backward()
    try:
        Noisy.noise = 1.0
        with pytest.raises(sac.SacError, match="other values in recomputation"):
            model(x).sum().backward()
    finally:
        Noisy.noise = 0.0


class Called(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.call = Block(), call

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.call(self.block, x)
        return result


WAYS = {
    "sac.checkpoint": sac.checkpoint,
    "context_fn": lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=sac.context_fn(RULE)),
}


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_name_the_function_too(way: str) -> None:
    with pytest.warns(UserWarning, match=r"function Dispatch in the region itself"):
        step(Called(WAYS[way]))


def test_context_fn_may_be_called_in_each_step() -> None:
    model = Called(WAYS["context_fn"])
    with pytest.warns(UserWarning, match=r"results are kept from now on"):
        step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = step(model)
    model.call = lambda block, x: block(x)
    assert all(map(torch.equal, step(model), found))


@pytest.mark.parametrize("value", [{"mode": "full"}, {**SELECTIVE, "engine": "rerun"}], ids=["full", "served"])
def test_a_rerun_warns_in_the_first_step_only(value: dict[str, Any]) -> None:
    model = model_of({**value, "blocks": ["*"]})
    with pytest.warns(UserWarning, match=r"depends on function Dispatch in the region itself") as found:
        step(model)
    assert len([one for one in found if "depends on" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)


class DrawsLater(torch.autograd.Function):
    """A dropout that is an op while nothing is dropped, and then a kernel that draws where no op is seen."""

    rate = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not DrawsLater.rate:
            ctx.mask = None
            return x * 1
        unseen = torch._C._DisableTorchDispatch()
        ctx.mask = torch.rand(x.shape) > DrawsLater.rate
        del unseen
        out = torch.empty_like(x)
        out.numpy()[...] = (x.detach() * ctx.mask).numpy()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad if ctx.mask is None else grad * ctx.mask


@pytest.mark.parametrize("rules", [[], [{"id": "again", "function": "DrawsLater", "do": "recompute"}]])
def test_a_function_that_ops_explained_may_become_a_kernel_that_draws(rules: list[Any]) -> None:
    models = model_of(), model_of({**SELECTIVE, "policy": {**RULE, "rules": [*RULE["rules"], *rules]}})
    for model in models:
        for block in model:
            block.function = lambda x: (torch.rand(3), DrawsLater.apply(x))[1]  # a draw that backward skips
    try:
        for DrawsLater.rate in (0.0, 0.0, 0.5, 0.5, 0.0, 0.5):
            torch.manual_seed(3)
            expected = step(models[0])
            torch.manual_seed(3)
            assert all(map(torch.equal, expected, step(models[1])))
    finally:
        DrawsLater.rate = 0.0
