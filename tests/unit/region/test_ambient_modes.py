"""Recomputation runs under the torch-function modes of the forward, `with torch.device(...)` being one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

import sac
from tests.support.blocks import FunctionBlock
from tests.support.pairs import in_pairs
from tests.support.runs import Noted
from tests.support.stateful import WAYS, Surrounding, Way, as_it_is, stack_of, stepped
from tests.support.training import assert_same


class CosineForSine(TorchFunctionMode):
    """Gives another result for one function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.cos(*args) if func is torch.Tensor.sin else func(*args, **(kwargs or {}))


class Doubled(TorchFunctionMode):
    """Gives twice the cosine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.Tensor.cos, torch.cos) else out


def stack_now() -> list[Any]:
    return _get_current_function_mode_stack()


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def two_modes() -> Iterator[None]:
    with Doubled(), torch.device("cpu"), CosineForSine():
        yield


SURROUNDINGS: dict[str, Surrounding] = {
    "none": nullcontext,
    "a mode": CosineForSine,
    "two modes and a device": two_modes,
    "device": lambda: torch.device("cpu"),
    "default device": lambda: default_device("cpu"),
}
OTHERS: dict[str, Surrounding] = SURROUNDINGS | {
    "another device": lambda: torch.device("meta"),
    "another default device": lambda: default_device("meta"),
}


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert stack_now() == []
    assert torch._C._is_torch_function_enabled()


def body(block: FunctionBlock, x: Tensor) -> Tensor:
    """On a device that is not the block's, it fails."""
    return ((x @ block.a).sin() * torch.arange(8)).cos() @ block.b.sin() + torch.full((8,), 0.5).cos()


@in_pairs(forward=SURROUNDINGS.keys(), backward=OTHERS.keys(), way=WAYS)
def test_recomputation_runs_under_the_modes_of_forward(forward: str, backward: str, way: Way) -> None:
    """`loss.backward()` is called through the innermost mode, which is off meanwhile."""
    around = {"forward": SURROUNDINGS[forward], "backward": OTHERS[backward]}
    assert_same(stepped(stack_of(body), as_it_is, **around), stepped(stack_of(body), way, **around))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["this thread", "another thread"])
@pytest.mark.parametrize("forward", SURROUNDINGS)
def test_the_stack_is_exactly_that_of_forward_and_then_that_of_now(forward: str, elsewhere: bool) -> None:
    seen = Noted()

    def region(x: Tensor) -> Tensor:
        seen.append(stack_now())
        return x.tanh().exp()

    x = torch.ones(2, requires_grad=True)
    with SURROUNDINGS[forward]():
        out = sac.checkpoint(region, x)
    after: list[list[Any]] = []

    def backward() -> None:
        mode = Doubled()
        with torch.device("meta"), mode:
            before = stack_now()
            torch.autograd.backward(out, torch.ones(2, device="cpu"))
            after.extend((before, stack_now()))

    if elsewhere:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    else:
        backward()
    assert [id(mode) for mode in seen[0]] == [id(mode) for mode in seen[1]]
    assert [id(mode) for mode in after[0]] == [id(mode) for mode in after[1]]
    assert len(after) == 2


def test_modes_are_put_back_when_recomputation_raises() -> None:
    runs = Noted()

    def region(x: Tensor) -> Tensor:
        runs.append(stack_now())
        if len(runs) == 2:
            raise KeyError("the user's own")
        return x.tanh().exp()

    x = torch.ones(2, requires_grad=True)
    with two_modes():
        out = sac.checkpoint(region, x)
    with Doubled():
        before = stack_now()
        with pytest.raises(KeyError):
            torch.autograd.backward(out, torch.ones(2))
        assert stack_now() == before
    torch.autograd.backward(out, torch.ones(2))
    assert len(runs[0]) == 3
    assert runs[0] == runs[1] == runs[2]


def test_a_region_called_with_subclasses_off_is_recomputed_so() -> None:
    states = Noted()

    def region(x: Tensor) -> Tensor:
        states.append(torch._C._is_torch_function_enabled())
        return x.tanh().exp()

    x = torch.ones(2, requires_grad=True)
    for guard in (torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction):
        with guard():
            out = sac.checkpoint(region, x)
        out.sum().backward()
    assert states == [False] * 4


class Counting(TorchDispatchMode):
    """Counts ops."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_are_those_of_backward() -> None:
    """As with torch's checkpoint: what counts the ops of a backward counts those of recomputation."""
    x = torch.ones(2, requires_grad=True)
    forward, backward = Counting(), Counting()
    with forward:
        out = sac.checkpoint(lambda x: x.tanh().exp(), x)
    with backward:
        out.sum().backward()
    assert (forward.count, backward.count) == (1, 1)
