"""A region inside another one: what an outer recomputation runs is no part of the inner one, random ops above all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.blocks import FunctionBlock, Stack, policy, save, selective, square
from tests.support.training import assert_same, built, train
from tests.support.whole_module_blocks import WIDTH, Apply, whole


def sine_product(part: Apply, x: Tensor) -> Tensor:
    return (x @ part.weight).sin()


def dropped_product(part: Apply, x: Tensor) -> Tensor:
    return F.dropout(x @ part.weight, 0.5).sin()


def dropout_after(block: Any, x: Tensor) -> Tensor:
    return (F.dropout(block.part((x @ block.a).cos()), 0.5).sin() @ block.b).sin()


def dropout_last(block: Any, x: Tensor) -> Tensor:
    return F.dropout(block.part(x), 0.5)


def dropout_around(block: Any, x: Tensor) -> Tensor:
    h = F.dropout(x, 0.5).sin()
    return x + F.dropout(block.part(h) + block.part(h.cos()), 0.5) * torch.rand_like(x)


BODIES = (dropout_after, dropout_last, dropout_around)
PARTS = (sine_product, dropped_product)

INNER: dict[str, Any] = {
    "modules": selective(policy(whole("part"))),
    "modules, to the end": selective(policy(whole("part")), early_stop=False),
    "modules and products": selective(policy(whole("part"), save("matmul", optional=True))),
    "every other module": selective(policy(whole("part", "alternate"))),
    "full": {"mode": "full", "blocks": ["blocks.*"]},
    **{f"products, {e}": selective(policy(save("matmul")), engine=e) for e in ("auto", "replay", "rerun")},
}


def with_policy(function: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=False, context_fn=sac.context_fn(policy(save("aten.sin"))))


OUTER: dict[str, Callable[..., Any]] = {
    "sac.checkpoint": sac.checkpoint,
    "sac.checkpoint, to the end": partial(sac.checkpoint, early_stop=False),
    "sac.checkpoint, reentrant": partial(sac.checkpoint, use_reentrant=True),
    "sac.checkpoint, twice": lambda function, x: sac.checkpoint(partial(sac.checkpoint, function), x),
    "torch": partial(checkpoint, use_reentrant=False),
    "torch with a policy": with_policy,
}


class Nested(nn.Module):
    """Two blocks; `outer` runs both of them, or each one, or nothing (None)."""

    def __init__(self, body: Callable[..., Any], part: Callable[..., Any], outer: str, *, each: bool) -> None:
        super().__init__()
        blocks = [FunctionBlock(body, WIDTH, part=Apply(part)) for _ in range(2)]
        self.stack = Stack(*blocks)
        self.outer, self.each = OUTER.get(outer), each

    def forward(self, x: Tensor) -> Any:
        if self.outer is None:
            return self.stack(x)
        if not self.each:
            return self.outer(self.stack, x)
        for block in self.stack.blocks:
            x = self.outer(block, x)
        return x


# Each inner value with each outer way, on bodies and parts that rotate.
CASES = [
    (outer, inner, BODIES[number % 3], PARTS[number // 3 % 2], number % 2 == 0)
    for number, (outer, inner) in enumerate(product(OUTER, INNER))
]


@pytest.mark.parametrize(("outer", "inner", "body", "part", "each"), CASES)
def test_training_is_the_same(
    outer: str, inner: str, body: Callable[..., Any], part: Callable[..., Any], each: bool
) -> None:
    value = {**INNER[inner], "blocks": ["stack.blocks.*"]}
    ours = sac.apply(built(lambda: Nested(body, part, outer, each=each)), value)
    reference = train(built(lambda: Nested(body, part, "", each=each)), steps=3, make_input=square)
    assert_same(reference, train(ours, steps=3, make_input=square))
