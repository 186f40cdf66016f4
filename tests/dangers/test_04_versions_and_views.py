"""Danger 4: versions and views. A write moves a counter that views and `detach` share, and that `.data` does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.blocks import Stack
from tests.support.oracle import assert_exact, assert_same_results, built_model, on_every_way
from tests.support.programs import WIDTH, Block, Program
from tests.support.training import gradients, nearly_same
from tests.support.ways import WAYS


def named(*bodies: Callable[..., Any], **options: Any) -> list[Program]:
    return [Program(body.__name__, body, **options) for body in bodies]


# -- Writes that autograd allows


def written_by_an_alias(block: Block, x: Tensor) -> Tensor:
    """`detach` shares the counter of what it is taken from."""
    h = block.up(x)
    h.detach().mul_(0.5)
    return block.down(h.sin() * h)


def parts_and_the_whole(block: Block, x: Tensor) -> Tensor:
    """Values are saved between writes through views of one base."""
    h = block.up(x)
    top = h[:4]
    first = top.exp()
    h[4:].mul_(0.5)
    second = (h * 1.5).sin()
    top.add_(1.0)
    h.view(-1)[::3].neg_()
    return block.down(torch.cat([first, second[4:]]) * h)


def views_of_a_view(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    rows = h.t()[::2]
    before = rows.sigmoid()
    rows.copy_(before)
    h.unsqueeze(0)[:, 1:3].squeeze(0).mul_(2)
    return block.down(h.tanh() * before.repeat(2, 1))


def written_in_a_loop(block: Block, x: Tensor) -> Tensor:
    """Each round's value is saved by a product before the next round writes to a copy of it."""
    h, total = block.up(x), torch.zeros_like(x)
    for _ in range(3):
        h = h.clone().mul_(0.9).add_(0.1)
        total.add_(h.sin() * h)
    return block.down(total)


def value_and_its_conjugate(block: Block, x: Tensor) -> Tensor:
    """A lazy conjugate shares memory with another value; a write changes both."""
    h = torch.view_as_complex(block.up(x).view(-1, 4, 2))
    conjugate, negative = h.conj(), h.conj().imag
    h.mul_(2)
    return block.down(torch.view_as_real(conjugate.exp() * h.sin()).reshape(x.shape)) * negative.sin().repeat(1, 2)


ALLOWED = named(
    written_by_an_alias, parts_and_the_whole, views_of_a_view, written_in_a_loop, value_and_its_conjugate,
)  # fmt: skip


@on_every_way(ALLOWED)
def test_writes_inside_a_region(program: Program, way: str, policy: str) -> None:
    """Those to what autograd saved one op ago, and through `.data`, are in the catalogue: promise 1."""
    assert_exact(program, way, policy)


# -- Writes that autograd refuses: an error here too, or the gradients of what was saved, where a copy was kept


def assert_same_or_refused(plain: Stack, plain_loss: Tensor, ours: Stack, loss: Tensor) -> None:
    plain_loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        if "in place" in str(error) or "inplace" in str(error):
            return
        raise
    expected, seen = gradients(plain), gradients(ours)
    assert expected.keys() == seen.keys()
    assert all(nearly_same(expected[name], seen[name]) for name in seen)  # the gradient of a clone is added elsewhere


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda h: h.mul_(2),
    "detached": lambda h: h.detach().mul_(2),
    "a view": lambda h: h[:2].add_(1),
    "by out": lambda h: torch.add(h.detach(), 1, out=h.detach()),
}


def writes_to_a_saved_value(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    saved = h if block.writes else h.clone()
    out = saved[:2].sin().sum() + saved.sin()
    block.write(h)
    return out + h * 2


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@on_every_way(named(writes_to_a_saved_value))
def test_a_write_to_what_autograd_saved(program: Program, way: str, policy: str, write: Any, in_float64: None) -> None:
    """Also where the saved value, or only a small view of it, is kept by the policy."""
    plain, ours = built_model(program), built_model(program, WAYS[way], policy)
    for _ in range(3):
        x, losses = torch.randn(WIDTH, WIDTH, requires_grad=True), []
        for model in (plain, ours):
            model.zero_grad()
            for block in model.blocks:
                block.writes, block.write = model is ours, write
            losses.append(model(x).sum())
        assert_same_or_refused(plain, losses[0], ours, losses[1])


def written_parameter(model: Stack, x: Tensor) -> None:
    with torch.no_grad():
        model.blocks[0].down.weight.mul_(2)


def written_input(model: Stack, x: Tensor) -> None:
    x.detach().mul_(2)


def product_and_input(block: Block, x: Tensor) -> Tensor:
    return block.down(block.up(x).sin() * x).cos()


@pytest.mark.parametrize("write", [written_parameter, written_input])
@on_every_way(named(product_and_input))
def test_a_write_between_forward_and_backward(
    program: Program, way: str, policy: str, write: Any, in_float64: None
) -> None:
    plain, ours = built_model(program), built_model(program, WAYS[way], policy)
    for model in (plain, ours):
        for _ in range(2):  # what earlier calls have shown
            model(torch.randn(WIDTH, WIDTH, requires_grad=True)).sum().backward()
        model.zero_grad()
    x = torch.randn(WIDTH, WIDTH)
    losses = [
        model(x.clone().requires_grad_() if model is plain else x.requires_grad_()).sum() for model in (plain, ours)
    ]
    write(ours, x)
    assert_same_or_refused(plain, losses[0], ours, losses[1])


# -- Writes to the input; those to parameters and buffers are in the catalogue


def writes_to_its_input(block: Block, x: Tensor) -> Tensor:
    x.mul_(0.5)[:2].add_(1)
    return block.down(block.up(x.sin()) * x).cos()


@on_every_way(named(writes_to_its_input), *(way for way in WAYS if way not in ("context_fn", "reentrant")))
def test_writes_to_the_input(program: Program, way: str, policy: str) -> None:
    def run(model: Stack) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        for step in range(3):
            x = torch.randn(WIDTH, WIDTH, requires_grad=True)
            h = x * 1.5
            model(h).square().sum().backward()
            seen |= {f"{step} x": x.grad, f"{step} h": h.detach()}
            seen |= {f"{step} {name}": gradient for name, gradient in gradients(model).items()}
        return seen

    assert_same_results(run, program, way, policy)


# -- Inputs that are views of each other

VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "the same twice": lambda h: (h, h),
    "the whole and a part": lambda h: (h, h[:4].repeat(2, 1)[::1]),
    "two views": lambda h: (h.t(), h.view(-1).view(WIDTH, WIDTH)),
    "windows": lambda h: (h.view(-1).unfold(0, WIDTH, WIDTH), h),
}


def two_inputs(block: Block, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = block.up(x).sin() * y
    return block.down(h).cos(), h + y.exp()


@pytest.mark.parametrize("views", VIEWS)
@on_every_way(named(two_inputs))
def test_inputs_that_share_memory(program: Program, way: str, policy: str, views: str) -> None:
    def run(model: Stack) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        for step in range(3):
            x = torch.randn(WIDTH, WIDTH, requires_grad=True)
            left, right = model(*VIEWS[views](x * 2))
            (left.square().sum() + right.sum()).backward()
            seen[f"{step} x"] = x.grad
        return seen | {name: p.grad for name, p in model.named_parameters()}

    assert_same_results(run, program, way, policy)
