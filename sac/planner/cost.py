"""The time of an op in seconds: classes of ops, bytes they move, and measured figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from torch import Tensor

from sac.ops.facts import traits_of
from sac.ops.flops import flops_of
from sac.ops.names import op_name
from sac.ops.registry import NamePattern
from sac.ops.save_sets import BACKWARD_MARKS, SAVE_SETS
from sac.planner.devices import Device
from sac.planner.profile import Entry, RegionProfile
from sac.tensors import storage_bytes, tensors_of

# -- Classes of ops by what bounds their time, and ops without FLOP formulas

MATMUL, ATTENTION, MEMORY, COLLECTIVE, FREE = "matmul", "attention", "memory", "collective", "free"
CUDNN_ATTENTION = "cudnn attention"
ATTENTIONS = (ATTENTION, CUDNN_ATTENTION)
CLASSES = (MATMUL, *ATTENTIONS, MEMORY, COLLECTIVE)
"""What bounds an op: the matrix units (three kinds of kernels with different efficiency), memory, or a link."""

_CAUSAL = "is_causal"
_PRODUCTS = ("matmul", "grouped_matmul", "low_precision_matmul", "convolution")
_UNINITIALISED = (NamePattern("aten.empty*"), NamePattern("aten.new_empty*"))


def op_class(entry: Entry) -> str:
    """Return one of ``CLASSES``, or ``free`` if no kernel runs: views, uninitialised memory, unseen aliases."""
    if not entry.op or entry.is_view or _matches(entry.op, _UNINITIALISED):
        return FREE
    if entry.is_collective:
        return COLLECTIVE
    if _is_of(entry.op, "attention"):
        return CUDNN_ATTENTION if "cudnn" in entry.op else ATTENTION
    return MATMUL if entry.flops or any(_is_of(entry.op, name) for name in _PRODUCTS) else MEMORY


def is_causal(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call of an attention op is causal."""
    index = _causal_place(op)
    return index is not None and (kwargs.get(_CAUSAL, False) if index >= len(args) else args[index]) is True


@cache
def _causal_place(op: Any) -> int | None:
    schema = getattr(op, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return names.index(_CAUSAL) if _CAUSAL in names else None


def is_low_precision(entry: Entry) -> bool:
    """Return whether ``entry`` multiplies operands of a narrower dtype than its result."""
    return _is_of(entry.op, "low_precision_matmul")


@cache
def _is_of(op: str, save_set: str) -> bool:
    backward = any(mark in op for mark in BACKWARD_MARKS)
    return not backward and _matches(op, (NamePattern(entry.name) for entry in SAVE_SETS[save_set].entries))


def _matches(op: str, patterns: Iterable[NamePattern]) -> bool:
    return any(pattern.matches(op) for pattern in patterns)


# -- Lower bounds of the bytes that a kernel moves


def moved_bytes(args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes of the tensors that one call of an op reads and makes, each moved once."""
    read = sum(map(_bytes_read, tensors_of([*args, *kwargs.values()])))
    return read + sum(map(storage_bytes, tensors_of(out)))


def _bytes_read(tensor: Tensor) -> int:
    """Return the bytes that an op reads of a tensor: an expanded tensor has fewer than its elements suggest."""
    return min(tensor.numel() * tensor.element_size(), storage_bytes(tensor))


def entry_of_call(op: Any, args: Any, kwargs: Any, out: Any) -> Entry:
    """Return an entry with all that the price of a call depends on."""
    traits = traits_of(op)
    made = tensors_of(out)
    return Entry(
        number=0,
        module="",
        op=op_name(op),
        call=0,
        reads=(),
        makes=(),
        is_collective=traits.is_collective,
        is_view=traits.is_view,
        is_causal=is_causal(op, args, kwargs),
        flops=flops_of(op, args, kwargs, out),
        moved_bytes=moved_bytes(args, kwargs, out),
        shape=tuple(made[0].shape) if made else (),
        dtype=str(made[0].dtype).removeprefix("torch.") if made else "",
    )


# -- The time of an op on a device, by the roofline

# Note [The time of an op]
#
# An op takes max(FLOPs / (peak · efficiency), bytes / (bandwidth · efficiency)) + launch: the roofline of Williams,
# Waterman and Patterson (2009), with the share of each roof that kernels of the op's class reach in practice. The bytes
# are those of the tensors that the op reads and makes, each moved once. Ops without FLOPs have only the second roof.
#
# - Causal attention counts half of the FLOPs of torch's formula, which includes masked scores: kernels skip them, and
#   published efficiencies count in the same way.
# - An op that multiplies but has no formula is priced by its bytes alone, which is too low: see `unpriced_ops`.
# - A collective sends its argument and its result over the link once. For a ring over n ranks, with n large, that is
#   right for an all-reduce, up to 1/n more than an all-gather or a reduce-scatter sends, and twice what an all-to-all
#   sends.
# - A view takes no time: nothing runs on the device, and the host is ahead of it.

PRIORS: Mapping[str, float] = MappingProxyType(
    {
        MATMUL: 0.70,  # engineering prior: large 16-bit products reach 0.65 to 0.75 of the data sheet
        ATTENTION: 0.40,  # engineering prior: FlashAttention-2 on H100, forward
        CUDNN_ATTENTION: 0.60,  # engineering prior: long sequences on H100, forward, like FlashAttention-3
        MEMORY: 0.85,  # engineering prior: streaming kernels against the peak bandwidth
        COLLECTIVE: 0.80,  # engineering prior: large messages inside a node
    }
)
"""The efficiency by class of op: the share of a device's figure that is reached."""


def seconds(entry: Entry, device: Device) -> float:
    """Return the time of one run of ``entry`` on ``device``, in seconds; see Note [The time of an op]."""
    op_kind = op_class(entry)
    if op_kind == FREE:
        return 0.0
    if op_kind == COLLECTIVE:
        return entry.moved_bytes / (device.link_bytes_per_s * PRIORS[COLLECTIVE]) + device.launch_s
    narrow = is_low_precision(entry) and "float8" in device.flops_per_s
    flops = entry.flops / 2 if entry.is_causal else entry.flops
    computing_s = flops / (device.peak("float8" if narrow else entry.dtype) * PRIORS[op_kind])
    return max(computing_s, entry.moved_bytes / (device.bytes_per_s * PRIORS[MEMORY])) + device.launch_s


def entry_times(profile: RegionProfile, device: Device) -> tuple[float, ...]:
    """Return the time of each entry of a profile, in seconds."""
    return tuple(seconds(entry, device) for entry in profile.entries)
