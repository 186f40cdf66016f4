"""Regions that fork a tracker's streams draw in recomputation what they drew in forward, whoever wrote the tracker."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sac
from sac.engine import rng
from sac.errors import RegionError
from sac.full import RngTracker
from tests.support.blocks import FULL, FunctionBlock, Stack, alternate, policy, save, selective, square
from tests.support.pairs import in_pairs
from tests.support.trackers import MAKERS, MegatronLike, TiedGenerator, TiedTracker, bytes_of, filled
from tests.support.training import assert_nearly_same, assert_same, built, train

VALUES = {
    "apply full": FULL,
    "apply, random ops saved": selective(policy(save("random"))),
    "apply, every second matmul saved": selective(policy(alternate("matmul"))),
    "apply, everything saved": selective(policy(default="save")),
}
CALLS = {
    "sac.checkpoint": sac.checkpoint,
    "sac.checkpoint, reentrant": functools.partial(sac.checkpoint, use_reentrant=True),
}
WAYS = (*CALLS, *VALUES)
ON_EACH_TRACKER = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)


def dropped(x: Tensor, p: float) -> Tensor:
    """Dropout by an op that can be saved; on the CPU that of torch writes in place."""
    return x * torch.bernoulli(torch.full_like(x, 1 - p)) / (1 - p)


def one_fork(tracker: Any, block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout(x @ block.a, 0.3)
    with tracker.fork():
        h = dropped(h, 0.5).sin()
    return F.dropout(h @ block.b, 0.3).sin()


def forks_in_a_row(tracker: Any, block: FunctionBlock, x: Tensor) -> Tensor:
    for name in ("model-parallel-rng", "expert-parallel-rng", "model-parallel-rng"):
        with tracker.fork(name):
            x = F.dropout(dropped(x @ block.a, 0.2), 0.4).sin()
    return dropped(x @ block.b, 0.3).sin()


def forks_in_forks(tracker: Any, block: FunctionBlock, x: Tensor) -> Tensor:
    x = dropped(x, 0.2)
    with tracker.fork():
        h = F.dropout(x @ block.a, 0.4).sin()
        with tracker.fork("expert-parallel-rng"):
            h = dropped(h @ block.b, 0.4).sin()
            with tracker.fork():
                h = dropped(h @ block.a, 0.4).sin()
        with tracker.fork():
            h = F.dropout(h @ block.b, 0.4).sin()
        return dropped(h @ block.b, 0.4).sin()


BODIES = {body.__name__: body for body in (one_fork, forks_in_a_row, forks_in_forks)}


class InAFork(Stack):
    """Calls each block by ``call``, inside a fork of a stream, or of none."""

    tracker: Any
    stream: str | None
    call: Callable[..., Any]

    def _call(self, index: int, block: torch.nn.Module, *values: Tensor) -> Any:
        with self.tracker.fork(self.stream) if self.stream else contextlib.nullcontext():
            return self.call(block, *values)


def plain(block: torch.nn.Module, *values: Tensor) -> Any:
    return block(*values)


def trained(
    body: Callable[..., Tensor], tracker: Any, way: str = "", stream: str | None = None, call: Any = plain
) -> dict[str, Tensor]:
    """Three steps of two blocks with this body; what they show, and the tracker's states at the end."""
    model = built(lambda: InAFork(*(FunctionBlock(functools.partial(body, tracker)) for _ in range(2))))
    model.tracker, model.stream, model.call = tracker, stream, call
    if way in CALLS:
        model.call = functools.partial(CALLS[way], get_rng_state_tracker=lambda: tracker)
    elif way:
        sac.apply(model, VALUES[way], get_rng_state_tracker=lambda: tracker)
    return train(model, steps=3, make_input=square) | bytes_of(tracker)


@in_pairs(body=BODIES, maker=MAKERS, way=WAYS)
def test_streams_are_put_back(body, maker, way):
    assert_same(trained(body, filled(maker)), trained(body, filled(maker), way))


@in_pairs(body=BODIES, maker=MAKERS, way=WAYS)
def test_a_region_entered_inside_a_fork(body, maker, way):
    """Megatron's snapshot omits which stream is in use: a nested fork of that one draws other numbers there."""
    stream = "model-parallel-rng"
    assert_same(trained(body, filled(maker), "", stream), trained(body, filled(maker), way, stream))


