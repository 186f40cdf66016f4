"""Floating-point operations of one call, counted by torch's dispatcher and not by sac."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch.utils.flop_counter import FlopCounterMode

from sac.ops.flops import added_formulas


class _NoModules(nullcontext[None]):
    """Stands for the counter's module tracker, whose hooks refuse ``torch.autograd.grad`` (torch 2.13)."""

    parents = frozenset({"Global"})


def count_flops(fn: Callable[[], object]) -> int:
    """Run ``fn`` once and return the FLOPs of its matmuls, convolutions and attentions (one multiply-add is two).

    The counter stands around the whole call, so what backward recomputes is counted as well.
    """
    counter = FlopCounterMode(display=False, custom_mapping=added_formulas())
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter:
        fn()
    return int(counter.get_total_flops())
