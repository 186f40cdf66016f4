"""A small Llama, plain and under torch.compile: what each way to compile it gives in one mode.

Each function returns an `Outcome`; a mode is a config value of `sac.apply`. What compiles in which order beside DDP and
FSDP2 is in test_wrong_order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import sac
from tests.stacks.composition import Outcome, train
from tests.stacks.parallel_llama import Llama, Sizes, batch, built, cross_entropy
from tests.support.blocks import GatedMLP, Stack, tokens

SIZES = Sizes(n_layers=2)


def plain(mode: Any) -> Outcome:
    """Train in eager."""
    model = built(SIZES)
    sac.apply(model, mode)
    return _trained(model, model, compiled=False)


def whole(mode: Any, *, backend: str, layers: int = 2) -> Outcome:
    """Train with the whole model as one graph."""
    torch._dynamo.reset()
    model = built(Sizes(n_layers=layers))
    sac.apply(model, mode)
    return _trained(model, torch.compile(model, backend=backend, fullgraph=True))


def per_block(mode: Any, *, backend: str) -> Outcome:
    """Train with a graph per block."""
    torch._dynamo.reset()
    model = built(SIZES)
    sac.apply(model, mode)
    for layer in model.layers.values():
        layer.compile(backend=backend, fullgraph=True)
    return _trained(model, model)


def ddp_in_parts(mode: Any) -> Outcome:
    """Train with DDP's model compiled: its optimizer cuts the graph by buckets, which goes between regions."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(1)
    model = Stack(*(GatedMLP(256, 512) for _ in range(2)))  # each block is larger than the smallest bucket
    sac.apply(model, mode)
    call = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend="aot_eager")
    (x,) = tokens(d=256)
    found = train(model, lambda _: call(x * (1 + dist.get_rank())).square().mean(), compiled=True)
    assert counters["aot_autograd"]["total"] > 1
    return found


def _trained(model: Llama, call: Any, *, compiled: bool = True) -> Outcome:
    numbers, labels = batch(SIZES)
    return train(model, lambda _: cross_entropy(call(numbers), labels), compiled=compiled)
