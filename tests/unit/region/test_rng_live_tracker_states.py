"""A tracker may hand out its states live and write to them in place: a region holds copies of what they were."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sac
from tests.support.blocks import FULL, FunctionBlock, Stack, policy, save, selective, square
from tests.support.trackers import DeepSpeedLike, bytes_of, filled
from tests.support.training import assert_same, built, train


class WritesInPlace(DeepSpeedLike):
    """The tensors of its states are the same ones from beginning to end."""

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name].copy_(torch.get_rng_state())
            torch.set_rng_state(outer)


_tracker: Any = None  # a global one, which no region reaches by what its function holds


def forked(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout(x @ block.a, 0.3)
    with _tracker.fork():
        h = F.dropout(h, 0.5).sin()
    with _tracker.fork("expert-parallel-rng"):
        return F.dropout(h @ block.b, 0.3).sin()


def trained(install: Callable[..., Any]) -> dict[str, Tensor]:
    global _tracker
    _tracker = filled(WritesInPlace)
    model = install(built(lambda: Stack(FunctionBlock(forked), FunctionBlock(forked))))
    return train(model, steps=3, make_input=square) | bytes_of(_tracker)


@pytest.mark.parametrize(
    "config",
    [FULL, {**FULL, "use_reentrant": True}, selective(policy(save("matmul")), engine="rerun")],
    ids=["full", "full, reentrant", "selective"],
)
def test_they_are_put_back(config: dict[str, Any]) -> None:
    apply = functools.partial(sac.apply, get_rng_state_tracker=lambda: _tracker)
    assert_same(trained(lambda model: model), trained(lambda model: apply(model, config)))
