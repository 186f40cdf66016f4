"""Forward-mode differentiation through regions, and then backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import sac
from sac.errors import RegionError
from tests.support.every_mode import MODES, assert_as_without, modules_of

every_mode = pytest.mark.parametrize("mode", MODES)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(dropout)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        h = self.dropout(self.down(torch.sin(self.up(x))))
        return x + (h if gate is None else h * gate)


def blocks(count: int = 2) -> nn.ModuleList:
    torch.manual_seed(7)
    return nn.ModuleList(Block() for _ in range(count))


def inputs() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(2, 1, 16).view(4, 4)


def through(calls: list[Callable[..., Any]], x: Tensor) -> Tensor:
    for call in calls:
        x = call(x)
    return x


@every_mode
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
def test_a_dual_number_and_then_backward(mode: str, needs_grad: bool, inside: bool) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x, tangent = inputs()
        x.requires_grad_(needs_grad)
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(through(calls, forward_ad.make_dual(x, tangent)))
            loss = out.primal.square().sum() + out.tangent.square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [out.primal.detach(), out.tangent.detach(), x.grad]

    assert_as_without(mode, blocks(), program)


@every_mode
def test_steps_with_and_without_tangents_take_turns(mode: str) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x, tangent = inputs()
        with forward_ad.dual_level() if step % 2 else nullcontext():
            out = through(calls, forward_ad.make_dual(x, tangent) if step % 2 else x)
            primal, found = forward_ad.unpack_dual(out) if step % 2 else (out, None)
            loss = primal.square().sum() if found is None else (primal * found).sum()
            loss.backward()
        return [primal.detach()]

    assert_as_without(mode, blocks(), program, steps=6)


@every_mode
def test_a_tangent_that_needs_a_gradient_of_its_own(mode: str) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x, tangent = inputs()
        tangent.requires_grad_()
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(through(calls, forward_ad.make_dual(x, tangent)))
            out.tangent.square().sum().backward()
        return [tangent.grad]

    assert_as_without(mode, blocks(), program)


@every_mode
def test_the_derivative_of_a_gradient(mode: str) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x, tangent = inputs()
        x.requires_grad_()
        with forward_ad.dual_level():
            out = through(calls, forward_ad.make_dual(x, tangent)).square().sum()
            grad = torch.autograd.grad(out, x, create_graph=True)[0]
            primal, derivative = forward_ad.unpack_dual(grad)
        return [primal.detach(), None if derivative is None else derivative.detach()]

    assert_as_without(mode, blocks(), program)


@every_mode
def test_one_tensor_as_two_arguments_and_tangents_in_keywords(mode: str) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x, tangent = inputs()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, tangent)
            out = forward_ad.unpack_dual(calls[1](calls[0](dual, dual), gate=dual))
            (out.primal * out.tangent).sum().backward()
        return [out.primal.detach(), out.tangent.detach()]

    assert_as_without(mode, blocks(), program)


@every_mode
def test_a_region_inside_a_region(mode: str) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x, tangent = inputs()
        with forward_ad.dual_level():
            out = sac.checkpoint(lambda x: through(calls, x), forward_ad.make_dual(x, tangent))
            primal, found = forward_ad.unpack_dual(out)
            (primal * found).sum().backward()
        return [primal.detach(), found.detach()]

    assert_as_without(mode, blocks(), program)


class Holder(nn.Module):
    """Hands its input to a block, which ``functional_call`` finds below it."""

    def __init__(self, call: Callable[..., Any], block: nn.Module) -> None:
        super().__init__()
        self.calls, self.inner = (call,), block  # a tuple, so that the block has one name

    def forward(self, x: Tensor) -> Tensor:
        return self.calls[0](x)


@every_mode
def test_parameters_with_tangents_by_functional_call(mode: str) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        block = modules_of(calls)[0]
        x = inputs()[0].requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(block.up.weight, torch.linspace(1, 2, 16).view(4, 4))
            out = functional_call(Holder(calls[0], block), {"inner.up.weight": dual}, (x,))
            primal, change = forward_ad.unpack_dual(out)
            (primal * change).sum().backward()
        return [primal.detach(), change.detach(), x.grad]

    assert_as_without(mode, blocks(1), program)


@every_mode
def test_parameters_with_tangents_as_attributes(mode: str) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        up = modules_of(calls)[0].up
        x, weight = inputs()[0].requires_grad_(), up.weight
        with forward_ad.dual_level():
            del up.weight
            up.weight = forward_ad.make_dual(weight, torch.linspace(1, 2, 16).view(4, 4))
            primal, change = forward_ad.unpack_dual(calls[0](x))
            (primal * change).sum().backward()
        del up.weight
        up.weight = weight
        return [primal.detach(), change.detach(), x.grad]

    assert_as_without(mode, blocks(1), program)


def test_a_parameters_tangent_that_has_ended_is_an_error() -> None:
    block = sac.apply(blocks(1), {"mode": "full", "blocks": ["*"]})[0]
    weight = block.up.weight
    with forward_ad.dual_level():
        del block.up.weight
        block.up.weight = forward_ad.make_dual(weight, torch.ones(4, 4))
        primal, tangent = forward_ad.unpack_dual(block(inputs()[0]))
        loss = (primal * tangent).sum()
    with pytest.raises(RegionError) as error:
        loss.backward()
    assert str(error.value) == (
        "0: a parameter or buffer had a tangent in forward and has none in recomputation: the dual_level that it was "
        "made in is over\n"
        "    fix: call backward inside the dual_level of the forward"
    )


def test_writing_to_an_input_with_a_tangent_is_an_error() -> None:
    x, tangent = inputs()
    with forward_ad.dual_level(), pytest.raises(RegionError) as error:
        sac.checkpoint(lambda x: x.add_(1).sin(), forward_ad.make_dual(x, tangent))
    assert str(error.value).endswith(
        "the region wrote in place to an input that carries a tangent (forward-mode differentiation)\n"
        "    fix: clone the input inside the region before writing to it"
    )


def test_the_reentrant_mode_refuses_tangents() -> None:
    block = blocks(1)[0]
    x, tangent = inputs()
    with forward_ad.dual_level(), pytest.raises(RegionError) as error:
        sac.checkpoint(block, forward_ad.make_dual(x, tangent), use_reentrant=True)
    assert str(error.value) == (
        "Block: a reentrant region is called on a tensor that carries a tangent (forward-mode differentiation), or its "
        "modules hold one\n"
        "    fix: pass use_reentrant=False"
    )


def test_without_the_private_name_no_level_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from sac.region import forward_ad as tangents

    monkeypatch.setattr(tangents, "forward_ad", object())
    assert not tangents.dual_level_is_on()
