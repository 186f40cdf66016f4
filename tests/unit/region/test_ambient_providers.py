"""State of the user's own is that of the forward in recomputation, and afterwards what it was before.

TransformerEngine keeps the scales of its forwards in one queue per module and takes them first in, first out; backward
comes last in, first out. With a module in two regions it restores the wrong scale.
"""

from __future__ import annotations

import weakref
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


class AmaxHistory:
    """The largest values of the last three forwards, in plain Python; the scale of the next one follows from them."""

    def __init__(self) -> None:
        self.largest = [1.0, 1.0, 1.0]

    def scaled(self, x: Tensor) -> Tensor:
        """Round to a grid whose width lags behind, as FP8 with delayed scaling does."""
        scale = 8 / max(self.largest)
        self.largest = [*self.largest[1:], float(x.detach().abs().max())]
        return x + ((x * scale).round() / scale - x).detach()

    def snapshot(self) -> list[float]:
        return list(self.largest)

    def restore(self, state: list[float]) -> None:
        self.largest = list(state)


class Quantised(nn.Module):
    """A block with state that is neither parameter nor buffer; each call changes it."""

    def __init__(self, history: AmaxHistory, counter: Counter) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.history, self.counter = history, counter

    def forward(self, x: Tensor) -> Tensor:
        self.counter.count += 1
        h = self.history.scaled(F.dropout(self.linear(x), 0.3))
        return (h * self.counter.count).sin() * x


def quantised(history: AmaxHistory, counter: Counter) -> Stack:
    """One module in two regions, a second one between them."""
    shared = Quantised(history, counter)
    return Stack(shared, Quantised(history, counter), shared)


WAYS: dict[str, Any] = {
    "function": lambda state: lambda model: by_function(model, FullConfig(state=state)),
    "full": lambda state: lambda model: install(model, {**FULL, "state": state}),
    "selective": lambda state: lambda model: install(model, {**MATMULS, "state": state}),
}


def trained(way: Any, *, retain: bool = False) -> dict[str, Any]:
    """Three steps in which two microbatches go forward before the first one goes backward."""
    history, counter = AmaxHistory(), Counter()
    model = way(built(lambda: quantised(history, counter)))
    seen: dict[str, Any] = {}
    torch.manual_seed(3)
    for step in range(3):
        batches = [square()[0].requires_grad_() for _ in range(2)]
        losses = [model(x).square().sum() for x in batches]
        seen |= {f"{step} history": torch.tensor(history.largest), f"{step} count": torch.tensor(counter.count)}
        for loss in losses:
            if retain:
                loss.backward(retain_graph=True)
            loss.backward()
        seen |= {f"{step} history after": torch.tensor(history.largest)}
        seen |= {f"{step} input {place}": x.grad for place, x in enumerate(batches)}
        seen |= {f"{step} {name}": parameter.grad.clone() for name, parameter in model.named_parameters()}
    return seen


def hidden(model: Stack) -> Stack:
    """Let the blocks find their objects where no region looks."""
    for block in model.blocks:
        if not isinstance(block.history, Behind):
            block.history, block.counter = Behind(block.history), Behind(block.counter)
    return model


class Behind:
    """Gives the attributes of an object that it does not hold."""

    __slots__ = ("__weakref__",)

    def __init__(self, one: Any) -> None:
        _BEHIND[self] = one

    def __getattr__(self, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return getattr(_BEHIND[self], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_BEHIND[self], name, value)


_BEHIND: weakref.WeakKeyDictionary[Behind, Any] = weakref.WeakKeyDictionary()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_objects_that_no_region_reaches_are_put_back_by_their_providers(way: Any) -> None:
    def put(model: Stack) -> Stack:
        state = (model.blocks[0].history, model.blocks[0].counter)
        return way(state)(hidden(model))

    assert_same(trained(as_it_is), trained(put))


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


def test_providers_are_not_asked_where_nothing_is_recomputed() -> None:
    log = Noted()
    one = Noting("one", log)
    with torch.no_grad():
        sac.checkpoint(lambda x: x.sin(), torch.ones(2), config=FullConfig(state=(one,)))
    assert log == []
