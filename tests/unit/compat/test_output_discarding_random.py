"""Random programs of regions and plain ops: with all outputs discarded, every gradient is that of the plain program."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sac.compat.output_discarding import Discardable, discard, run_discardable
from sac.engine.settings import PLAIN
from tests.support.training import assert_same

SIZE = 6
STEPS = (3, 7)

ONE: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin,
    F.gelu,
    F.silu,
    lambda t: t * t,
    lambda t: t.t(),
    lambda t: t.flip(0),
    lambda t: t.cumsum(0),
    lambda t: t.softmax(-1),
    lambda t: t.sort(-1)[0],
    lambda t: t.reshape(-1).view(SIZE, SIZE),
    lambda t: t.exp().clamp(max=3),
    lambda t: F.dropout(t, 0.3),
    lambda t: F.normalize(t, dim=-1),
    lambda t: F.layer_norm(t, (SIZE,)),
    lambda t: torch.where(t > 0, t, t * 0.1),
    lambda t: t[torch.arange(SIZE - 1, -1, -1)],
)
TWO: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a * b,
    lambda a, b: a + b,
    lambda a, b: a / (1 + b * b),
    lambda a, b: a @ b.t() @ b,
    torch.maximum,
)
RESULTS: tuple[Callable[[Tensor], Any], ...] = (
    lambda h: h,
    lambda h: (h, h.tanh()),
    lambda h: (h.chunk(2, -1)[0].repeat(1, 2), h),
    lambda h: h.unbind(0),
)


def region(choice: random.Random, linear: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    """A function of two tensors."""
    steps, result = [choice.choice(ONE) for _ in range(choice.randint(0, 3))], choice.choice(RESULTS)

    def run(a: Tensor, b: Tensor) -> Any:
        h = linear(a)
        for step in steps:
            h = step(h)
        return result(h * b.mean())

    return run


def program(seed: int, when: str) -> dict[str, Tensor]:
    """Run the program of a seed; `when` its regions' outputs are discarded: never (no regions), together, or early."""
    choice, order = random.Random(seed), random.Random(~seed)
    torch.manual_seed(seed)
    linears = [nn.Linear(SIZE, SIZE) for _ in range(3)]
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    pool = [x * 1.1]
    lenders: list[Discardable] = []
    for _ in range(choice.randint(*STEPS)):
        kind = choice.random()
        if kind < 0.5:
            function, args = region(choice, choice.choice(linears)), (choice.choice(pool), choice.choice(pool))
            output, lender = (function(*args), None) if when == "never" else run_discardable(PLAIN, function, args)
            results = output if isinstance(output, tuple) else (output,)
            pool += [one if one.dim() == 2 else one.expand(SIZE, SIZE) for one in results[:3]]
            lenders += [lender] if lender is not None else []
        elif kind < 0.75:
            pool.append(choice.choice(ONE)(choice.choice(pool)))
        else:
            pool.append(choice.choice(TWO)(choice.choice(pool), choice.choice(pool)))
        if when == "early" and lenders and order.random() < 0.5:
            discard([lenders.pop(order.randrange(len(lenders)))], pool[-1])
    out = torch.stack([(one.tanh() * (place + 1)).sum() for place, one in enumerate(pool)]).sum()
    del pool
    discard(lenders, out)
    out.backward()
    gradients = {
        f"{place}.{name}": parameter.grad
        for place, linear in enumerate(linears)
        for name, parameter in linear.named_parameters()
        if parameter.grad is not None
    }
    assert x.grad is not None
    return {"loss": out.detach(), "input": x.grad, "random state": torch.get_rng_state()} | gradients


@pytest.mark.parametrize("when", ["together", "early"])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_programs(first, when):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tensor drawn at random need not depend on the region
        for seed in range(first, first + 20):
            assert_same(program(seed, "never"), program(seed, when))
