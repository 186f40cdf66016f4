"""A small Llama, plain and under torch.compile: what each way to compile it gives in one mode.

`plain(mode)`, `whole(mode, backend=...)` and `per_block(mode, backend=...)` return an `Outcome`; a mode is a config
value of `sac.apply`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import sac
from tests.stacks.composition import Outcome, forward_done, outcome
from tests.stacks.parallel_llama import Llama, Sizes, batch, built, cross_entropy

SIZES = Sizes(n_layers=2)


def plain(mode: Any) -> Outcome:
    """Train in eager."""
    model = built(SIZES)
    sac.apply(model, mode)
    return _trained(model, model, compiled=False)


def whole(mode: Any, *, backend: str) -> Outcome:
    """Train with the whole model as one graph."""
    torch._dynamo.reset()
    model = built(SIZES)
    sac.apply(model, mode)
    return _trained(model, torch.compile(model, backend=backend, fullgraph=True), compiled=True)


def per_block(mode: Any, *, backend: str) -> Outcome:
    """Train with a graph per block."""
    torch._dynamo.reset()
    model = built(SIZES)
    sac.apply(model, mode)
    for layer in model.layers.values():
        layer.compile(backend=backend, fullgraph=True)
    return _trained(model, model, compiled=True)


def _trained(model: Llama, call: Any, *, compiled: bool) -> Outcome:
    numbers, labels = batch(SIZES)

    def step() -> Tensor:
        loss = cross_entropy(call(numbers), labels)
        forward_done()
        loss.backward()
        return loss

    return outcome(step, model, compiled=compiled)
