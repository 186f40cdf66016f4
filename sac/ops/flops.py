"""FLOP formulas: torch's own, and some for ops that torch has no formula for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, shape_wrapper

from sac.tensors import tensors_of, wrapped_parts


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of one call (one multiply-add counts as two), or 0 if no formula is known.

    Of an op on DTensors, these are the FLOPs of this rank.
    """
    packet = getattr(op, "_overloadpacket", op)
    formula = flop_registry.get(packet)
    if formula is None:
        added = added_formulas().get(packet)
        if added is None:
            return 0
        formula = shape_wrapper(added)
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
    share = Fraction(sum(part.numel() for part in wrapped_parts(first)), first.numel())
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


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
    """Return the FLOPs of attention: scores, then the weighted sum. Masked scores count, as in torch's CUDA formula.

    Shapes: query [batch, heads, S, D], key [batch, heads, T, D], value [batch, heads, T, E].
    """
    *batch, s, d = query
    t, e = value[-2:]
    return 2 * prod(batch) * s * t * (d + e)


def attention_backward_flops(
    grad_out: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *_: object,
    **__: object,
) -> int:
    """Return the FLOPs of attention's backward: scores, then the gradients of value, weights, query and key."""
    *batch, s, d = query
    t, e = value[-2:]
    return 2 * prod(batch) * s * t * (3 * d + 2 * e)


def grouped_matmul_flops(left: Sequence[int], right: Sequence[int], *_: object, **__: object) -> int:
    """Return the FLOPs of a grouped matmul: each row is in one group, so the group count matters for 3D x 3D only."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


_ADDED: Mapping[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": attention_flops,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward_flops,
    "_grouped_mm": grouped_matmul_flops,
}
