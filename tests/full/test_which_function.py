"""`sac.checkpoint` learns from earlier calls of a function: what one has shown is never used for another.

A body without noise needs no dispatch mode, and that is learnt. The same body with noise from a generator of the
caller's does: without a mode its recomputation would draw other numbers, and the gradient would be wrong.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import gc
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sac
from sac.full.full_config import FullConfig
from sac.region.identity import Identity
from sac.selective import modes
from tests.full import flags

NOISE = torch.Generator()
LOUD = False
LOUD_IN_A_DICT = {"loud": False}


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


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The forwards that ran under a mode."""
    seen: list[Any] = []
    enter = modes.ForwardMode.__enter__

    def counted(self: Any) -> Any:
        seen.append(self)
        return enter(self)

    monkeypatch.setattr(modes.ForwardMode, "__enter__", counted)
    return seen


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


# One function, changed between two calls


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
        identity = Identity()
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


# What is learnt


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
    assert block.calls > 5


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
