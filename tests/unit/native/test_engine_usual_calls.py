"""Usual calls take the short ways: one record at the start, a tape that ends as the last one did, a replay at once."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sac.errors import SacWarning
from sac.recompute.native_recorder import NativeReplayFrame, NativeReplayRecorder
from sac.region.module_state import ModuleState
from tests.support.blocks import FunctionBlock, Stack, llama_stack, selective, with_dropout
from tests.support.native_engine import assert_same_with_library, needs_library, with_library
from tests.support.replay_programs import ON_EACH, POLICIES, applied, block_of, python_runs, replay
from tests.support.runs import Noted
from tests.support.training import assert_same, built, train

pytestmark = needs_library


@contextmanager
def counted() -> Iterator[Counter[tuple[str, bool]]]:
    """How often each of the short ways was taken, and how often it was left."""
    found: Counter[tuple[str, bool]] = Counter()
    closes = ModuleState.close

    def noting(name: str, original: Callable[..., bool]) -> Callable[..., bool]:
        def noted(*args: Any) -> bool:
            answer = original(*args)
            found[name, answer] += 1
            return answer

        return noted

    def close(state: ModuleState) -> None:
        closes(state)
        found["start", state._at_start is not None] += 1

    with (
        mock.patch.object(NativeReplayFrame, "_replay_at_once", noting("replay", NativeReplayFrame._replay_at_once)),
        mock.patch.object(NativeReplayRecorder, "_ends_as_before", noting("end", NativeReplayRecorder._ends_as_before)),
        mock.patch.object(ModuleState, "close", close),
    ):
        yield found


def steps_of(model: Stack, make_input: Callable[[], Tensor], steps: int) -> None:
    for _ in range(steps):
        model(make_input()).square().sum().backward()


def with_dropouts() -> Stack:
    return with_dropout(llama_stack(), attention=0.1)


def routes(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin()
    best, index = h.detach().topk(3, -1)
    return (x @ block.b).gather(-1, index).cos() * best


def routed() -> Stack:
    return Stack(FunctionBlock(routes))


@ON_EACH
@pytest.mark.parametrize("verify", ["always", "never"])
@pytest.mark.parametrize("build", [llama_stack, with_dropouts, routed])
def test_a_usual_call_takes_the_short_ways(build: Callable[[], Stack], chosen: dict[str, Any], verify: str) -> None:
    with with_library():
        model = applied(build, replay(chosen, verify))
        width = next(model.parameters()).shape[-1]

        def make_input() -> Tensor:
            return torch.randn(2, 8, width)

        steps_of(model, make_input, 3)
        with counted() as found:
            steps_of(model, make_input, 3)
    regions = found["start", True]
    assert regions > 0
    assert found == {("start", True): regions, ("end", True): regions, ("replay", True): regions}


def writes_to_a_buffer(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.count.add_(1)
    return (x @ block.a * block.count).cos() @ block.b


def drops(block: FunctionBlock, x: Tensor) -> Tensor:
    return torch.dropout((x @ block.a).sin(), 0.5, train=True).cos() @ block.b


def writes_to_its_own(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin()
    kept = h.cos()
    return kept.mul_(h.detach()).exp() @ block.b


@pytest.mark.parametrize("body", [writes_to_a_buffer, drops, writes_to_its_own])
@ON_EACH
def test_what_is_unusual_is_left_to_python(body: Callable[..., Tensor], chosen: dict[str, Any]) -> None:
    def build() -> Stack:
        stack = block_of(body)()
        stack.blocks[0].register_buffer("count", torch.zeros(()))
        return stack

    assert_same_with_library(build, replay(chosen), ops=None, steps=4)


@pytest.mark.parametrize("verify", ["always", "never"])
def test_python_gets_the_routing_of_a_call_that_ended_in_the_short_way(verify: str) -> None:
    """A tensor that replay reads was written to, so Python runs; so was the one that decides the routing."""
    shift, preference = Noted(torch.zeros(64, 8)), torch.zeros(8, 8)

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = x @ block.a
        index = (h.detach() + preference).topk(3, 1)[1]
        return (x @ block.b + shift[0].mean(0)).sin().gather(1, index).cos().sum(1, keepdim=True) * h

    def run(model: Stack) -> list[Tensor]:
        found = []
        for step in range(6):
            torch.manual_seed(step)
            preference.zero_()
            loss = model(torch.randn(8, 8)).square().sum()
            if step == 5:
                preference.copy_(torch.eye(8) * 1e3)
                shift[0].add_(0)
            found += torch.autograd.grad(loss, [*model.parameters()])
        return found

    expected = run(built(block_of(body)))
    with with_library(), counted() as found, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", SacWarning)
        model = applied(block_of(body), selective(POLICIES["matmuls"], verify=verify))
        ours = run(model)
    assert all(map(torch.equal, expected, ours))
    assert found["end", True] >= 2
    assert python_runs(model) == 7
    assert any("changed in place" in str(one.message) for one in said)


@ON_EACH
@pytest.mark.parametrize("verify", ["always", "never"])
def test_gradients_of_parts_wait_for_other_handles(chosen: dict[str, Any], verify: str) -> None:
    """A backward that reads fewer tensors than the schedule fills, then one that reads the rest."""

    def gradients(model: Stack) -> dict[str, Tensor]:
        found = {}
        for step in range(3):
            torch.manual_seed(step)
            loss = model(torch.randn(8, 8)).square().sum()
            parameters = dict(model.named_parameters())
            names = [*parameters]
            for part in (names[:1], names[1:], names):
                one = torch.autograd.grad(loss, [parameters[name] for name in part], retain_graph=part is not names)
                found.update({f"{step} {len(part)} {name}": value for name, value in zip(part, one, strict=True)})
        return found

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return ((x @ block.a).sin() * x).cos() @ block.b

    def build() -> Stack:
        return Stack(FunctionBlock(body), FunctionBlock(body))

    with with_library():
        assert_same(gradients(built(build)), gradients(applied(build, replay(chosen, verify))))


@pytest.mark.parametrize("native", [True, False])
@ON_EACH
def test_a_later_call_writes_to_what_autograd_has_saved(chosen: dict[str, Any], native: bool) -> None:
    """Through `data`, which moves no version: backward reads what was written, without us too."""
    calls: list[Tensor] = []  # of which something holds the results

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).exp()
        out = h.sin() @ block.b
        if len(calls) >= 3:
            h.data.mul_(2)
        calls.append(h)
        return out

    def run(model: Stack) -> list[Tensor]:
        found: list[Tensor] = []
        for step in range(5):
            torch.manual_seed(step)
            loss = model(torch.randn(8, 8)).square().sum()
            found += torch.autograd.grad(loss, [*model.parameters()])
        calls.clear()
        return found

    expected = run(built(block_of(body)))
    with with_library(native):
        assert all(map(torch.equal, expected, run(applied(block_of(body), replay(chosen)))))


def test_a_call_with_another_tape_ends_on_its_own() -> None:
    """The shape, and so the layout that is expected, is the same; the branch is not."""
    taken: list[bool] = []

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).sin()
        if len(taken) % 4 == 3:
            h = h.tanh()
        return h.cos() @ block.b

    def train_once(value: Any) -> dict[str, Any]:
        taken.clear()

        def make_input(device: str) -> tuple[Tensor, ...]:
            taken.append(True)
            return (torch.randn(8, 8, device=device),)

        model = built(block_of(body)) if value is None else applied(block_of(body), value)
        return train(model, steps=12, make_input=make_input)

    with with_library(), counted() as found:
        ours = train_once(replay(POLICIES["matmuls"]))
    assert_same(train_once(None), ours)
    assert found["end", False] > 2
    assert found["end", True] > 2
