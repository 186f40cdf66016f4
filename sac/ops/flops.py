"""FLOP formulas: torch's own, and some for ops that torch has no formula for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from sac.tensors import tensor_parts, tensors_of


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of one call (one multiply-add counts as two), or 0 if no formula is known.

    Of an op on DTensors, these are the FLOPs of this rank.
    """
    formula = _formula(op)
    if formula is None:
        return 0
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
    return _formula(op) is not None


def _formula(op: Any) -> Any:
    packet = getattr(op, "_overloadpacket", op)
    added = ADDED_FORMULAS.get(packet)
    return flop_registry.get(packet) or (shape_wrapper(added) if added else None)


def grouped_matmul_flops(left: Sequence[int], right: Sequence[int], *_: object, **__: object) -> int:
    """Return the FLOPs of a grouped matmul: each row is in one group, so the group count matters for 3D x 3D only."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


# FlopCounterMode of torch 2.13 has formulas for the CUDA attentions, but not for the CPU one or grouped matmuls.
# Without these, a mode that recomputes attention on CPU would appear to recompute nothing. Checked by
# tests/unit/ops/test_flops.py.
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
ADDED_FORMULAS: Mapping[Any, Any] = {
    getattr(torch.ops.aten, _CPU_ATTENTION): lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    getattr(torch.ops.aten, f"{_CPU_ATTENTION}_backward"): lambda *args, **_: sdpa_backward_flop_count(*args[:4]),
    torch.ops.aten._grouped_mm: grouped_matmul_flops,
}
