"""What a forward exchanges of parameters, and registers on them, is as without sac, in some calls only as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sac.region.marks import Contents, marks_of, unpacked
from torch import Tensor, nn

from tests.support.blocks import FunctionBlock
from tests.support.every_mode import MODES, assert_as_without
from tests.support.native_engine import with_library

MODES["reentrant"] = {"mode": "full", "use_reentrant": True}


class Block(nn.Module):
    """``change`` is called before and after the layer runs, from the third call on or in every call."""

    def __init__(self, change: Callable[[Block], None], first: int) -> None:
        super().__init__()
        self.up, self.change, self.first, self.calls = nn.Linear(8, 8), change, first, 0
        self.spare = [nn.Linear(8, 8)]
        self.scale = torch.ones(8, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = x * self.up.weight.detach().sum()  # of the data that the forward begins with
        if self.calls >= self.first:
            self.change(self)
        return x + torch.tanh(self.up(self.spare[0](h)) * self.scale)


def other_data(block: Block) -> None:
    block.up.weight.data = block.up.weight.data * 0.9


def other_data_by_a_function_of_torch(block: Block) -> None:
    vector = nn.utils.parameters_to_vector(block.up.parameters()).detach() * 0.9
    nn.utils.vector_to_parameters(vector, block.up.parameters())


def other_dtype_and_back(block: Block) -> None:
    block.up.half().float()


def other_layout(block: Block) -> None:
    block.up.weight.data = block.up.weight.data.t()


def in_place_unregistered(block: Block) -> None:
    with torch.no_grad():
        block.spare[0].weight.mul_(0.9)


def inner_backward(block: Block) -> None:
    with torch.enable_grad():
        torch.tanh(block.up(torch.ones(2, 8))).sum().backward()


def other_gradient(block: Block) -> None:
    block.up.weight.grad = torch.ones(8, 8)


def written_gradient(block: Block) -> None:
    if block.up.weight.grad is not None:
        block.up.weight.grad.mul_(0.5)


def hook(block: Block) -> None:
    block.up.weight.register_hook(lambda gradient: gradient * 0.5)
    block.scale.register_hook(lambda gradient: gradient * 0.5)


def hook_after_accumulation(block: Block) -> None:
    block.up.weight.register_post_accumulate_grad_hook(halve)


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


CHANGES = (
    other_data,
    other_data_by_a_function_of_torch,
    other_dtype_and_back,
    other_layout,
    in_place_unregistered,
    inner_backward,
    other_gradient,
    written_gradient,
    hook,
    hook_after_accumulation,
)
REFUSED = (in_place_unregistered, written_gradient, inner_backward)  # by the reentrant mode, as other writes are
CASES = [(mode, change) for mode in MODES for change in CHANGES if mode != "reentrant" or change not in REFUSED]


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize(("mode", "change"), CASES)
@pytest.mark.parametrize("native", [True, False])
def test_as_without_sac(mode: str, change: Callable[[Block], None], first: int, native: bool) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        found = []
        for batch in range(2):  # the second one finds the gradients of the first
            x = torch.randn(4, 8, requires_grad=True)
            y = x
            for call in calls:
                y = call(y)
            y.square().sum().backward()
            found += [y, x.grad]
            assert batch in (0, 1)
        blocks = [one if isinstance(one, nn.Module) else one.block for one in calls]  # type: ignore[attr-defined]
        for block in blocks:
            found += [block.scale.grad, *(one.grad for one in block.spare[0].parameters())]
            found += [one.detach().clone() for one in block.spare[0].parameters()]
            block.scale.grad = None
            block.spare[0].zero_grad()
        return found

    torch.manual_seed(0)
    with with_library(native):
        assert_as_without(mode, nn.ModuleList([Block(change, first), Block(change, first)]), program, steps=4)


@pytest.mark.parametrize("native", [True, False])
def test_marks_show_each_change(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("sac.region.marks.library", lambda: None)
    weight = nn.Parameter(torch.randn(4, 4))
    sparse = torch.eye(4).to_sparse()
    tensors = [weight, torch.ones(3), sparse]
    before, contents = marks_of(tensors), Contents(tensors)
    assert marks_of(tensors) == before
    data = weight.data
    weight.data = torch.zeros(4, 4)
    weight.grad = torch.ones(4, 4)
    with torch.no_grad():
        tensors[1].add_(1)
    was, now = list(unpacked(before)), list(unpacked(marks_of(tensors)))
    assert [one._fields[0] for one in now] == ["version"] * 3
    assert was[0].storage != now[0].storage
    assert (was[0].version, was[0].gradient) == (now[0].version, 0)
    assert now[0].gradient != 0
    assert now[1].version == was[1].version + 1
    held, gradient = contents.at(0)
    assert held is not None
    assert held.data_ptr() == data.data_ptr()
    assert gradient is None
    assert contents.at(1) == (None, None)


def test_parameters_that_another_system_manages_are_left_alone() -> None:
    """ZeRO-3 frees a weight and gathers it again: recomputation finds what that system gives it."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        block.a.ds_id = 0  # type: ignore[attr-defined]
        block.a.data = block.a.data.clone()
        return x + torch.tanh(x @ block.a) @ block.b

    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        x = torch.randn(4, 8, requires_grad=True)
        calls[0](x).square().sum().backward()
        return [x.grad]

    for mode in ("full", "rerun", "replay"):
        assert_as_without(mode, nn.ModuleList([FunctionBlock(body)]), program)
