"""Functions that need no dispatch mode, and the same ones with noise from a generator of the caller's, which do."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sac

NOISE = torch.Generator()


def body(x: Tensor, loud: Any) -> Tensor:
    """A product, with noise that no snapshot of default generators knows of."""
    y = x.sin()
    return y * torch.rand(y.shape, generator=NOISE) if loud else y * 2


def gradient(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The gradient with respect to the input of `function`, a region or not."""
    NOISE.manual_seed(3)
    x = torch.linspace(0, 1, 6).requires_grad_()
    (gradient,) = torch.autograd.grad(function(x, *args, **kwargs).square().sum(), x)
    return gradient


def region(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return functools.partial(sac.checkpoint, function)


def assert_not_confused(quiet: Callable[..., Tensor], loud: Callable[[], Callable[..., Tensor]]) -> None:
    """Learn that `quiet` needs no mode; `loud` then makes the function that does."""
    for _ in range(3):
        before = gradient(quiet)
        assert torch.equal(gradient(region(quiet)), before)
    noisy = loud()
    assert not torch.equal(gradient(noisy), before)
    for _ in range(3):
        assert torch.equal(gradient(region(noisy)), gradient(noisy))


# What may tell two functions apart


def closure(flag: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: body(x, flag)


def nested_closure(flag: Any) -> Callable[[Tensor], Tensor]:
    def inner(x: Tensor) -> Tensor:
        return body(x, flag)

    return lambda x: inner(x)


def in_containers(flag: Any) -> Callable[[Tensor], Tensor]:
    held = {"a": [1, (2, {"flag": flag})]}
    return lambda x: body(x, held["a"][1][1]["flag"])  # type: ignore[index]


def in_a_set(flag: Any) -> Callable[[Tensor], Tensor]:
    held = {"loud"} if flag else {"quiet"}
    return lambda x: body(x, "loud" in held)


def in_a_deque(flag: Any) -> Callable[[Tensor], Tensor]:
    held = collections.deque([flag])
    return lambda x: body(x, held[0])


def default(flag: Any) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor, loud: Any = flag) -> Tensor:
        return body(x, loud)

    return function


def keyword_default(flag: Any) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor, *, loud: Any = flag) -> Tensor:
        return body(x, loud)

    return function


def attribute_of_the_function(flag: Any) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return body(x, function.loud)  # type: ignore[attr-defined]

    function.loud = flag  # type: ignore[attr-defined]
    return function


def partial(flag: Any) -> Callable[[Tensor], Tensor]:
    return functools.partial(body, loud=flag)


def partial_of_partial(flag: Any) -> Callable[[Tensor], Tensor]:
    return functools.partial(functools.partial(lambda loud, x: body(x, loud), flag))


class Plain:
    def __init__(self, loud: Any) -> None:
        self.loud = loud

    def __call__(self, x: Tensor) -> Tensor:
        return body(x, self.loud)

    def run(self, x: Tensor) -> Tensor:
        return body(x, self.loud)


class Slotted:
    __slots__ = ("loud",)

    def __init__(self, loud: Any) -> None:
        self.loud = loud

    def __call__(self, x: Tensor) -> Tensor:
        return body(x, self.loud)


class SlottedBelow(Slotted):
    __slots__ = ("other",)


@dataclasses.dataclass
class Unhashable:
    loud: Any

    def __call__(self, x: Tensor) -> Tensor:
        return body(x, self.loud)


@dataclasses.dataclass(frozen=True)
class EqualToAll:
    """Equal to all others, and of one hash: two of them are still two."""

    loud: Any = dataclasses.field(compare=False)

    def __call__(self, x: Tensor) -> Tensor:
        return body(x, self.loud)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenWithSlots:
    loud: Any

    def __call__(self, x: Tensor) -> Tensor:
        return body(x, self.loud)


class Volume(enum.Enum):
    QUIET = 0
    LOUD = 1


def enumerated(flag: Any) -> Callable[[Tensor], Tensor]:
    volume = Volume.LOUD if flag else Volume.QUIET
    return lambda x: body(x, volume is Volume.LOUD)


def bound_method(flag: Any) -> Callable[[Tensor], Tensor]:
    return Plain(flag).run


def object_in_the_closure(flag: Any) -> Callable[[Tensor], Tensor]:
    config = types.SimpleNamespace(noise=types.SimpleNamespace(loud=flag))
    return lambda x: body(x, config.noise.loud)


def other_function(flag: Any) -> Callable[[Tensor], Tensor]:
    chosen = (lambda x: body(x, True)) if flag else (lambda x: body(x, False))
    return lambda x: chosen(x)


def generated(flag: Any) -> Callable[[Tensor], Tensor]:
    """Equal code with other globals, as in two modules made of one template."""
    made: dict[str, Any] = {"body": body, "FLAG": flag}
    exec("def function(x):\n    return body(x, FLAG)", made)
    return made["function"]  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, loud: Any) -> None:
        super().__init__()
        self.part = nn.Identity()
        self.part.loud = loud
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return body(x * self.weight, self.part.loud)


MAKERS = [
    closure, nested_closure, in_containers, in_a_set, in_a_deque, default, keyword_default, attribute_of_the_function,
    partial, partial_of_partial, Plain, Slotted, SlottedBelow, Unhashable, EqualToAll, FrozenWithSlots, enumerated,
    bound_method, object_in_the_closure, other_function, generated, Block,
]  # fmt: skip
