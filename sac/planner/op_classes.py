"""Kinds of ops by what bounds their time, and the calls whose FLOPs nobody has told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from sac.ops.registry import NamePattern
from sac.ops.sets import BACKWARD_MARKS, SAVE_SETS
from sac.ops.traits import INFRASTRUCTURE
from sac.planner.profile import Entry, RegionProfile

MATMUL, ATTENTION, MEMORY, COLLECTIVE, FREE = "matmul", "attention", "memory", "collective", "free"
CUDNN_ATTENTION = "cudnn attention"
ATTENTIONS = (ATTENTION, CUDNN_ATTENTION)
CLASSES = (MATMUL, *ATTENTIONS, MEMORY, COLLECTIVE)
"""What an op is bound by: the matrix units (three kinds of kernels that use them unlike well), memory, a link."""

_CAUSAL = "is_causal"
_PRODUCTS = ("matmul", "grouped_matmul", "low_precision_matmul", "convolution")
_UNINITIALISED = (NamePattern("aten.empty*"), NamePattern("aten.new_empty*"))


def op_class(entry: Entry) -> str:
    """Return one of ``CLASSES``, or ``free`` for what runs no kernel: views, uninitialised memory, unseen aliases."""
    if not entry.op or entry.is_view or _matches(entry.op, _UNINITIALISED):
        return FREE
    if entry.is_collective:
        return COLLECTIVE
    if _is_of(entry.op, "attention"):
        return CUDNN_ATTENTION if "cudnn" in entry.op else ATTENTION
    return MATMUL if entry.flops or any(_is_of(entry.op, name) for name in _PRODUCTS) else MEMORY


def is_causal(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call of an attention is told to be causal."""
    place = _causal_place(op)
    return place is not None and (kwargs.get(_CAUSAL, False) if place >= len(args) else args[place]) is True


@cache
def _causal_place(op: Any) -> int | None:
    schema = getattr(op, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return names.index(_CAUSAL) if _CAUSAL in names else None


def is_low_precision(entry: Entry) -> bool:
    """Return whether ``entry`` multiplies operands that are narrower than its result."""
    return _is_of(entry.op, "low_precision_matmul")


def unpriced_ops(profile: RegionProfile) -> tuple[str, ...]:
    """Return the ops, in order, that may well multiply but have no formula of FLOPs: their times are too low.

    Those are matrix products, convolutions and attentions, and ops of a library, which may be anything.
    """
    found = (entry.op for entry in profile.entries if not entry.flops and 0 not in entry.shape and _may_multiply(entry))
    return tuple(dict.fromkeys(found))


def _may_multiply(entry: Entry) -> bool:
    kind = op_class(entry)
    namespace = entry.op.partition(".")[0]
    return kind in (MATMUL, *ATTENTIONS) or (kind == MEMORY and namespace not in {"aten", "prims", *INFRASTRUCTURE})


@cache
def _is_of(op: str, save_set: str) -> bool:
    backward = any(mark in op for mark in BACKWARD_MARKS)
    return not backward and _matches(op, (NamePattern(entry.name) for entry in SAVE_SETS[save_set].entries))


def _matches(op: str, patterns: Iterable[NamePattern]) -> bool:
    return any(pattern.matches(op) for pattern in patterns)
