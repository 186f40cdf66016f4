"""State of the user's own is that of the forward in recomputation, and afterwards what it was before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sac
from sac.engine.flags import BackendFlags
from sac.full import FullConfig
from tests.support.blocks import FULL, Stack, install, square
from tests.support.runs import Noted
from tests.support.stateful import MATMULS, Counter, as_it_is, by_function
from tests.support.training import assert_same, built

COUNTER = Counter()  # where no region looks


class Counting(nn.Module):
    """A block whose scale is the number of calls so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        COUNTER.count += 1
        return (F.dropout(self.linear(x), 0.3) * COUNTER.count).sin() * x


WAYS: dict[str, Any] = {
    "function": lambda model: by_function(model, FullConfig(state=(COUNTER,))),
    "full": lambda model: install(model, {**FULL, "state": (COUNTER,)}),
    "selective": lambda model: install(model, {**MATMULS, "engine": "rerun", "state": (COUNTER,)}),
}


def trained(way: Any) -> dict[str, Tensor]:
    """Steps in which two micro-batches go forward before the first one goes backward; one module is in two regions."""
    COUNTER.count = 0
    model = way(built(lambda: Stack(shared := Counting(), Counting(), shared)))
    seen = {}
    torch.manual_seed(3)
    for step in range(3):
        for loss in [model(*square()).square().sum() for _ in range(2)]:
            loss.backward()
        seen |= {f"{step} {name}": parameter.grad.clone() for name, parameter in model.named_parameters()}
        seen[f"{step} count"] = torch.tensor(COUNTER.count)
    return seen


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_state_that_no_region_reaches_is_put_back_by_its_provider(way: Any) -> None:
    assert_same(trained(as_it_is), trained(way))


class Noting:
    """Notes what is asked of it, and may fail at that."""

    def __init__(self, name: str, log: Noted, value: int = 0) -> None:
        self.name, self.log, self.value = name, log, value
        self.fails: set[str] = set()

    def snapshot(self) -> int:
        self._note(f"{self.name} is {self.value}")
        return self.value

    def restore(self, state: int) -> None:
        self.value = state
        self._note(f"{self.name} becomes {state}")

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what in self.fails:
            self.fails.remove(what)
            raise KeyError(what)


def changing(x: Tensor, *providers: Noting) -> Tensor:
    """A region that draws a random number and changes the state of each provider."""
    for provider in providers:
        provider.value += 1
        provider.log.append(f"{provider.name} runs")
    return F.dropout(x.sin(), 0.5).exp()


def test_providers_are_asked_in_order_and_undone_in_reverse() -> None:
    log = Noted()
    one, two = Noting("one", log), Noting("two", log)
    x = torch.ones(2, requires_grad=True)
    out = sac.checkpoint(lambda x: changing(x, one, two), x, config=FullConfig(state=(one, two)))
    assert log == ["one is 0", "two is 0", "one runs", "two runs"]
    log.clear()
    one.value, two.value = 10, 20
    out.sum().backward()
    before = ["one is 10", "one becomes 0", "two is 20", "two becomes 0"]
    assert log == [*before, "one runs", "two runs", "two becomes 20", "one becomes 10"]


@contextmanager
def everything_else_is_put_back(module: nn.Module) -> Iterator[None]:
    """Hold that random state, flags, autocast, modes and buffers are the same after a failure."""
    random, flags, count = torch.get_rng_state(), BackendFlags()._then, module.count.clone()
    yield
    assert torch.equal(torch.get_rng_state(), random)
    assert BackendFlags()._then == flags
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(module.count, count)


class Counted(nn.Module):
    """A region with a buffer of its own that counts, in addition to the providers."""

    def __init__(self, *providers: Noting) -> None:
        super().__init__()
        self.providers = providers
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
        return changing(x, *self.providers) * self.count


FAILURES = ["one is 10", "one becomes 0", "two is 20", "two becomes 0", "two becomes 20", "one becomes 10"]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_provider_that_raises_leaves_everything_else_put_back(failure: str) -> None:
    """Also when it is half done: it is given the state of now once more. Then backward can be tried again."""
    log = Noted()
    one, two = Noting("one", log), Noting("two", log)
    module = Counted(one, two)
    x = torch.ones(2, requires_grad=True)
    torch.manual_seed(0)
    with torch.autocast("cpu"), torch.device("cpu"), sdpa_kernel(SDPBackend.MATH):
        out = sac.checkpoint(module, x, config=FullConfig(state=(one, two)))
    torch.manual_seed(0)
    x_plain = torch.ones(2, requires_grad=True)
    (F.dropout(x_plain.sin(), 0.5).exp() * 1).sum().backward()
    one.value, two.value = 10, 20
    one.fails, two.fails = {failure}, {failure}
    with everything_else_is_put_back(module), pytest.raises(KeyError, match=failure):
        out.sum().backward(retain_graph=True)
    assert [one.value, two.value] == [10, 20]
    with everything_else_is_put_back(module):
        x.grad = None
        out.sum().backward()
    assert torch.equal(x.grad, x_plain.grad)
