"""What surrounds a region is compared in C++, and restored and undone by Python where it differs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import set_checkpoint_early_stop

import sac
from sac.native.load import library
from sac.region import ambient, module_state
from sac.region.ambient import FLAGS, GENERATOR, HOST, THREAD, Surroundings
from sac.region.module_state import ModuleState
from sac.region.undo import UndoStack
from sac.tensors import STORAGE_WATCHERS
from tests.support.runs import Noted

NATIVE: Any = library()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the library is off")
SWITCHED = (ambient, module_state)  # see the fixture `switch`
numpy = pytest.importorskip("numpy")
EVERY = GENERATOR | HOST | FLAGS | THREAD


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state(), ambient._read()
    numpy.random.seed(3)  # no second number of a pair is pending
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    ambient._put(states[3])


def now() -> Surroundings:
    found = ambient._LATEST.now()
    assert found is not None
    return found


def test_surroundings_that_are_the_same_are_read_once() -> None:
    first = now()
    assert first.same(EVERY) == EVERY
    assert now() is first


def normal() -> None:
    torch.randn(3)  # leaves a number for the next call


DRAWS: dict[str, tuple[Callable[[], Any], int]] = {
    "torch": (lambda: torch.rand(1), GENERATOR),
    "torch, a pair of numbers": (normal, GENERATOR),
    "torch, a seed": (lambda: torch.manual_seed(77), GENERATOR),
    "Python": (random.random, HOST),
    "Python, a pair of numbers": (lambda: random.gauss(0.0, 1.0), HOST),
    "Python, a seed": (lambda: random.seed(5), HOST),
    "NumPy": (numpy.random.random, HOST),
    "NumPy, a seed": (lambda: numpy.random.seed(9), HOST),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_seen_and_taken_back(name: str) -> None:
    draw, part = DRAWS[name]
    before = now()
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    draw()
    assert before.same(EVERY) == EVERY & ~part
    after = now()
    assert after is not before
    assert (after.host is before.host) == (part != HOST)
    assert after.flags is before.flags
    assert after.thread is before.thread
    before.put_back(GENERATOR | HOST, states[0])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]
    assert before.same(EVERY) == EVERY


def test_a_second_number_that_only_python_has_is_seen() -> None:
    """The words are the same as in the record: only `gauss_next` differs."""
    random.gauss(0.0, 1.0)
    before = now()
    random.gauss(0.0, 1.0)
    assert before.same(HOST) == 0


def test_a_second_number_of_numpy_is_not_known() -> None:
    numpy.random.randn()
    before = now()
    assert before.same(HOST) == 0
    number = numpy.random.randn()
    again = now()
    assert again.host is not before.host
    before.host.put_back()
    assert numpy.random.randn() == number


def test_numpy_with_another_generator_is_seen() -> None:
    if not hasattr(numpy.random, "set_bit_generator"):
        pytest.skip("NumPy 1.24")
    before, source = now(), numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.MT19937(5))
        assert before.same(HOST) == 0
        numpy.random.set_bit_generator(numpy.random.PCG64(5))
        assert now().same(HOST) == 0
    finally:
        numpy.random.set_bit_generator(source)


def other_than(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, torch.dtype):
        return torch.float64
    if isinstance(value, list):
        return value[::-1]
    return ("tf32", "bf16") if value[0] != "tf32" else ("ieee", "ieee")


HAVE_A_TEST_OF_THEIR_OWN = (ambient._attention, ambient.attention_choice)


@pytest.mark.parametrize(
    "index", [index for index, read in enumerate(ambient._READERS) if read not in HAVE_A_TEST_OF_THEIR_OWN]
)
def test_each_flag_is_seen(index: int) -> None:
    read, put = ambient._READERS[index], ambient._SETTERS[index]
    before, value = now(), read()
    wanted = other_than(value)
    put(("tf32", "tf32") if read.__qualname__.startswith("_precision") else wanted)
    if read() == value:
        pytest.skip("this build cannot set it")
    assert before.same(EVERY) == EVERY & ~FLAGS
    with UndoStack() as stack:
        before.flags.enter_on(stack)
        assert read() == value
    assert read() != value
    put(value)
    assert before.same(EVERY) == EVERY


def test_another_attention_function_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    before = now()
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *args: None)
    assert before.same(FLAGS) == now().same(FLAGS) == 0


def test_transformer_engine_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    before = now()
    monkeypatch.setitem(sys.modules, ambient._TRANSFORMER_ENGINE, sys)
    assert before.same(FLAGS) == now().same(FLAGS) == 0


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "entered",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        Mode,
        torch._C.DisableTorchFunctionSubclass,
    ],
)
def test_what_belongs_to_the_thread_is_seen(entered: Callable[[], Any]) -> None:
    before = now()
    with entered():
        assert before.same(EVERY) == EVERY & ~THREAD
        assert now().host is before.host
    assert before.same(EVERY) == EVERY


def test_a_plan_has_no_records() -> None:
    STORAGE_WATCHERS.append(lambda storage: None)
    try:
        assert ambient._LATEST.now() is None
    finally:
        STORAGE_WATCHERS.pop()


def test_a_record_of_an_earlier_state_is_not_taken_for_a_later_one_that_draws_meanwhile() -> None:
    """The states of the values and of the record are compared after both have been read."""

    class Drawing:
        def __getattr__(self, name: str) -> Any:
            return getattr(NATIVE, name)

        def Surroundings(self, *given: Any) -> Any:
            record = NATIVE.Surroundings(*given)
            torch.rand(1)
            return record

    assert Surroundings(Drawing(), None, EVERY).same(EVERY) == EVERY & ~GENERATOR


def test_values_that_change_after_the_record_before_was_compared_are_read_anew() -> None:
    """Another thread may draw between the two."""

    class Drawing:
        def __getattr__(self, name: str) -> Any:
            return getattr(NATIVE, name)

        def Surroundings(self, *given: Any) -> Any:
            random.random()
            return NATIVE.Surroundings(*given)

    found = Surroundings(Drawing(), now(), GENERATOR)
    assert found.same(HOST) == HOST
    recorded = random.getstate()
    random.random()
    found.put_back(HOST, None)
    assert random.getstate() == recorded


def test_a_record_is_not_taken_for_a_state_that_was_read_after_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may draw between the two."""
    read = ambient.RngSnapshot.__init__

    def drawing(self: Any, *args: Any, **more: Any) -> None:
        torch.rand(1)
        read(self, *args, **more)

    block, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)), torch.ones(2, 4)
    monkeypatch.setattr(ambient.RngSnapshot, "__init__", drawing)
    gradients = []
    for call in (block, partial(sac.checkpoint, block)):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        if call is block:
            torch.rand(1)
        loss = call(x).sum()
        torch.set_rng_state(before)
        loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
        gradients.append([one.grad.clone() for one in block.parameters()])
        block.zero_grad()
    assert all(map(torch.equal, *gradients))


