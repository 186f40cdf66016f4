"""One function, changed between two calls: what the first has shown is not used for the second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from sac.region.fingerprint import FunctionFingerprint
from torch import Tensor, nn

from tests.support import flags
from tests.support.quiet_and_loud import (
    Block,
    Plain,
    Slotted,
    SlottedBelow,
    Unhashable,
    assert_not_confused,
    body,
    default,
)

LOUD = False
LOUD_IN_A_DICT = {"loud": False}


def test_a_cell_is_bound_anew() -> None:
    loud = False

    def function(x: Tensor) -> Tensor:
        return body(x, loud)

    def flip() -> Callable[..., Tensor]:
        nonlocal loud
        loud = True
        return function

    assert_not_confused(function, flip)


@pytest.mark.parametrize("make", [Plain, Slotted, SlottedBelow, Unhashable])
def test_an_attribute_of_a_callable_is_changed(make: Any) -> None:
    function = make(False)

    def flip() -> Callable[..., Tensor]:
        function.loud = True
        return function  # type: ignore[no-any-return]

    assert_not_confused(function, flip)


def test_an_attribute_of_the_object_behind_a_method_is_changed() -> None:
    held = Plain(False)

    def flip() -> Callable[..., Tensor]:
        held.loud = True
        return held.run

    assert_not_confused(held.run, flip)


def test_a_container_in_the_closure_is_changed() -> None:
    held = {"loud": False}

    def function(x: Tensor) -> Tensor:
        return body(x, held["loud"])

    def flip() -> Callable[..., Tensor]:
        held["loud"] = True
        return function

    assert_not_confused(function, flip)


def test_defaults_are_changed() -> None:
    function = default(False)

    def flip() -> Callable[..., Tensor]:
        function.__defaults__ = (True,)  # type: ignore[attr-defined]
        return function

    assert_not_confused(function, flip)


def reads_a_global(x: Tensor) -> Tensor:
    return body(x, LOUD)


def calls_what_reads_a_global(x: Tensor) -> Tensor:
    return reads_a_global(x)


def reads_a_global_in_a_nested_function(x: Tensor) -> Tensor:
    return (lambda: body(x, LOUD))()


@pytest.mark.parametrize(
    "function",
    [
        reads_a_global,
        calls_what_reads_a_global,
        reads_a_global_in_a_nested_function,
        lambda x: calls_what_reads_a_global(x),
        functools.partial(reads_a_global),
    ],
)
def test_a_global_is_changed(function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def flip() -> Callable[..., Tensor]:
        monkeypatch.setattr(f"{__name__}.LOUD", True)
        return function

    assert_not_confused(function, flip)


def test_an_entry_of_a_global_dict_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        return body(x, LOUD_IN_A_DICT["loud"])

    def flip() -> Callable[..., Tensor]:
        monkeypatch.setitem(LOUD_IN_A_DICT, "loud", True)
        return function

    assert_not_confused(function, flip)


def test_an_attribute_of_a_python_module_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        return body(x, flags.LOUD)

    def flip() -> Callable[..., Tensor]:
        monkeypatch.setattr(flags, "LOUD", True)
        return function

    assert_not_confused(function, flip)


def test_an_attribute_of_a_class_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        return body(x, flags.Flags.loud)

    def flip() -> Callable[..., Tensor]:
        monkeypatch.setattr(flags.Flags, "loud", True)
        return function

    assert_not_confused(function, flip)


def test_an_attribute_of_a_submodule_is_changed() -> None:
    block = Block(False)

    def flip() -> Callable[..., Tensor]:
        block.part.loud = True  # type: ignore[assignment]
        return block

    assert_not_confused(block, flip)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(2, 2), nn.Dropout(), nn.LayerNorm(2), nn.RMSNorm(2), nn.GroupNorm(1, 2), nn.GELU(), nn.SiLU(), nn.ReLU(),
     nn.Softmax()],
)  # fmt: skip
def test_of_built_in_modules_only_training_is_looked_at_unless_they_have_been_given_more(module: nn.Module) -> None:
    def parts() -> list[Any]:
        identity = FunctionFingerprint()
        identity.add(module)
        return identity.parts

    before = parts()
    assert len(before) == 3  # itself, its class, `training`
    module.eval()
    assert parts() != before
    module.loud = False  # type: ignore[assignment]
    quiet = parts()
    module.loud = True  # type: ignore[assignment]
    assert len(before) < len(quiet) == len(parts())
    assert parts() != quiet


def test_a_submodule_is_put_into_training() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return body(x, self.training)

    block = nn.Sequential(nn.Identity(), Noisy())
    block[1].eval()

    def flip() -> Callable[..., Tensor]:
        block[1].train()
        return block

    assert_not_confused(block, flip)


def test_a_submodule_is_exchanged() -> None:
    block = nn.Sequential(Block(False))

    def flip() -> Callable[..., Tensor]:
        block[0] = Block(True)
        return block

    assert_not_confused(block, flip)


def test_a_forward_is_put_on_the_instance() -> None:
    block = Block(False)

    def flip() -> Callable[..., Tensor]:
        block.forward = functools.partial(body, loud=True)  # type: ignore[method-assign]
        return block

    assert_not_confused(block, flip)


def test_a_hook_is_put_on_a_submodule() -> None:
    block = nn.Sequential(nn.Identity())

    def flip() -> Callable[..., Tensor]:
        block[0].register_forward_hook(lambda module, args, out: body(out, True))
        return block

    assert_not_confused(block, flip)
