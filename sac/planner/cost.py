"""The time of an op on a device in seconds, by the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from sac.ops.facts import traits_of
from sac.ops.flops import flops_of
from sac.ops.registry import NamePattern, op_name
from sac.ops.save_sets import BACKWARD_MARKS, SAVE_SETS
from sac.planner.devices import Device
from sac.planner.profile import Entry
from sac.policy.patterns import fits_name
from sac.tensors import storage_bytes, tensors_of

# Note [The time of an op]
#
# An op takes max(FLOPs / (peak · efficiency), bytes / (bandwidth · efficiency)) + launch: the roofline of Williams,
# Waterman and Patterson (2009), with the share of each roof that kernels of the op's class reach in practice. The bytes
# are those of the tensors that the op reads and makes, each moved once. Ops without FLOPs have only the second roof.
# Causal attention counts half of the FLOPs of torch's formula, which includes masked scores. A collective sends its
# argument and its result over the link once. A view takes no time: the host is ahead of the device.

MATMUL, ATTENTION, MEMORY, COLLECTIVE, FREE = "matmul", "attention", "memory", "collective", "free"
CUDNN_ATTENTION = "cudnn attention"
PRIORS: Mapping[str, float] = {
    MATMUL: 0.70,  # engineering prior: large 16-bit products reach 0.65 to 0.75 of the data sheet
    ATTENTION: 0.40,  # engineering prior: FlashAttention-2 on H100, forward
    CUDNN_ATTENTION: 0.60,  # engineering prior: long sequences on H100, forward, like FlashAttention-3
    MEMORY: 0.85,  # engineering prior: streaming kernels against the peak bandwidth
    COLLECTIVE: 0.80,  # engineering prior: large messages inside a node
}
"""The efficiency by class of op: the share of a device's figure that is reached."""

_PRODUCTS = ("matmul", "grouped_matmul", "low_precision_matmul", "convolution")
_UNINITIALISED = (NamePattern("aten.empty*"), NamePattern("aten.new_empty*"))


def op_class(entry: Entry) -> str:
    """Return what bounds an op, or ``free`` if no kernel runs: views, uninitialised memory, unseen aliases."""
    if not entry.op or entry.is_view or any(pattern.matches(entry.op) for pattern in _UNINITIALISED):
        return FREE
    if entry.is_collective:
        return COLLECTIVE
    if _is_of(entry.op, "attention"):
        return CUDNN_ATTENTION if "cudnn" in entry.op else ATTENTION
    return MATMUL if entry.flops or any(_is_of(entry.op, name) for name in _PRODUCTS) else MEMORY


@cache
def _is_of(op: str, save_set: str) -> bool:
    if op.startswith("function "):
        return any(fits_name(pattern, op.removeprefix("function ")) for pattern in SAVE_SETS[save_set].functions)
    is_backward = any(mark in op for mark in BACKWARD_MARKS)
    return not is_backward and any(NamePattern(one.name).matches(op) for one in SAVE_SETS[save_set].entries)


def is_causal(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call of an attention op is causal."""
    names = [argument.name for argument in op._schema.arguments] if hasattr(op, "_schema") else []
    if "is_causal" not in names:
        return False
    index = names.index("is_causal")
    return (kwargs.get("is_causal", False) if index >= len(args) else args[index]) is True


def attention_flops(name: str, arguments: Sequence[Tensor]) -> int:
    """Return the FLOPs of a Function of attention; 0 for another one, or if its arguments tell no sizes.

    Queries, keys and values are (batch, length, heads, width), as flash-attn and xformers take them.
    """
    if not _is_of(name, "attention") or len(arguments) < 3 or any(one.dim() != 4 for one in arguments[:3]):
        return 0
    queries, keys, values = arguments[:3]
    return 2 * keys.shape[1] * (queries.numel() + queries.numel() // queries.shape[3] * values.shape[3])


def moved_bytes(args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes of the tensors that one call of an op reads and makes, each moved once."""
    read = tensors_of([*args, *kwargs.values()])  # an expanded tensor has fewer bytes than its elements suggest
    size: int = sum(min(tensor.numel() * tensor.element_size(), storage_bytes(tensor)) for tensor in read)
    return size + sum(map(storage_bytes, tensors_of(out)))


def entry_of_call(op: Any, args: Any, kwargs: Any, out: Any) -> Entry:
    """Return an entry with all that the price of a call depends on."""
    traits, made = traits_of(op), tensors_of(out)
    return Entry(
        op=op_name(op),
        is_collective=traits.is_collective,
        is_view=traits.is_view,
        is_causal=is_causal(op, args, kwargs),
        flops=flops_of(op, args, kwargs, out),
        moved_bytes=0 if traits.is_view else moved_bytes(args, kwargs, out),
        shape=tuple(made[0].shape) if made else (),
        dtype=str(made[0].dtype).removeprefix("torch.") if made else "",
    )


def seconds(entry: Entry, device: Device) -> float:
    """Return the time of one run of ``entry`` on ``device``, in seconds; see Note [The time of an op]."""
    kind = op_class(entry)
    if kind == FREE:
        return 0.0
    if kind == COLLECTIVE:
        return entry.moved_bytes / (device.link_bytes_per_s * PRIORS[COLLECTIVE]) + device.launch_s
    is_narrow = _is_of(entry.op, "low_precision_matmul") and "float8" in device.flops_per_s
    flops = entry.flops / 2 if entry.is_causal else entry.flops
    computing_s = flops / (device.peak("float8" if is_narrow else entry.dtype) * PRIORS[kind])
    return max(computing_s, entry.moved_bytes / (device.bytes_per_s * PRIORS[MEMORY])) + device.launch_s
