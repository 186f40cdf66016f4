"""Replayed values are compared with those of the forward: where they differ, the region runs again as Python."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sac.recompute import recorder as replay_recorder
from torch import Tensor, nn

from sac.engine import verify
from sac.errors import SacWarning
from tests.support.blocks import FunctionBlock, Stack, square
from tests.support.custom_ops import Wobble, wobble
from tests.support.replay_programs import POLICIES, applied, block_of, python_runs, replay, warning_of
from tests.support.training import assert_same, built, train

NOTHING = POLICIES["nothing"]
FOUND = "saved tensor 2 (float32[8, 8]) is replayed with other values than forward had"


def wobbling(block: FunctionBlock, x: Tensor) -> Tensor:
    """Python sets the sign; whoever runs the ops without it finds what `at` has left."""
    Wobble.sign = 1.0
    return wobble(x @ block.a).sin() @ block.b


@pytest.fixture(autouse=True)
def sign_put_back() -> Iterator[None]:
    yield
    Wobble.sign = 1.0


def at(*steps: int) -> Any:
    """A backward before which, in these steps, something changes that a kernel reads and that is no tensor."""
    count = iter(range(100))

    def backward(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
        if next(count) in steps:
            Wobble.sign = -1e5
        loss.backward()
        return []

    return backward


def told(value: Any, *, steps: int = 3, **training: Any) -> tuple[dict[str, Tensor], Stack, list[str]]:
    model = applied(block_of(wobbling), value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = train(model, steps=steps, make_input=square, **training)
    return seen, model, [str(one.message) for one in caught if issubclass(one.category, SacWarning)]


def expected(steps: int = 3, **training: Any) -> dict[str, Tensor]:
    return train(built(block_of(wobbling)), steps=steps, make_input=square, **training)


def test_first_step_is_compared_and_falls_back_at_once() -> None:
    seen, model, said = told(replay(NOTHING, "first"), backward=at(0, 1, 2))
    assert said == [warning_of(FOUND)]
    assert_same(expected(), seen)
    assert python_runs(model) == 6


def test_first_does_not_compare_later_steps() -> None:
    seen, model, said = told(replay(NOTHING, "first"), backward=at(1))
    assert (said, python_runs(model)) == ([], 3)
    with pytest.raises(AssertionError, match="gradient"):
        assert_same(expected(), seen)


def test_always_compares_each_step() -> None:
    seen, model, said = told(replay(NOTHING, "always"), backward=at(1))
    assert said == [warning_of(FOUND)]
    assert_same(expected(), seen)
    assert python_runs(model) == 1 + 2 + 2


def test_never_compares_none() -> None:
    seen, model, said = told(replay(NOTHING, "never"), backward=at(0))
    assert (said, python_runs(model)) == ([], 3)
    with pytest.raises(AssertionError, match="gradient"):
        assert_same(expected(), seen)


def test_first_compares_inputs_of_each_sort() -> None:
    model = applied(block_of(wobbling), replay(NOTHING, "first"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows, sign in ((8, 1.0), (8, 1.0), (4, -1e5), (4, -1e5)):
            loss = model(torch.randn(rows, 8)).sum()
            Wobble.sign = sign
            loss.backward()
    assert [str(one.message) for one in caught] == [
        warning_of(FOUND.replace("tensor 2 (float32[8", "tensor 1 (float32[4"))
    ]


def kept_twice(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    loss.backward(retain_graph=True)
    Wobble.sign = -1e5
    loss.backward()
    return []


def test_second_backward_of_one_graph_is_compared_too() -> None:
    seen, model, said = told(replay(NOTHING, "first"), steps=1, backward=kept_twice)
    assert said == [warning_of(FOUND)]
    assert_same(expected(1, backward=kept_twice), seen)
    assert python_runs(model) == 2


def penalty(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    Wobble.sign = -1e5
    (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (loss + grad.square().sum()).backward()
    return [grad]


def test_double_backward_falls_back() -> None:
    seen, model, said = told(replay(NOTHING, "first"), steps=1, backward=penalty)
    assert said == [warning_of(FOUND)]
    assert_same(expected(1, backward=penalty), seen)
    assert python_runs(model) > 1


def test_kind_falls_back_as_a_whole_with_one_warning() -> None:
    model = applied(lambda: Stack(*(FunctionBlock(wobbling) for _ in range(3))), replay(NOTHING, "first"))
    plain = built(lambda: Stack(*(FunctionBlock(wobbling) for _ in range(3))))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = train(model, steps=2, make_input=square, backward=at(0, 1))
    assert [str(one.message) for one in caught] == [warning_of(FOUND, "blocks.2")]
    assert_same(train(plain, steps=2, make_input=square), seen)


def test_ops_that_differ_by_nature_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels on a GPU do that add in any order; what is made of their results differs too."""
    names = frozenset({"sactest::wobble"})
    for module in (replay_recorder, verify):
        monkeypatch.setattr(module, "nondeterministic_on", lambda device: names)
    _, model, said = told(replay(NOTHING, "always"), backward=at(0, 1, 2))
    assert (said, python_runs(model)) == ([], 3)


def test_what_comes_before_such_an_op_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (replay_recorder, verify):
        monkeypatch.setattr(module, "nondeterministic_on", lambda device: frozenset({"aten::sin", "aten::mm"}))
    body = lambda block, x: wobble(x * 2.0).cos() * (x @ block.a).sin()  # noqa: E731
    model = applied(block_of(body), replay(NOTHING, "first"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = model(torch.randn(8, 8, requires_grad=True)).sum()
        Wobble.sign = -1e5
        loss.backward()
    assert [str(one.message) for one in caught] == [warning_of(FOUND.replace("tensor 2", "tensor 0"))]
