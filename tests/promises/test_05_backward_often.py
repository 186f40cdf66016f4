"""Backward runs as often as autograd allows it without us, and no oftener.

torch's plain checkpoint passes all but the reading twice; its selective one raises "backward an extra time" on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.blocks import (
    APPLY,
    FULL,
    FunctionBlock,
    Stack,
    alternate,
    install,
    llama_stack,
    policy,
    save,
    selective,
    square,
    tokens,
    ways,
    with_dropout,
)
from tests.support.custom_ops import SineReadTwice
from tests.support.recording import Recorder, without_collector
from tests.support.stock import install_stock
from tests.support.training import assert_same, assert_same_training, built, gradient_penalty, inputs_then_weights

VALUES = {
    "full": FULL,
    "nothing": selective(policy()),
    "attention and alternating matmuls": selective(policy(save("attention"), alternate("matmul"))),
    "every second op": selective(policy(alternate("*"))),
    "everything": selective(policy(default="save")),
}
ON_EACH_WAY = pytest.mark.parametrize(("name", "entry"), ways(VALUES))


def twice(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in parameters]
    loss.backward()
    return first


def three_times_by_grad(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    return [
        grad
        for again in (True, True, False)
        for grad in torch.autograd.grad(loss, [*inputs, *parameters], retain_graph=again)
    ]


def second_derivative_only(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    grads = torch.autograd.grad(loss, [*inputs, *parameters], create_graph=True)
    return list(torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs))


@ON_EACH_WAY
@pytest.mark.parametrize("backward", [twice, three_times_by_grad, inputs_then_weights])
def test_backward_again_while_the_graph_is_retained(backward: Callable[..., Any], name: str, entry: str) -> None:
    assert_same_training(lambda: with_dropout(llama_stack()), VALUES[name], entry=entry, backward=backward, steps=2)


def smooth(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout((x @ block.a).tanh(), 0.3, True)
    return F.layer_norm(h @ block.b, (8,)) * x.sin()


@ON_EACH_WAY
@pytest.mark.parametrize("backward", [gradient_penalty, second_derivative_only])
def test_double_backward(backward: Callable[..., Any], name: str, entry: str) -> None:
    """Attention on CPU has no second derivative, so the region has none."""
    if name == "attention and alternating matmuls":
        value: Any = selective(policy(alternate("matmul")))
    else:
        value = VALUES[name]
    assert_same_training(
        lambda: Stack(FunctionBlock(smooth), FunctionBlock(smooth)),
        value,
        entry=entry,
        backward=backward,
        make_input=square,
        steps=2,
    )


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="tells what torch 2.13 does, no other version")
@pytest.mark.parametrize("backward", [twice, three_times_by_grad, inputs_then_weights, gradient_penalty])
def test_stock_allows_backward_only_once(backward: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="backward an extra time"):
        assert_same_training(
            lambda: Stack(FunctionBlock(smooth)),
            selective(policy(save("matmul"))),
            backward=backward,
            make_input=square,
            put=install_stock,
        )


def two_losses(model: Stack, retain: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    (x,) = tokens()
    shared = model(x)
    shared.square().sum().backward(retain_graph=retain)
    shared.sin().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@ON_EACH_WAY
def test_two_losses_on_one_region(name: str, entry: str) -> None:
    def build() -> nn.Module:
        return with_dropout(llama_stack())

    ours = install(built(build), VALUES[name], entry)
    assert_same(two_losses(built(build), retain=True), two_losses(ours, retain=True))


@ON_EACH_WAY
def test_two_losses_without_retain_are_refused_as_without_us(name: str, entry: str) -> None:
    with pytest.raises(RuntimeError, match="backward"):
        two_losses(built(llama_stack), retain=False)
    with pytest.raises(RuntimeError):
        two_losses(install(built(llama_stack), VALUES[name], entry), retain=False)


class TwoTowers(nn.Module):
    """A region whose two outputs share nothing, so autograd runs backward on each without retaining."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        left = F.dropout(self.left(x).tanh(), 0.3, True)
        return left * x.sin(), F.dropout(self.right(y), 0.3, True).tanh() * y.cos()


def disjoint_backwards(model: Stack) -> dict[str, Tensor]:
    torch.manual_seed(0)
    left, right = model(torch.randn(4, 8), torch.randn(4, 8))
    left.square().sum().backward()
    right.square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@ON_EACH_WAY
def test_disjoint_outputs_of_one_region_in_two_backwards(name: str, entry: str) -> None:
    def build() -> Stack:
        return Stack(TwoTowers(), TwoTowers())

    ours = install(built(build), VALUES[name], entry)
    assert_same(disjoint_backwards(built(build)), disjoint_backwards(ours))


@ON_EACH_WAY
def test_backward_through_part_of_the_outputs_frees_the_rest_with_the_graph(name: str, entry: str) -> None:
    model = install(built(lambda: Stack(TwoTowers())), VALUES[name], entry)
    for _ in range(2):
        with without_collector():
            recorder = Recorder()
            with recorder:
                left, right = model(torch.randn(4, 8), torch.randn(4, 8))
                left.sum().backward()
            del left, right
            model.zero_grad()
            assert recorder.live_bytes() == 0


def reads_twice(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout(x @ block.a, 0.3, True)
    return SineReadTwice.apply(h) @ block.b * h.cos()


@pytest.mark.parametrize(("name", "entry"), ways(VALUES, APPLY))
def test_saved_tensors_may_be_read_twice(name: str, entry: str) -> None:
    """torch's own frame hands each value out once, so only the region frame of ours can hold this."""
    assert_same_training(
        lambda: Stack(FunctionBlock(reads_twice)), VALUES[name], entry=entry, make_input=square, steps=2
    )


def test_plain_checkpoint_refuses_to_be_read_twice() -> None:
    with pytest.raises(RuntimeError, match="already unpacked once"):
        assert_same_training(lambda: Stack(FunctionBlock(reads_twice)), FULL, make_input=square, put=install_stock)


def routed_then_read_twice(block: FunctionBlock, x: Tensor) -> Tensor:
    h = reads_twice(block, x)
    rows = (h > 0).nonzero()
    return h.cos() * h.sin() + rows.sum()


def test_reading_twice_does_not_ask_for_what_comes_later() -> None:
    """The second read fills one tensor and stops there, before the routing op whose result is held."""
    assert_same_training(lambda: Stack(FunctionBlock(routed_then_read_twice)), FULL, make_input=square, backward=twice)
