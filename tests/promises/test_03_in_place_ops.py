"""Safe with in-place ops: a saved value that the region writes to later is served as it was saved."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from sac.errors import RegionError
from tests.support.blocks import APPLY, FULL, FunctionBlock, Stack, alternate, install, policy, save, selective, square
from tests.support.pairs import in_pairs
from tests.support.training import assert_same_training, built


def an_activation_in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).relu_() @ block.b


def added_to(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h += x
    return (h @ block.b).sin()


def by_a_view(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h.view(-1)[::3].mul_(0.5)
    return (h @ block.b).sin()


def by_an_out_variant(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    with torch.no_grad():
        scaled = h.detach().clone()
        torch.mul(scaled, 2.0, out=scaled)
    return (h * scaled) @ block.b


def through_an_index(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin()
    h[torch.tensor([0, 3])] = x[:2]
    return h @ block.b


def twice_with_a_read_between(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    before = h * 1.0
    h.mul_(0.5)
    between = h * 1.5
    h.add_(before)
    return (between + h) @ block.b


def of_several_results(block: FunctionBlock, x: Tensor) -> Tensor:
    first, second = (x @ block.a).chunk(2, -1)
    values, _ = second.sin().sort(-1)
    return (torch.cat([F.dropout(first, 0.2), values], -1).add_(x)) @ block.b


BODIES = {
    body.__name__: body
    for body in (
        an_activation_in_place, added_to, by_a_view, by_an_out_variant, through_an_index, twice_with_a_read_between,
        of_several_results,
    )
}  # fmt: skip
VALUES = {
    "full": FULL,
    "matmuls": selective(policy(save("matmul"))),
    "every second op": selective(policy(alternate("*"))),
    "everything": selective(policy(default="save")),
}


@in_pairs(
    body=BODIES,
    name=VALUES.keys(),
    entry=("apply", *APPLY, "context_fn"),
    unless=lambda body, name, entry: name == "full" and entry != "apply",
)
def test_gradients_are_those_without(body: Callable[..., Any], name: str, entry: str) -> None:
    assert_same_training(
        lambda: Stack(FunctionBlock(body), FunctionBlock(body)), VALUES[name], entry=entry, make_input=square, steps=3
    )


@pytest.mark.parametrize("entry", [*APPLY, "context_fn"])
@pytest.mark.parametrize("body", [an_activation_in_place, by_a_view], ids=lambda body: body.__name__)
def test_a_saved_product_that_is_written_to_is_not_computed_again(body: Callable[..., Any], entry: str) -> None:
    model = install(built(lambda: Stack(FunctionBlock(body))), selective(policy(save("matmul"))), entry)
    with FlopCounterMode(display=False) as forward:
        loss = model(*(x.requires_grad_() for x in square())).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


@pytest.mark.parametrize("value", ["everything", "full"])
def test_hooks_around_are_not_given_a_value_that_was_written_to(value: str) -> None:
    """Without sac they copy it when autograd saves it; a region passes it to them when its forward is over.

    So it is computed again, or backward raises as it does without such hooks.
    """

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = torch.tanh(x @ block.a)
        y = h.sin()
        if block.calls == 4:  # a call without a recorder in `full`, as the first calls need none
            h.mul_(2)
            with torch.no_grad():
                block.b.mul_(0.9)
        return x + y @ block.b + h

    everything = {"schema": "sac/v1", "name": "everything", "default": "save", "rules": []}
    plain = Stack(FunctionBlock(body))
    model = install(copy.deepcopy(plain), FULL if value == "full" else selective(everything))
    refused = ""
    for step in range(4):
        given = torch.randn(4, 8)
        grads = []
        for other in (plain, model):
            x = given.clone().requires_grad_()
            with saved_tensors_hooks(torch.clone, lambda kept: kept):
                loss = other(x).square().sum()
            try:
                loss.backward()
            except RegionError as error:
                refused = str(error)
                break
            grads.append(x.grad)
        if refused:
            break
        assert torch.equal(*grads), step
    assert not refused or (step == 3 and re.search(r"a tensor that backward needs \(.*\) was changed", refused))


class Normalized(nn.Module):
    """Spectral norm writes to two buffers, one from the other; called twice, so that backward starts after both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def normalized_twice() -> Stack:
    block = Normalized()
    return Stack(block, block)


@pytest.mark.parametrize("do", ["save", "alternate"])
def test_buffers_that_a_later_call_has_written_to(do: Any) -> None:
    assert_same_training(normalized_twice, selective(policy({"ops": "*", "do": do})))
