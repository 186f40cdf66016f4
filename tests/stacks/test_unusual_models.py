"""Modules that are not plain: reparametrised, shared, scripted, called otherwise, without data; and torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations, parametrize

import sac
from sac.errors import ModelError, RegionError
from sac.tools.comparison import count_flops
from tests.support.blocks import FULL, Stack, policy, save, selective
from tests.support.training import assert_same, built, train

WIDTH = 16
VALUES: dict[str, Any] = {"full": FULL, "selective": selective(policy(save("matmul", module="down*")))}
ON_EACH_VALUE = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
Prepare = Callable[[Stack], object]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(x).tanh()))


class OwnCall(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x) + 1


class Scaled(nn.Module):
    """A parametrization that runs a product of its own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight @ weight.t() @ weight


def reparametrised(how: Callable[[nn.Linear], object]) -> Prepare:
    return lambda model: [how(one) for block in model.blocks for one in (block.up, block.down)]


def script_parts(model: Stack) -> None:
    for block in model.blocks:
        block.up = torch.jit.script(block.up)


def call_otherwise(model: Stack) -> None:
    for block in model.blocks:
        block.__class__ = OwnCall


def share_part(model: Stack) -> None:
    model.blocks[1].down = model.blocks[0].down


def one_block_twice(model: Stack) -> None:
    model.blocks[1] = model.blocks[0]


PREPARED: dict[str, Prepare] = {
    "parametrize": reparametrised(lambda one: parametrize.register_parametrization(one, "weight", Scaled())),
    "weight_norm": reparametrised(parametrizations.weight_norm),
    "weight_norm by hooks": reparametrised(nn.utils.weight_norm),
    "scripted parts": script_parts,
    "a call of its own": call_otherwise,
    "a shared part": share_part,
    "one block twice": one_block_twice,
}
ONLY_BEFORE = ("scripted parts", "a call of its own")  # before `sac.apply`


def inputs(device: str) -> tuple[Tensor]:
    return (torch.randn(2, 4, WIDTH, device=device),)


def two_blocks() -> Stack:
    return Stack(Block(), Block())


def one_step(model: Stack, device: str = "cpu") -> list[Tensor]:
    loss = model(*inputs(device)).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore:`torch.jit.script` is")
@pytest.mark.parametrize(
    ("name", "apply_first"),
    [(name, first) for name in PREPARED for first in (False, True) if not first or name not in ONLY_BEFORE],
)
@ON_EACH_VALUE
def test_prepared(value: Any, name: str, apply_first: bool) -> None:
    def build(on: bool) -> Stack:
        model = built(two_blocks)
        if on and apply_first:
            sac.apply(model, value)
        torch.manual_seed(5)
        PREPARED[name](model)
        return sac.apply(model, value) if on and not apply_first else model

    plain, ours = build(False), build(True)
    assert_same(train(plain, steps=3, make_input=inputs), train(ours, steps=3, make_input=inputs))
    assert count_flops(lambda: one_step(ours)) > count_flops(lambda: one_step(plain))


def cached_step(value: Any) -> list[Tensor]:
    """One step with a cache of parametrizations around forward and backward."""
    model = built(two_blocks)
    PREPARED["parametrize"](model)
    sac.apply(model, value)
    torch.manual_seed(7)
    with parametrize.cached():
        return one_step(model)


@pytest.mark.parametrize("value", [FULL, {**VALUES["selective"], "engine": "rerun"}], ids=VALUES.keys())
def test_a_cache_of_parametrizations_around_forward_and_backward_is_an_error(value: Any) -> None:
    """In recomputation the cache holds what the forward had to make. torch's own checkpoint raises too."""
    with pytest.raises(RegionError, match="recomputation"):
        cached_step(value)


def test_a_cache_of_parametrizations_is_nothing_to_replay() -> None:
    """It makes again what the forward made, whatever Python would find in the cache now."""
    value = {**VALUES["selective"], "engine": "replay"}
    assert all(map(torch.equal, cached_step("none"), cached_step(value)))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("model_of", [Stack, nn.Sequential])
def test_scripted_blocks_are_an_error(model_of: Callable[..., nn.Module]) -> None:
    model = model_of(*(torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)) for _ in range(2)))
    with pytest.raises(ModelError, match="no transformer blocks were found"):
        sac.apply(model, "full")


X = torch.ones(3, 2, WIDTH)
TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda model: grad(lambda x: model(x).sum())(X),
    "jvp": lambda model: jvp(model, (X,), (X,)),
    "per sample": lambda model: vmap(
        grad(lambda given, x: functional_call(model, given, (x,)).sum()), in_dims=(None, 0)
    )(dict(model.named_parameters()), X),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@ON_EACH_VALUE
def test_transforms_of_torch_func_are_an_error(value: Any, transform: Callable[[nn.Module], Any]) -> None:
    model = built(two_blocks).eval()
    sac.apply(model, value)
    with pytest.raises(RegionError, match=r"called inside a transform of torch\.func .*\n    fix: call sac\.remove"):
        transform(model)
    with torch.no_grad():
        vmap(model)(X)  # no region
    transform(sac.remove(model))


# -- Without data


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@ON_EACH_VALUE
def test_apply_then_a_step_on_meta_then_real_data(value: Any, assign: bool) -> None:
    plain = built(two_blocks)
    with torch.device("meta"):
        model = sac.apply(two_blocks(), value)
    one_step(model, "meta")
    assert all(one.grad.is_meta and one.grad.shape == one.shape for one in model.parameters())
    model.zero_grad()
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(built(two_blocks).state_dict(), assign=assign)
    assert_same(train(plain, steps=3, make_input=inputs), train(model, steps=3, make_input=inputs))
    assert count_flops(lambda: one_step(model)) > count_flops(lambda: one_step(plain))


@ON_EACH_VALUE
def test_steps_on_fake_tensors_cost_what_real_ones_cost(value: Any) -> None:
    """States of generators are real where all else is fake: comparing them must not make fake tensors of them."""
    model = sac.apply(built(two_blocks), value)
    one_step(model)
    expected = count_flops(lambda: one_step(model))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = sac.apply(two_blocks(), value)
        for _ in range(2):
            one_step(model)
        assert count_flops(lambda: one_step(model)) == expected
        assert all(one.grad.shape == one.shape for one in model.parameters())
