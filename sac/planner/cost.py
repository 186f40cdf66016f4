"""Devices with their performance figures, and the time of an op on one of them by the roofline."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sac.errors import PlanError, Problem, listing, nearest
from sac.ops.facts import traits_of
from sac.ops.flops import flops_of
from sac.ops.registry import NamePattern, op_name
from sac.ops.save_sets import BACKWARD_MARKS, SAVE_SETS
from sac.planner.profile import Entry
from sac.policy.patterns import fits_name
from sac.tensors import storage_bytes, tensors_of

# Note [Figures of devices]
#
# FLOP/s are the vendor's data-sheet figures for dense operands (NVIDIA's "with sparsity", halved), with one
# multiply-add counted as two. "float32" is full precision, and "tf32" is float32 under
# `torch.set_float32_matmul_precision("high")`. Memory is the capacity on the data sheet, at 2**30 bytes per GB, of
# which the driver uses about one per cent. Link bandwidths are for one direction. `launch_s` is an engineering prior:
# the time that eager PyTorch spends on one op whatever its size.

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """The figures of a device, see Note [Figures of devices].

    The keys of ``flops_per_s`` are torch's dtype names, ``tf32`` and ``float8`` (every fp8 format).
    """

    name: str
    title: str
    flops_per_s: Mapping[str, float] = field(hash=False)
    bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    host_bytes_per_s: float = 0.0
    launch_s: float = 4e-6

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s for ``dtype`` (torch's name); those of float32 if there is no such figure."""
        return self.flops_per_s.get("float8" if dtype.startswith("float8") else dtype, self.flops_per_s["float32"])


def _tera(*, half: float, float32: float, float64: float, **others: float) -> dict[str, float]:
    figures = {"bfloat16": half, "float16": half, "float32": float32, "float64": float64, **others}
    return {dtype: figure * 1e12 for dtype, figure in figures.items()}


_AMPERE = _tera(half=312, tf32=156, float32=19.5, float64=19.5)
_HOPPER = _tera(float8=1978.9, half=989.4, tf32=494.7, float32=66.9, float64=66.9)
_BLACKWELL = _tera(float8=4500, half=2250, tf32=1100, float32=80, float64=40)
_MI300X = _tera(float8=2614.9, half=1307.4, tf32=653.7, float32=163.4, float64=163.4)
_AVX2 = _tera(half=1.28, float32=1.28, float64=0.64)

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        # NVIDIA's data sheets and architecture briefs; NVLink 3, 4 and 5
        Device("a100", "NVIDIA A100 SXM, 80 GB", _AMPERE, 2.039e12, 80 * _GIB, 300e9, 25e9),
        Device("h100", "NVIDIA H100 SXM, 80 GB", _HOPPER, 3.35e12, 80 * _GIB, 450e9, 55e9),
        Device("h200", "NVIDIA H200 SXM, 141 GB", _HOPPER, 4.8e12, 141 * _GIB, 450e9, 55e9),
        Device("b200", "NVIDIA B200 SXM, 180 GB", _BLACKWELL, 8e12, 180 * _GIB, 900e9, 55e9),
        # AMD's data sheet; seven links
        Device("mi300x", "AMD Instinct MI300X, 192 GB", _MI300X, 5.3e12, 192 * _GIB, 448e9, 55e9),
        # Processors differ too much for a data sheet: 16 cores with AVX2 at 2.5 GHz, two channels of DDR4-3200, and
        # 100 Gb/s Ethernet are assumed. The ratio of the figures matters.
        Device("cpu", "a processor, rough figures", _AVX2, 51.2e9, 0, 12.5e9, launch_s=2e-6),
    )
}


def device_named(text: str) -> Device:
    """Return the device called ``text``: ``h100``, ``H-100``, or the driver's name, ``NVIDIA H100 80GB HBM3``.

    Variants with other figures (PCIe boards, 40 GB, slices of a GPU) do not match the device in the table. Raises
    ``PlanError`` for an unknown device.
    """
    written = re.sub(r"[\s_-]", "", text.lower())
    for name, device in DEVICES.items():
        size = device.memory_bytes // _GIB
        if re.fullmatch(f"(nvidia|amd)?(instinct)?{name}(sxm[4-6]?|oam)?({size}gb)?(hbm3e?)?", written):
            return device
    found = f"the planner has no figures for '{text}'"
    legal = listing([f"{device.name} ({device.title})" for device in DEVICES.values()])
    kin = next((name for name in DEVICES if name in written), "") or nearest(written, DEVICES)
    fix = "plan a model for a GPU that is not here on the CPU or on the meta device, and name the GPU"
    raise PlanError(Problem("device", found, legal, kin, fix))


def figures_of(device: str | torch.device) -> Device:
    """Return the figures of a local device, with tf32 if torch uses it, or of the one that is called so.

    Raises ``PlanError`` if it is unknown.
    """
    name = str(device).partition(":")[0]
    if name != "cuda":
        return device_named(name)
    try:
        figures = device_named(torch.cuda.get_device_name(device))
    except (AssertionError, RuntimeError) as error:  # torch's own checks of its build, the driver and the index
        found = f"torch cannot use {device} here: {error}"
        raise PlanError(Problem("device", found, fix='name the GPU, such as "h100"')) from error
    tf32 = figures.flops_per_s.get("tf32")
    if tf32 is None or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return figures
    return replace(figures, flops_per_s={**figures.flops_per_s, "float32": tf32})


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
    names = [argument.name for argument in op._schema.arguments] if hasattr(op, "_schema") else []
    return Entry(
        op=op_name(op),
        is_collective=traits.is_collective,
        is_view=traits.is_view,
        is_causal={**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal") is True,
        flops=flops_of(op, args, kwargs, out),
        moved_bytes=0 if traits.is_view else moved_bytes(args, kwargs, out),
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