@pytest.mark.parametrize("inner", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("outer", CALLS.values(), ids=CALLS)
@ON_EACH_TRACKER
def test_a_region_inside_the_fork_of_another_region(maker, outer, inner, in_float64):
    """Nested reentrant regions add gradients in another order, as torch's do: in float64 that is all that differs."""

    def nested(call: Callable[..., Tensor], tracker: Any, block: FunctionBlock, x: Tensor) -> Tensor:
        h = dropped(x @ block.a, 0.2)
        with tracker.fork():
            h = call(functools.partial(forks_in_forks, tracker, block), dropped(h, 0.3))
            h = call(functools.partial(one_fork, tracker, block), dropped(h, 0.3))
        return dropped(h, 0.2).sin()

    plainly = trained(functools.partial(nested, lambda function, x: function(x)), filled(maker))
    tracker = filled(maker)
    options = {"get_rng_state_tracker": lambda: tracker}
    body = functools.partial(nested, functools.partial(inner, **options))
    ours = trained(body, tracker, call=functools.partial(outer, **options))
    if inner is outer is sac.checkpoint:
        assert_same(plainly, ours)
    assert_nearly_same(plainly, ours)


class Behind:
    """A tracker that the region forks without holding it, as a global one."""

    __slots__ = ("__weakref__",)

    def __init__(self, tracker: Any) -> None:
        _BEHIND[self] = tracker

    def __getattr__(self, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return getattr(_BEHIND[self], name)


_BEHIND: weakref.WeakKeyDictionary[Behind, Any] = weakref.WeakKeyDictionary()


def without_the_name(tracker: MegatronLike) -> Any:
    """The tracker as far as `get_states` and `set_states` show it."""

    class Face:
        get_states, set_states = tracker.get_states, tracker.set_states

    return Face


@pytest.mark.parametrize(
    ("getter", "stream"),
    [(lambda tracker: None, None), (lambda tracker: lambda: without_the_name(tracker), "model-parallel-rng")],
    ids=["no tracker", "no current name"],
)
def test_the_tests_above_can_fail(getter, stream):
    expected, tracker = trained(forks_in_forks, filled(MegatronLike), "", stream), filled(MegatronLike)
    call = functools.partial(sac.checkpoint, get_rng_state_tracker=getter(tracker))
    with pytest.raises((AssertionError, RegionError), match=r"gradient|other values"):
        assert_same(expected, trained(forks_in_forks, Behind(tracker), "", stream, call))


# Generators that share a state, as on CUDA


def tied_body(tracker: TiedTracker, block: FunctionBlock, x: Tensor) -> Tensor:
    default = tracker.default
    h = (x @ block.a * default.draw(x)).sin()
    with tracker.fork():
        h = (h @ block.b * default.draw(h)).sin()
    h = (h * default.draw(h)).sin()
    with tracker.fork("expert-parallel-rng"):
        return (h @ block.b * default.draw(h)).sin()


@pytest.mark.parametrize("stream", [None, "model-parallel-rng", "expert-parallel-rng"])
@pytest.mark.parametrize("way", [*CALLS, "apply full", "apply, every second matmul saved"])
def test_generators_that_share_a_state_share_it_again(monkeypatch, way, stream):
    """``graphsafe_get_state`` is live: who restores it, as Megatron and TransformerEngine do, rewinds nothing."""
    seen = []
    for one in ("", way):
        default = TiedGenerator.seeded(5)
        monkeypatch.setattr(rng, "_accelerator_generators", lambda tensors, default=default: [default])
        tracker = filled(lambda default=default: TiedTracker(default))
        box = default.box
        seen.append(trained(tied_body, tracker, one, stream) | {"default": default.get_state()})
        assert default.box is box
    assert_same(*seen)


# What a tracker holds, before and after


def test_a_stream_added_after_forward_is_there_after_backward():
    tracker = filled(lambda: RngTracker("cpu"))
    x = torch.randn(8, 8, requires_grad=True)
    block = FunctionBlock(functools.partial(one_fork, tracker))
    out = sac.checkpoint(block, x, get_rng_state_tracker=lambda: tracker)
    tracker.add("late", 99)
    with tracker.fork("late"):
        torch.rand(3)
    before = bytes_of(tracker)
    out.sum().backward()
    assert tracker.names == (*before,)
    assert all(torch.equal(before[name], state) for name, state in bytes_of(tracker).items())


def test_a_generator_that_a_tracker_has_given_up_is_put_back_too():
    """Forward's generator serves the recomputation, and then stands where it stood."""
    tracker = filled(MAKERS["TransformerEngine, graph-safe"])
    kept = tracker.get_states()["model-parallel-rng"]
    x = torch.randn(8, 8, requires_grad=True)
    block = FunctionBlock(functools.partial(one_fork, tracker))
    expected = [g.clone() for g in _grads(block, x, lambda: None)]
    for name, seed in (("model-parallel-rng", 1234), ("expert-parallel-rng", 77)):
        tracker.states_[name] = torch.Generator().manual_seed(seed)
    kept = tracker.states_["model-parallel-rng"]
    found = {}

    def exchange() -> None:
        tracker.states_ = {"other": torch.Generator()}
        kept.manual_seed(31)
        found.update(bytes_of(tracker))

    got = _grads(block, x, exchange, get_rng_state_tracker=lambda: tracker)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert torch.equal(kept.get_state(), torch.Generator().manual_seed(31).get_state())
    assert {name: state.tolist() for name, state in bytes_of(tracker).items()} == {
        name: state.tolist() for name, state in found.items()
    }


def _grads(block: FunctionBlock, x: Tensor, between: Callable[[], None], **options: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    out = sac.checkpoint(block, x, **options) if options else block(x)
    between()
    return torch.autograd.grad(out.sum(), [x, block.a, block.b])
