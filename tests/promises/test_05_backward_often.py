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

from tests.support.blocks import FULL, FunctionBlock, Stack, policy, save, selective, square
from tests.support.custom_ops import SineReadTwice
from tests.support.oracle import assert_exact, assert_same_results, built_model, on_every_way
from tests.support.programs import CATALOGUE, WIDTH, Block, Program
from tests.support.recording import Recorder, without_collector
from tests.support.stock import install_stock
from tests.support.training import assert_same_training, gradient_penalty, inputs_then_weights
from tests.support.ways import WAYS

NOT_REENTRANT = frozenset({"reentrant"})  # torch refuses `grad` and gradients of gradients there


def towers(block: Block, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two results that share nothing."""
    left = F.dropout(block.up(x).tanh(), 0.3)
    return left * x.sin(), F.dropout(block.down(y), 0.3).tanh() * y.cos()


def reads_twice(block: Block, x: Tensor) -> Tensor:
    h = F.dropout(block.up(x), 0.3)
    return block.down(SineReadTwice.apply(h)) * h.cos()  # type: ignore[no-untyped-call]


def two_inputs(step: int) -> tuple[Tensor, ...]:
    return torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)


SMOOTH = CATALOGUE["smooth"]
TOWERS = Program("towers", towers, inputs=two_inputs, not_under=NOT_REENTRANT)
READS_TWICE = Program("reads_twice", reads_twice, not_under=frozenset({"context_fn"}))


def twice(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in parameters if p.grad is not None]
    loss.backward()
    return first


def three_times_by_grad(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    leaves, seen = [*inputs, *parameters], []
    for retain in (True, True, False):
        seen += torch.autograd.grad(loss, leaves, retain_graph=retain)
    return seen


def second_derivative_only(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    grads = torch.autograd.grad(loss, [*inputs, *parameters], create_graph=True)
    return list(torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs))


def another_loss(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    loss.backward(retain_graph=True)
    loss.sin().backward()
    return []


BACKWARDS = [twice, three_times_by_grad, inputs_then_weights, gradient_penalty, second_derivative_only, another_loss]


@pytest.mark.parametrize("backward", BACKWARDS)
@on_every_way([SMOOTH])
def test_backward_again_while_the_graph_is_kept(program: Program, way: str, policy: str, backward: Any) -> None:
    assert_exact(program, way, policy, backward=backward)


@pytest.mark.parametrize("backward", [twice, inputs_then_weights])
@on_every_way([CATALOGUE["llama_block"]], "full", "auto", "replay", "served rerun", "context_fn", "checkpoint")
def test_backward_again_through_attention(program: Program, way: str, policy: str, backward: Any) -> None:
    """Attention on CPU has no second derivative."""
    assert_exact(program, way, policy, backward=backward)


def one_after_the_other(model: Stack) -> dict[str, Tensor]:
    """The results share nothing, so the graph is not retained between the two."""
    left, right = model(*(x.requires_grad_() for x in two_inputs(0)))
    left.square().sum().backward()
    right.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@on_every_way([TOWERS])
def test_disjoint_results_in_two_backwards(program: Program, way: str, policy: str) -> None:
    assert_same_results(one_after_the_other, program, way, policy)


@on_every_way([TOWERS])
def test_backward_through_part_of_the_outputs_frees_the_rest_with_the_graph(
    program: Program, way: str, policy: str
) -> None:
    model = built_model(program, WAYS[way], policy, blocks=1)
    for _ in range(2):
        with without_collector():
            recorder = Recorder()
            with recorder:
                left, right = model(*two_inputs(0))
                left.sum().backward()
            del left, right
            model.zero_grad()
            assert recorder.live_bytes() == 0


@on_every_way([SMOOTH])
def test_backward_again_without_the_graph_is_refused(program: Program, way: str, policy: str) -> None:
    model = built_model(program, WAYS[way], policy)
    for _ in range(3):
        loss = model(torch.randn(WIDTH, WIDTH)).sum()
        loss.backward()
        with pytest.raises(RuntimeError):
            loss.backward()


@on_every_way([READS_TWICE])
def test_one_backward_may_read_a_value_twice(program: Program, way: str, policy: str) -> None:
    """torch's own frame hands each value out once."""
    assert_exact(program, way, policy)
    if way != "reentrant":
        assert_exact(program, way, policy, backward=twice)


def test_reading_twice_does_not_ask_for_what_comes_later() -> None:
    """The second read fills one tensor and stops there, before the routing op whose result is held."""

    def then_routes(block: Block, x: Tensor) -> Tensor:
        h = reads_twice(block, x)
        rows = (h > 0).nonzero()
        return h.cos() * h.sin() + rows.sum()

    assert_exact(Program("then_routes", then_routes), "full", blocks=1, backward=twice)


def smooth_in_stock(block: FunctionBlock, x: Tensor) -> Tensor:
    return F.layer_norm((x @ block.a).tanh().exp() @ block.b, (WIDTH,)).sigmoid() * x.sin()


def reads_twice_in_stock(block: FunctionBlock, x: Tensor) -> Tensor:
    return SineReadTwice.apply(x @ block.a) @ block.b  # type: ignore[no-untyped-call]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="tells what torch 2.13 does, no other version")
@pytest.mark.parametrize("backward", BACKWARDS[:4])
def test_stock_allows_backward_only_once(backward: Callable[..., Any]) -> None:
    value, options = selective(policy(save("matmul"))), {"make_input": square, "put": install_stock}
    with pytest.raises(RuntimeError, match="backward an extra time"):
        assert_same_training(lambda: Stack(FunctionBlock(smooth_in_stock)), value, backward=backward, **options)
    with pytest.raises(RuntimeError, match="already unpacked once"):
        assert_same_training(lambda: Stack(FunctionBlock(reads_twice_in_stock)), FULL, **options)
