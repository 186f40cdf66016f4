"""Safe with in-place ops: a saved value that the region writes to later is served as it was saved.

`test_01_exact.py` compares results of the programs that write; here is what they cost, and who sees them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from sac.errors import RegionError
from tests.support.blocks import APPLY, FULL, FunctionBlock, Stack, install, policy, save, selective, square
from tests.support.training import assert_same_training, built


def an_activation_in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).relu_() @ block.b


def by_a_view(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h.view(-1)[::3].mul_(0.5)
    return (h @ block.b).sin()


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
        h.mul_(2)
        if block.calls == 4:  # a call without a recorder in `full`, as the first calls need none
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


class Growing(nn.Module):
    """It writes to its weight by `.data`, which no version shows: backward of both calls reads what the last left."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(32, 32), nn.Parameter(torch.eye(32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).tanh()
        self.weight.data.add_(0.1)
        return x @ self.weight


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("value", [FULL, {**FULL, "engine": "replay"}, selective(policy(save("aten.tanh")))])
def test_a_parameter_that_the_region_writes_to_unseen(value: Any, early_stop: bool) -> None:
    def twice() -> Stack:
        block = Growing()
        return Stack(block, block)

    assert_same_training(twice, {**value, "early_stop": early_stop})
