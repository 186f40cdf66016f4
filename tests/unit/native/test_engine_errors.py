"""After an exception in a forward or in a replay nothing is left behind: the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from sac.errors import SacWarning
from tests.support.blocks import FunctionBlock, Stack
from tests.support.custom_ops import Wobble, wobble
from tests.support.native_engine import needs_library, recorded, with_library
from tests.support.replay_programs import ON_EACH, applied, block_of, gradients, replay
from tests.support.training import assert_same, built

pytestmark = needs_library


class Stop(Exception):
    """Raised by a test's program."""


def raises(block: FunctionBlock, h: Tensor) -> Tensor:
    raise Stop


def interrupts(block: FunctionBlock, h: Tensor) -> Tensor:
    raise KeyboardInterrupt


def shapes(block: FunctionBlock, h: Tensor) -> Tensor:
    return h @ torch.ones(3, 3)


def out_of_range(block: FunctionBlock, h: Tensor) -> Tensor:
    return h.index_select(0, torch.tensor([99]))


def bad_list(block: FunctionBlock, h: Tensor) -> Tensor:
    return torch.cat([h, torch.ones(3, 3)])


def bad_draw(block: FunctionBlock, h: Tensor) -> Tensor:
    return torch.bernoulli(h + 5)


def python_op(block: FunctionBlock, h: Tensor) -> Tensor:
    return h.mul_(torch.ones(3, 3))


def in_an_inner_mode(block: FunctionBlock, h: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return (h @ block.a).sin() @ torch.ones(3, 3)


FAILURES: list[Callable[[FunctionBlock, Tensor], Tensor]] = [
    raises,
    interrupts,
    shapes,
    out_of_range,
    bad_list,
    bad_draw,
    python_op,
    in_an_inner_mode,
]


def failing(fail: Callable[[FunctionBlock, Tensor], Tensor], inner: bool = False) -> Callable[[], Stack]:
    """A stack of two regions; the second one fails if its module says so."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = F.dropout(x @ block.a, 0.3).sin()
        if block.fails:
            h = fail(block, h)
        return F.dropout(h.cos(), 0.3) @ block.b

    def build() -> Stack:
        model = block_of(body)()
        model.blocks.append(FunctionBlock(body))
        for block in model.blocks:
            block.fails = False
        return model

    return build


def past_errors(model: Stack) -> dict[str, Tensor]:
    """Steps, the third and fourth of which fail in the second region."""
    torch.manual_seed(0)
    seen = {}
    for step in range(7):
        model.zero_grad()
        model.blocks[1].fails = step in (2, 3)
        x = torch.randn(8, 8, requires_grad=True)
        if step in (2, 3):
            with pytest.raises((Stop, KeyboardInterrupt, RuntimeError, IndexError)):
                model(x)
        else:
            loss = model(x).square().sum()
            loss.backward()
            seen |= {f"{step} {name}": one for name, one in gradients(model).items()}
            seen[f"{step} x"] = x.grad
        seen[f"{step} random numbers"] = torch.get_rng_state()
        assert _get_current_dispatch_mode_stack() == []
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
    return seen


@ON_EACH
@pytest.mark.parametrize("fail", FAILURES)
def test_in_forward(fail: Callable[..., Tensor], chosen: dict[str, Any]) -> None:
    expected = past_errors(built(failing(fail)))
    with with_library(), recorded() as seen:
        assert_same(expected, past_errors(applied(failing(fail), replay(chosen))))
    assert min(seen.ops[-2:]) > 4


@ON_EACH
def test_caught_inside_of_the_region(chosen: dict[str, Any]) -> None:
    """An op fails, and the region goes on: what the op had put on the tape is gone."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = F.dropout(x @ block.a, 0.3)
        for fail in (shapes, bad_list, out_of_range):
            try:
                fail(block, h)
            except (RuntimeError, IndexError):
                h = h.sin() * 2
        return (h @ block.b).cos() * x

    def three(model: Stack) -> dict[str, Tensor]:
        torch.manual_seed(0)
        seen = {}
        for step in range(3):
            model(torch.randn(8, 8)).sum().backward()
            seen |= {f"{step} {name}": one for name, one in gradients(model).items()}
        return seen

    expected = three(built(block_of(body)))
    for native in (True, False):
        with with_library(native):
            assert_same(expected, three(applied(block_of(body), replay(chosen))))


class Limited(Exception):
    """Raised by a mode in backward."""


@ON_EACH
def test_in_replay(chosen: dict[str, Any]) -> None:
    """An op of the replay fails: generators are put back, and the next step is as without the failure."""

    class Failing(TorchDispatchMode):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.left = at

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.left -= 1
            if self.left == 0:
                raise Limited
            return func(*args, **(kwargs or {}))

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = F.dropout((x @ block.a).sin(), 0.3)
        return F.dropout(h.cos() * x, 0.3) @ block.b

    reference, ours = built(block_of(body)), applied(block_of(body), replay(chosen))

    def step(model: Stack) -> dict[str, Tensor]:
        model.zero_grad()
        model(torch.randn(8, 8)).square().sum().backward()
        return {**gradients(model), "random numbers": torch.get_rng_state()}

    with with_library():
        for at in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12):
            torch.manual_seed(at)
            expected = step(reference)
            torch.manual_seed(at)
            assert_same(expected, step(ours))
            loss = ours(torch.randn(8, 8)).square().sum()
            before = torch.get_rng_state()
            with pytest.raises(Limited), Failing(at):
                loss.backward()
            assert torch.equal(before, torch.get_rng_state())
            assert _get_current_dispatch_mode_stack() == []


@ON_EACH
def test_of_an_op_in_replay(chosen: dict[str, Any]) -> None:
    """A tensor from outside has another shape in backward: the op's or the region's error, and no more than that."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return (F.dropout(x @ block.a, 0.3) * block.outside).sin() @ block.b

    def build() -> Stack:
        model = block_of(body)()
        model.blocks[0].outside = torch.ones(8, 8)
        return model

    with with_library():
        model = applied(build, replay(chosen))
        said = []
        for native in (True, True, True, False):
            with with_library(native):
                loss = model(torch.randn(8, 8)).sum()
                before = torch.get_rng_state()
                model.blocks[0].outside.data = torch.ones(3, 3)
                with pytest.raises(RuntimeError) as error:
                    loss.backward()
                said.append(str(error.value))
                assert torch.equal(before, torch.get_rng_state())
                model.blocks[0].outside = torch.ones(8, 8)
        assert len(set(said)) == 1, said
        model.zero_grad()
        model(torch.ones(8, 8)).sum().backward()
    assert gradients(model)


@ON_EACH
def test_a_difference_is_found_by_verify(chosen: dict[str, Any]) -> None:
    """`verify` compares what the library computes too."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        Wobble.sign = 1.0
        return (wobble(x @ block.a).sin() * x).cos() @ block.b

    said = []
    for native in (True, False):
        with with_library(native):
            model = applied(block_of(body), replay(chosen, "always"))
            for _ in range(2):
                model(torch.randn(8, 8)).sum().backward()
            loss = model(torch.randn(8, 8)).sum()
            Wobble.sign = -1.0
            with pytest.warns(SacWarning) as caught:
                loss.backward()
            said.append([str(one.message) for one in caught])
    assert len(said[0]) == 1
    assert "is replayed with other values than forward had" in said[0][0]
    assert said[0] == said[1]
