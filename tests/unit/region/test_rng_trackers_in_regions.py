"""Regions that fork a tracker's streams draw in recomputation what they drew in forward, whoever wrote the tracker."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import sac
from tests.support.blocks import FULL, FunctionBlock, Stack, alternate, policy, save, selective, square
from tests.support.pairs import in_pairs
from tests.support.trackers import MAKERS, bytes_of, filled
from tests.support.training import assert_same, built, train

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
def test_a_region_entered_inside_a_fork(body, maker, way):
    """Megatron's snapshot omits which stream is in use: a nested fork of that one draws other numbers there."""
    stream = "model-parallel-rng"
    assert_same(trained(body, filled(maker), "", stream), trained(body, filled(maker), way, stream))


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