# Modules


def add_hook(block: nn.Module) -> None:
    block.weight.register_hook(lambda grad: grad)


def add_late_hook(block: nn.Module) -> None:
    block.weight.register_post_accumulate_grad_hook(lambda one: None)


def rebind(block: nn.Module) -> None:
    block.seen = block.seen + 1


def remove(block: nn.Module) -> None:
    del block.seen


CHANGES: dict[str, Callable[[Any], Any]] = {
    "training": lambda block: block.eval(),
    "training of a submodule": lambda block: block.inner.eval(),
    "requires_grad": lambda block: block.weight.requires_grad_(False),
    "a rebound buffer": rebind,
    "a removed buffer": remove,
    "a new buffer": lambda block: block.register_buffer("more", torch.ones(1)),
    "a hook": add_hook,
    "a late hook": add_late_hook,
}


def looks(block: Any) -> Any:
    modules = [one.training for one in block.modules()]
    buffers = {name: id(one) for name, one in block.named_buffers()}
    hooks = [dict(getattr(block.weight, name) or {}) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    return modules, buffers, block.weight.requires_grad, hooks


@pytest.mark.parametrize("when", ["between", "in the recomputation", "both"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_restored_and_undone(name: str, when: str, fails: bool, switch: Callable[[bool], None]) -> None:
    found = []
    for is_on in (True, False):
        switch(is_on)
        block: Any = nn.Linear(2, 2)
        block.inner = nn.Dropout()
        block.register_buffer("seen", torch.zeros(1))
        state = ModuleState(tuple(block.modules()))
        state.close()
        start = looks(block)
        if when != "in the recomputation":
            CHANGES[name](block)
        between = looks(block)
        inside: Any = None
        try:
            with UndoStack() as stack:
                state.enter_on(stack)
                inside = looks(block)
                if when != "between":
                    CHANGES[name](block)
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert looks(block) == between
        if "hook" not in name:
            assert inside == start
        found.append([one == start for one in (between, inside)])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", CHANGES)
def test_modules_that_differ_are_seen(name: str) -> None:
    block: Any = nn.Linear(2, 2)
    block.inner = nn.Dropout()
    block.register_buffer("seen", torch.zeros(1))
    owners = tuple(block.modules())
    given = (
        *(owners, [one.training for one in owners], [(block, dict(block._buffers))]),
        *([block.weight], [True], [block.weight]),
    )
    assert NATIVE.modules_are_as(*given)
    CHANGES[name](block)
    assert not NATIVE.modules_are_as(*given)


class Subclass(Tensor):
    pass


def test_tensors_of_subclasses_are_left_to_python() -> None:
    one = torch.ones(2).as_subclass(Subclass)
    assert not NATIVE.modules_are_as((), [], [], [one], [False], [])
    assert not NATIVE.modules_are_as((), [], [], [], [], [one])


# Regions


class _Failed(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("early_stop", [False, True])
def test_a_recomputation_that_begins_in_the_state_of_the_forward_leaves_it(
    fails: bool, early_stop: bool, switch: Callable[[bool], None]
) -> None:
    """Nothing has to be restored before it, and every state afterwards: the program has set the seeds again."""
    outcomes = []
    for is_on in (True, False):
        switch(is_on)
        runs = Noted()
        grads = []
        for is_region in (True, False):

            def body(x: Tensor, noted: Any = runs) -> Tensor:
                noise = torch.rand(4) * random.random() * float(numpy.random.random())
                noted.append(None)
                if fails and len(noted) == 2:
                    raise _Failed
                return (x * noise).sin().cos()

            x = torch.ones(4, requires_grad=True)
            for _ in range(1 if fails else 3):
                seed()
                with set_checkpoint_early_stop(early_stop):
                    out = sac.checkpoint(body, x) if is_region else body(x, Noted())
                seed()
                states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
                if fails and is_region:
                    with pytest.raises(_Failed):
                        out.sum().backward()
                else:
                    out.sum().backward()
                assert torch.equal(torch.get_rng_state(), states[0])
                assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]
            grads.append(x.grad)
        if not fails:
            assert torch.equal(*grads)
            assert len(runs) == 6
        outcomes.append(grads[1])
    assert torch.equal(*outcomes)


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
