"""Forward-mode differentiation and batched backward through regions that draw, in every way of checkpointing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from sac.errors import RegionError
from tests.support.blocks import Stack
from tests.support.oracle import assert_same_results, built_model, on_every_way
from tests.support.programs import WIDTH, Block, Program
from tests.support.ways import WAYS


def draws(block: Block, x: Tensor) -> Tensor:
    h = F.dropout(block.down(torch.sin(block.up(x))), 0.25)
    return x + h * torch.rand(WIDTH, generator=block.generator) * torch.rand_like(x)


DRAWS = Program("draws", draws, not_under=("reentrant",))
REPLAYED = ("auto", "replay", "whole modules", "offload")
Step = Callable[[Stack], list[Tensor]]


def in_steps(step: Step) -> Callable[[Stack], dict[str, Tensor]]:
    """Three steps, in which the first calls of a region are run in another way; what they return, and gradients."""

    def run(model: Stack) -> dict[str, Tensor]:
        found = {f"{number} {i}": x.detach() for number in range(3) for i, x in enumerate(step(model))}
        return found | {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    return run


def dual(x: Tensor) -> Tensor:
    return forward_ad.make_dual(x, torch.linspace(2, 1, x.numel()).view(x.shape))


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
@on_every_way([DRAWS], *REPLAYED)
def test_a_dual_number_and_then_backward(
    program: Program, way: str, policy: str, needs_grad: bool, inside: bool
) -> None:
    def step(model: Stack) -> list[Tensor]:
        x = torch.randn(WIDTH, WIDTH, requires_grad=needs_grad)
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(model(dual(x)))
            loss = out.primal.square().sum() + out.tangent.square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [out.primal, out.tangent, *([x.grad] if needs_grad else [])]

    assert_same_results(in_steps(step), program, way, policy)


@on_every_way([DRAWS], *REPLAYED)
def test_the_derivative_of_a_gradient(program: Program, way: str, policy: str) -> None:
    def step(model: Stack) -> list[Tensor]:
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        with forward_ad.dual_level():
            out = model(dual(x)).square().sum()
            return [*forward_ad.unpack_dual(torch.autograd.grad(out, x, create_graph=True)[0])]

    assert_same_results(in_steps(step), program, way, policy)


@pytest.mark.parametrize("way", ["full", "served rerun", "checkpoint"])
def test_where_python_runs_again_a_dual_number_is_an_error(way: str) -> None:
    model = built_model(DRAWS, WAYS[way])
    with forward_ad.dual_level(), pytest.raises(RegionError, match=r"forward-mode differentiation.*\n.*engine: replay"):
        forward_ad.unpack_dual(model(dual(torch.randn(WIDTH, WIDTH)))).tangent.sum().backward()


BATCH = torch.eye(4 * WIDTH).view(-1, 4, WIDTH)


def once(out: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, wanted, BATCH, is_grads_batched=True)


def and_once_more(out: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    found = torch.autograd.grad(out, wanted, BATCH, is_grads_batched=True, retain_graph=True)
    return *found, *torch.autograd.grad(out.sum(), wanted)


def by_vmap(out: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.vmap(lambda grad: torch.autograd.grad(out, wanted, grad, retain_graph=True), randomness="same")(BATCH)


@pytest.mark.parametrize("batched", [once, and_once_more, by_vmap])
@on_every_way([DRAWS])
def test_batched_backward(program: Program, way: str, policy: str, batched: Callable[..., tuple[Tensor, ...]]) -> None:
    def step(model: Stack) -> list[Tensor]:
        x = torch.randn(4, WIDTH, requires_grad=True)
        return [*batched(model(x), [x, *model.parameters()])]

    assert_same_results(in_steps(step), program, way, policy)
