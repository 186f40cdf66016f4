"""Regions that are recomputed on two threads at once: what belongs to the process is not mixed up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from sac.region import ambient as process_flags
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sac
from sac.full import FullConfig
from tests.support.runs import Noted
from tests.support.stateful import Counter

WAIT = 60  # seconds until a test that hangs gives up


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = process_flags._read()
    yield
    assert process_flags._read() == before
    assert process_flags._changes == []


def flags() -> tuple[bool, ...]:
    return tuple(
        getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")
    )


class Meeting:
    """A region's body that waits in recomputation until it is told to go on, and notes the flags before and after."""

    def __init__(self) -> None:
        self.there, self.go = threading.Event(), threading.Event()
        self.runs, self.seen = Noted(), Noted()

    def __call__(self, x: Tensor) -> Tensor:
        self.runs.append(1)
        self.seen.append(flags())
        if len(self.runs) == 2:
            self.there.set()
            assert self.go.wait(WAIT)
            self.seen.append(flags())
        return x.sin().cos()


class Backwards:
    """Two backwards on two threads, driven step by step."""

    def __init__(self, *around: Callable[[], AbstractContextManager[Any]]) -> None:
        self.bodies = [Meeting() for _ in around]
        self.inputs = [torch.ones(2, requires_grad=True) for _ in around]
        self.threads = []
        self.errors: list[BaseException] = []
        for body, x, surrounding in zip(self.bodies, self.inputs, around, strict=True):
            with surrounding():
                out = sac.checkpoint(body, x)
            self.threads.append(threading.Thread(target=self._run, args=(out.sum(),)))

    def _run(self, loss: Tensor) -> None:
        try:
            loss.backward()
        except BaseException as error:  # asserted on below
            self.errors.append(error)

    def enter(self, index: int) -> None:
        self.threads[index].start()
        assert self.bodies[index].there.wait(WAIT)

    def leave(self, index: int) -> None:
        self.bodies[index].go.set()
        self.threads[index].join(WAIT)
        assert not self.threads[index].is_alive()
        assert not self.errors, self.errors


MATH = partial(sdpa_kernel, SDPBackend.MATH)
FLASH = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "first in last out"])
def test_two_recomputations_of_one_forwards_flags_do_not_disturb_each_other(order: tuple[int, int]) -> None:
    both = Backwards(MATH, MATH)
    both.enter(0)
    both.enter(1)
    for index in order:
        both.leave(index)
    for body in both.bodies:
        assert len(set(body.seen)) == 1
        assert body.seen[0] != flags()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "first in last out"])
def test_after_two_recomputations_of_different_flags_all_is_as_before(order: tuple[int, int]) -> None:
    """The flags are the process's: while both run, the one that came last has its own."""
    before = flags()
    both = Backwards(MATH, FLASH)
    both.enter(0)
    both.enter(1)
    for index in order:
        both.leave(index)
    assert flags() == before
    assert len(set(both.bodies[1].seen)) == 1


def test_of_three_any_may_leave_first() -> None:
    before = flags()
    three = Backwards(MATH, nullcontext, FLASH)
    for index in range(3):
        three.enter(index)
    for index in (1, 0, 2):
        three.leave(index)
    assert flags() == before


def test_a_patched_attention_on_two_threads_is_taken_back_once() -> None:
    original = F.scaled_dot_product_attention

    def patched(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    class Patch:
        def __enter__(self) -> None:
            F.scaled_dot_product_attention = patched

        def __exit__(self, *error: object) -> None:
            F.scaled_dot_product_attention = original

    both = Backwards(Patch, Patch)
    both.enter(0)
    assert F.scaled_dot_product_attention is patched
    both.enter(1)
    both.leave(0)
    assert F.scaled_dot_product_attention is patched
    both.leave(1)
    assert F.scaled_dot_product_attention is original


def test_what_belongs_to_a_thread_is_the_recomputations_own() -> None:
    """Autocast, modes and grad mode of one thread's recomputation are not seen on the other."""
    seen = Noted()

    def own() -> Any:
        stack = torch.overrides._get_current_function_mode_stack()
        return torch.is_autocast_enabled("cpu"), [type(mode).__name__ for mode in stack], torch.is_grad_enabled()

    gate = threading.Barrier(2)

    def region(name: str) -> Callable[[Tensor], Tensor]:
        def body(x: Tensor) -> Tensor:
            if name in [noted for noted, _ in seen]:
                gate.wait(WAIT)
                seen.append((f"{name} again", own()))
                gate.wait(WAIT)
            else:
                seen.append((name, own()))
            return x.sin().cos()

        return body

    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu"), torch.device("cpu"):
        first = sac.checkpoint(region("first"), x).sum()
    second = sac.checkpoint(region("second"), x).sum()
    threads = [threading.Thread(target=loss.backward) for loss in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    found = dict(seen)
    assert found["first"] == found["first again"] == (True, ["DeviceContext"], True)
    assert found["second"] == found["second again"] == (False, [], True)


def test_many_threads_leave_nothing_changed() -> None:
    """Each with regions of its own and other flags in the forward; backward of all at once."""
    attention = F.scaled_dot_product_attention
    surroundings = [MATH, FLASH, nullcontext, MATH]
    providers = [Counter() for _ in surroundings]
    found: list[Tensor | None] = [None] * len(surroundings)
    losses, inputs = [], []
    for place, (surrounding, steps) in enumerate(zip(surroundings, providers, strict=True)):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(place)).requires_grad_()
        h = x
        with surrounding():
            for _ in range(20):
                h = sac.checkpoint(body_of(steps), h, config=FullConfig(state=(steps,)))
        losses.append(h.sum())
        inputs.append(x)
    gate = threading.Barrier(len(losses))

    def backward(place: int) -> None:
        gate.wait(WAIT)
        losses[place].backward()
        found[place] = inputs[place].grad

    threads = [threading.Thread(target=backward, args=(place,)) for place in range(len(losses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    for place, x in enumerate(inputs):
        again, steps = x.detach().clone().requires_grad_(), Counter()
        h = again
        for _ in range(20):
            h = body_of(steps)(h)
        h.sum().backward()
        assert torch.equal(found[place], again.grad)
        assert providers[place].count == 20
    assert F.scaled_dot_product_attention is attention


def body_of(steps: Counter) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        steps.count += 1
        return (x * steps.count).sin().cos()

    return body
