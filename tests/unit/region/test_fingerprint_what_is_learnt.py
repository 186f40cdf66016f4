"""What `sac.checkpoint` learns of a function, for how long, and what it does not."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.quiet_and_loud import (
    Block,
    EqualToAll,
    Plain,
    assert_not_confused,
    body,
    gradient,
    region,
)


def test_a_module_is_learnt_once(entered: list[Any]) -> None:
    block = Block(False)
    for _ in range(3):
        gradient(region(block))
        gradient(region(block.forward))
        gradient(region(lambda x: block(x)))
    assert len(entered) == 3  # the module, its method, the lambda


def test_a_lambda_in_a_loop_is_learnt_once_for_each_module(entered: list[Any]) -> None:
    blocks = [Block(False) for _ in range(3)]
    for _ in range(3):
        for block in blocks:
            gradient(region(lambda x, block=block: block(x)))
    assert len(entered) == 3


def test_what_a_function_counts_itself_does_not_make_it_another(entered: list[Any]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return body(x, False)

    block = Counting()
    for _ in range(5):
        gradient(region(block))
    assert len(entered) == 1
    assert block.calls == 5


def test_objects_that_cannot_be_compared_make_no_function_we_know(entered: list[Any]) -> None:
    held = iter([1, 2, 3])  # neither weak references to it nor attributes

    def function(x: Tensor) -> Tensor:
        assert held is not None
        return body(x, False)

    for _ in range(3):
        assert torch.equal(gradient(region(function)), gradient(function))
    assert len(entered) == 3


class Unreadable:
    """Raises whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)

    def __eq__(self, other: object) -> bool:
        raise ValueError("==")

    __hash__ = None  # type: ignore[assignment]

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ValueError("__dict__")

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        return body(x, False)


def test_objects_that_raise_when_looked_at_make_no_function_we_know(entered: list[Any]) -> None:
    odd = Unreadable()
    for function in (odd, odd, lambda x, *args: odd(x), functools.partial(odd)):
        assert torch.equal(gradient(region(function)), gradient(function))
        assert torch.equal(gradient(region(function), odd), gradient(function, odd))
    assert len(entered) == 8


@pytest.mark.parametrize("held", [np.arange(6.0), np.float64(2), EqualToAll(True), [np.arange(2)] * 2])
def test_objects_with_an_equality_of_their_own_are_compared_by_identity(held: Any, entered: list[Any]) -> None:
    def function(x: Tensor) -> Tensor:
        assert held is not None
        return body(x, False)

    for _ in range(3):
        assert torch.equal(gradient(region(function)), gradient(function))
    assert len(entered) == 1


@pytest.mark.parametrize("function", [torch.sin, torch.Tensor.sin, functools.lru_cache(torch.sin), torch.eye(6).matmul])
def test_functions_that_are_not_pythons_own_are_known(function: Any, entered: list[Any]) -> None:
    for _ in range(3):
        assert torch.equal(gradient(region(function)), gradient(function))
    assert len(entered) == 1


def test_a_function_that_holds_too_much_is_run_under_the_mode(entered: list[Any]) -> None:
    held = list(range(100_000))

    def function(x: Tensor) -> Tensor:
        return body(x, held[-1] == 0)

    for _ in range(3):
        gradient(region(function))
    assert len(entered) == 3


def test_what_holds_itself_can_be_looked_at() -> None:
    held: list[Any] = [False]
    held.append(held)
    quiet = Plain(False)
    quiet.itself = quiet  # type: ignore[attr-defined]

    def function(x: Tensor) -> Tensor:
        return body(x, held[0] or quiet.loud)

    def flip() -> Callable[..., Tensor]:
        held[0] = True
        return function

    assert_not_confused(function, flip)


def test_nothing_of_a_function_is_kept_alive() -> None:
    def use() -> weakref.ref[Tensor]:
        big = torch.zeros(8)

        class Local:
            held = big

            def __call__(self, x: Tensor) -> Tensor:
                return body(x, False)

        class LocalModule(nn.Module):
            held = Local()

            def forward(self, x: Tensor) -> Tensor:
                return body(x, False)

        function, module = Local(), LocalModule()
        for one in (function, module, lambda x: function(x), functools.partial(lambda x, held: function(x), held=big)):
            gradient(region(one))
        return weakref.ref(big)

    dead = use()
    gc.collect()  # a class is in a cycle with itself
    assert dead() is None


def test_threads_learn_together() -> None:
    errors: list[BaseException] = []

    def work(flag: bool) -> None:
        try:
            for _ in range(20):
                generator = torch.Generator()

                def plain(x: Tensor, generator: torch.Generator = generator) -> Tensor:
                    return x.sin() * torch.rand(x.shape, generator=generator) if flag else x.sin() * 2

                results = []
                for function in (plain, region(plain)):
                    generator.manual_seed(1)
                    x = torch.linspace(0, 1, 6).requires_grad_()
                    results.append(torch.autograd.grad(function(x).square().sum(), x)[0])
                assert torch.equal(*results)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(bool(place % 2),)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
