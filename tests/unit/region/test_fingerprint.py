"""`sac.checkpoint` learns from earlier calls of a function: what one has shown is never used for another.

A body without noise needs no dispatch mode, and that is learnt. The same body with noise from a generator of the
caller's does: without a mode its recomputation would draw other numbers, and the gradient would be wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.config import FullConfig
from tests.support.quiet_and_loud import (
    MAKERS,
    Block,
    EqualToAll,
    Plain,
    Slotted,
    Unhashable,
    Volume,
    assert_not_confused,
    body,
    bound_method,
    generated,
    gradient,
    object_in_the_closure,
    region,
)


@pytest.mark.parametrize("make", MAKERS)
def test_functions_that_differ_in_what_they_hold_are_two(make: Any) -> None:
    assert_not_confused(make(False), lambda: make(True))


@pytest.mark.parametrize("make", MAKERS)
def test_equal_functions_made_anew_are_one_where_all_they_hold_can_be_compared(make: Any, entered: list[Any]) -> None:
    by_identity = {Block, generated, Plain, Unhashable, EqualToAll, bound_method, object_in_the_closure}
    kept = make(False) if make in by_identity else None
    for _ in range(3):
        gradient(region(kept or make(False)))
    assert len(entered) <= 1  # none, where an earlier test has shown it


# What a function is given


@pytest.mark.parametrize(
    ("quiet", "loud"),
    [
        (Volume.QUIET, Volume.LOUD),
        (Plain(False), Plain(True)),
        (Slotted(False), Slotted(True)),
        (torch.float32, torch.float64),
        (1, 1.0),
        (1, True),
        (frozenset(), frozenset([1])),
        (slice(0, 1), slice(0, 2)),
        (b"quiet", b"loud"),
        (1j, 2j),
    ],
)
def test_plain_arguments_tell_calls_apart(quiet: Any, loud: Any) -> None:
    def function(x: Tensor, given: Any) -> Tensor:
        return body(x, (type(given), getattr(given, "loud", given)) == (type(loud), getattr(loud, "loud", loud)))

    for given in (quiet, quiet, loud, loud, quiet, loud):
        plain = gradient(function, given)
        assert torch.equal(gradient(region(function), given), plain)


def test_modules_given_as_arguments_tell_calls_apart() -> None:
    def function(x: Tensor, block: nn.Module) -> Tensor:
        return block(x)  # type: ignore[no-any-return]

    quiet, loud = Block(False), Block(True)
    for block in (quiet, quiet, loud, loud):
        assert torch.equal(gradient(region(function), block), gradient(function, block))
    quiet.part.loud = True  # type: ignore[assignment]
    assert torch.equal(gradient(region(function), quiet), gradient(function, quiet))


def test_a_size_given_as_an_argument_counts_as_its_numbers() -> None:
    def function(x: Tensor, size: torch.Size) -> Tensor:
        return body(x.view(size), False)

    def stored(x: Tensor, *args: Any) -> Tensor:
        config = FullConfig(store="host", keep=lambda position, tensor: position == len(args[0]))
        return sac.checkpoint(lambda size, x: function(x, size), *args, x, config=config)  # type: ignore[no-any-return]

    for size in (torch.Size([2, 3]), torch.Size([3, 2]), torch.Size([6])):
        assert torch.equal(gradient(stored, size), gradient(function, size))


def test_structures_of_arguments_tell_calls_apart() -> None:
    def function(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return body(x, bool(kwargs) or isinstance(args[0], list))

    def check(*args: Any, **kwargs: Any) -> None:
        for _ in range(2):
            assert torch.equal(gradient(region(function), *args, **kwargs), gradient(function, *args, **kwargs))

    check(1)
    check(a=1)
    check([1])
    check((1, 2))
    check([1, 2])


def test_names_of_keyword_arguments_tell_calls_apart() -> None:
    def function(x: Tensor, quiet: int = 0, loud: int = 0) -> Tensor:
        return body(x, loud)

    for name in ("quiet", "quiet", "loud", "loud"):
        assert torch.equal(gradient(region(function), **{name: 1}), gradient(function, **{name: 1}))


def test_a_key_of_a_dict_argument_tells_calls_apart() -> None:
    def function(x: Tensor, given: dict[str, int]) -> Tensor:
        return body(x, "loud" in given)

    for key in ("quiet", "quiet", "loud", "loud"):
        assert torch.equal(gradient(region(function), {key: 1}), gradient(function, {key: 1}))
