"""Ways of making the blocks of a stack regions, for tests of what changes between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import sac
from tests.support.blocks import FULL, Stack, install, policy, save, selective

Way = Callable[[Stack], Stack]


class Called(Stack):
    """A stack whose blocks are regions by `sac.checkpoint`."""

    options: dict[str, Any]

    def _call(self, index: int, block: nn.Module, *values: Tensor) -> Any:
        return sac.checkpoint(block, *values, **self.options)


def by_function(model: Stack, **options: Any) -> Stack:
    """Let each block be a region by `sac.checkpoint`."""
    model.__class__ = Called
    model.options = options
    return model


MATMULS = selective(policy(save("matmul")))
WAYS: dict[str, Way] = {
    "function": by_function,
    "reentrant": lambda model: by_function(model, use_reentrant=True),
    "full": lambda model: install(model, FULL),
    "rerun": lambda model: install(model, {**MATMULS, "engine": "rerun"}),
    "replay": lambda model: install(model, {**MATMULS, "engine": "replay"}),
    "context_fn": lambda model: install(model, MATMULS, "context_fn with module"),
}
ON_EACH_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def as_it_is(model: Stack) -> Stack:
    """No regions: the oracle."""
    return model
