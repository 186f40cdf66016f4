"""The accountant: what a step keeps, runs and sends, counted below autograd. Nothing here asks sac."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests.support.recording import Recorder, step, without_collector

COLLECTIVES = ("c10d.", "c10d_functional.")


@dataclass(frozen=True)
class StepAccount:
    """One step of a model after a few others.

    ``kept_bytes``: bytes of storages that the forward made and that live at its end, less its outputs and the model's
    buffers. ``forward_flops`` and ``backward_flops``: FLOPs of products, convolutions and attention, as torch counts
    them. ``forward_ops`` and ``backward_ops``: how often each op ran, by name; recomputation is in backward.
    """

    kept_bytes: int
    forward_flops: int
    backward_flops: int
    forward_ops: Counter[str]
    backward_ops: Counter[str]

    @property
    def collectives(self) -> tuple[dict[str, int], dict[str, int]]:
        """The collectives of forward and of backward, by name."""
        return _collectives_in(self.forward_ops), _collectives_in(self.backward_ops)

    def recomputed_flops(self, without: StepAccount) -> int:
        """FLOPs that this step runs beyond those of the same step without checkpointing."""
        return self.forward_flops + self.backward_flops - without.forward_flops - without.backward_flops

    def runs(self, *fragments: str) -> int:
        """How often ops ran in the step whose name contains one of the fragments."""
        ops = self.forward_ops + self.backward_ops
        return sum(count for name, count in ops.items() if any(part in name for part in fragments))


def _collectives_in(ops: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(ops.items()) if any(part in name for part in COLLECTIVES)}


def account_step(model: nn.Module, inputs: tuple[Any, ...], *, warm: int = 1) -> StepAccount:
    """Count one forward and backward of the model after ``warm`` whole steps; gradients are dropped.

    The loss sums every floating output. Raises nothing of its own.
    """
    for _ in range(warm):
        step(model, inputs)
    forward, backward = Recorder(), Recorder()
    with without_collector():
        with FlopCounterMode(display=False) as forward_flops, forward:
            results = model(*inputs)
        kept = forward.live_bytes(besides=(results, list(model.buffers())))
    outputs = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
    with FlopCounterMode(display=False) as backward_flops, backward:
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    for tensor in [*model.parameters(), *(x for x in inputs if isinstance(x, Tensor))]:
        tensor.grad = None
    return StepAccount(
        kept, forward_flops.get_total_flops(), backward_flops.get_total_flops(), forward.ops, backward.ops
    )
