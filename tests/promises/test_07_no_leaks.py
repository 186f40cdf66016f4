"""Memory is free when backward is done or the graph is dropped, without the cycle collector.

Storages are watched by weak references from outside; torch's plain checkpoint passes
these, and its selective one those on which it does not raise.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.blocks import (
    APPLY,
    FULL,
    FunctionBlock,
    Stack,
    alternate,
    install,
    llama_stack,
    policy,
    save,
    selective,
    square,
    tokens,
    ways,
    with_dropout,
)
from tests.support.defects import DEFECTS
from tests.support.pairs import in_pairs
from tests.support.recording import Recorder, without_collector
from tests.support.training import built

VALUES = {
    "full": FULL,
    "nothing": selective(policy()),
    "attention and alternating matmuls": selective(policy(save("attention"), alternate("matmul"))),
    "everything": selective(policy(default="save")),
}
ON_EACH_WAY = pytest.mark.parametrize(("name", "entry"), ways(VALUES))


def dropped_llama() -> Stack:
    return with_dropout(llama_stack(), attention=0.2)


def in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h.add_(1).relu_()
    return (h[:2].sin().sum() * h) @ block.b


BUILDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, ...]]]] = {
    "llama": (dropped_llama, tokens),
    "in place and a view": (lambda: Stack(FunctionBlock(in_place)), square),
    **{defect.id: (defect.build, square) for defect in DEFECTS},
}
# that context_fn is told of the module makes no difference to what a build leaves behind
ON_EACH_BUILD = in_pairs(
    build=BUILDS.keys(),
    name=VALUES.keys(),
    entry=(*APPLY, "context_fn"),
    unless=lambda build, name, entry: (name, entry) not in ways(VALUES, (*APPLY, "context_fn")),
)


@ON_EACH_BUILD
def test_nothing_lives_after_backward(build: str, name: str, entry: str) -> None:
    """Even while the caller still holds the output and the loss."""
    make, make_input = BUILDS[build]
    model = install(built(make), VALUES[name], entry)
    for _ in range(3):
        with without_collector():
            recorder = Recorder()
            given = make_input("cpu")
            with recorder:
                out = model(*given)
                loss = out.square().sum()
                loss.backward()
            held = (out, loss, [p.grad for p in model.parameters()], list(model.buffers()))
            assert recorder.live_bytes(besides=held) == 0
            model.zero_grad()


@ON_EACH_BUILD
def test_nothing_lives_after_the_graph_is_dropped(build: str, name: str, entry: str) -> None:
    make, make_input = BUILDS[build]
    model = install(built(make), VALUES[name], entry)
    for _ in range(2):
        with without_collector():
            recorder = Recorder()
            given = make_input("cpu")
            with recorder:
                out = model(*given)
            del out
            assert recorder.live_bytes(besides=list(model.buffers())) == 0


@ON_EACH_WAY
def test_nothing_lives_after_a_retained_graph_is_dropped(name: str, entry: str) -> None:
    model = install(built(dropped_llama), VALUES[name], entry)
    for _ in range(2):
        with without_collector():
            recorder = Recorder()
            (x,) = tokens()
            with recorder:
                loss = model(x).square().sum()
                loss.backward(retain_graph=True)
                loss.backward(retain_graph=True)
            model.zero_grad()
            del loss
            assert recorder.live_bytes() == 0


@ON_EACH_WAY
def test_region_inputs_are_not_held(name: str, entry: str) -> None:
    """Neither the tensor handed in nor its storage outlives the graph and the caller."""
    model = install(built(dropped_llama), VALUES[name], entry)
    for backward in (True, True, False):
        with without_collector():
            recorder = Recorder()
            with recorder:
                (x,) = tokens()
                x.requires_grad_()
                seen = weakref.ref(x)
                loss = model(x).square().sum()
                if backward:
                    loss.backward()
            del x, loss
            model.zero_grad()
            assert seen() is None
            assert recorder.live_bytes() == 0


def two_branches(block: FunctionBlock, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ block.a).exp().sin(), (x @ block.b).sin()


@pytest.mark.parametrize("entry", APPLY)
def test_what_one_branch_was_recomputed_from_goes_before_the_other_branch(entry: str) -> None:
    """Nothing of the second branch is missing, so that no recomputation can come."""
    model = install(built(lambda: Stack(FunctionBlock(two_branches))), selective(policy(save("matmul"))), entry)
    with without_collector(), Recorder() as recorder:
        first, second = model(*square())
        first.sum().backward()
        model.zero_grad()
        del first
        held = recorder.live_bytes()
    assert held == 3 * 8 * 8 * 4  # the input, the second product, and its sine
    assert second.requires_grad


RUNS_AGAIN = [way for way in ways(VALUES) if way[0] != "everything" and way[1] == "apply, rerun"]


@pytest.mark.parametrize(("name", "entry"), RUNS_AGAIN)
def test_nothing_lives_after_an_error_in_recompute(name: str, entry: str) -> None:
    """Where the region's Python runs again: replay runs none of it, and nothing need be recomputed of all saved."""

    def fails_again(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).sin()
        if block.runs == 2:
            raise KeyError("the user's own")
        return (h @ block.b).cos()

    model = install(built(lambda: Stack(FunctionBlock(fails_again))), VALUES[name], entry)
    recorder = Recorder()
    with recorder:
        loss = model(*square()).sum()
        with pytest.raises(KeyError):
            loss.backward()
    del loss
    gc.collect()  # the traceback of an error is a cycle of Python's own
    model.zero_grad()
    assert recorder.live_bytes() == 0


@ON_EACH_WAY
def test_eight_steps_do_not_grow(name: str, entry: str) -> None:
    model = install(built(dropped_llama), VALUES[name], entry)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    live: list[int] = []
    objects: list[int] = []
    recorder = Recorder()
    with without_collector():
        for _ in range(8):
            (x,) = tokens()
            with recorder:
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            live.append(recorder.live_bytes())
            objects.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
    assert live[1:] == [0] * 7
    assert len(set(objects[2:])) == 1, objects


def kept_alone(model: Stack, x: Tensor) -> Any:
    with Recorder() as recorder:
        out = model(x)
    return recorder, out


@ON_EACH_WAY
def test_no_grad_keeps_nothing(name: str, entry: str) -> None:
    model = install(built(dropped_llama), VALUES[name], entry)
    with without_collector(), torch.no_grad():
        recorder, out = kept_alone(model, *tokens())
        assert recorder.live_bytes(besides=out) == 0
