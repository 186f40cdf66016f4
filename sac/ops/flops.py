"""FLOP formulas: torch's own, and some for ops that torch has no formula for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from sac.tensors import tensor_parts, tensors_of


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of one call (one multiply-add counts as two), or 0 if no formula is known.

    Of an op on DTensors, these are the FLOPs of this rank.
    """
    packet = getattr(op, "_overloadpacket", op)
    if not has_formula(op):
        return 0
    formula = flop_registry.get(packet) or shape_wrapper(added_formulas()[packet])
    try:
        flops = formula(*args, **kwargs, out_val=out)
    except AssertionError:  # grouped heads, of which torch 2.11 has no formula for attention: as many keys as queries
        query, key, value, *others = args
        key, value = (one.new_empty((*query.shape[:2], *one.shape[2:]), device="meta") for one in (key, value))
        flops = formula(query, key, value, *others, **kwargs, out_val=out)
    return int(int(flops) * _share_of_rank(out))


def _share_of_rank(out: Any) -> Fraction | int:
    """Return the share of an op that this rank works on, from its first result.

    It is divided where the result is, and where the result is a sum over ranks, which have a part of each term.
    """
    first: Any = next(iter(tensors_of(out)), None)
    placements = getattr(first, "placements", None)
    if placements is None or not first.numel():
        return 1
    share = Fraction(sum(part.numel() for part in tensor_parts(first)), first.numel())
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            share /= first.device_mesh.size(dim)
    return share


def has_formula(op: Any) -> bool:
    """Return whether ``op`` has a FLOP formula."""
    packet = getattr(op, "_overloadpacket", op)
    return packet in flop_registry or packet in added_formulas()


@cache
def added_formulas() -> dict[Any, Any]:
    """Return formulas over shapes, by packet, for ops of this build that torch's counter does not know.

    FlopCounterMode of torch 2.13 has formulas for the CUDA attentions, but not for the CPU one or grouped matmuls.
    Without these, a mode that recomputes attention on CPU would appear to recompute nothing. Checked by
    tests/unit/ops/test_flops.py.
    """
    return {getattr(torch.ops.aten, name): formula for name, formula in _ADDED.items() if hasattr(torch.ops.aten, name)}


def grouped_matmul_flops(left: Sequence[int], right: Sequence[int], *_: object, **__: object) -> int:
    """Return the FLOPs of a grouped matmul: each row is in one group, so the group count matters for 3D x 3D only."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


_ADDED: Mapping[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(
        grad, q, k, v
    ),
    "_grouped_mm": grouped_matmul_flops,
}
