"""How long an op takes on a device: measured if it was, otherwise by the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sac.errors import PlanError, Problem
from sac.planner.calibration import Calibration, call_key
from sac.planner.devices import Device
from sac.planner.op_classes import (
    ATTENTION,
    COLLECTIVE,
    CUDNN_ATTENTION,
    FREE,
    MATMUL,
    MEMORY,
    is_low_precision,
    op_class,
)
from sac.planner.profile import Entry, RegionProfile

# Note [The time of an op]
#
# An op takes max(FLOPs / (peak · efficiency), bytes / (bandwidth · efficiency)) + launch: the roofline of Williams,
# Waterman and Patterson (2009), with the share of each roof that kernels of the op's class reach in practice. Bytes are
# those of the tensors that it reads and makes, each moved once. Ops without FLOPs have only the second roof.
#
# - Causal attention takes half of the FLOPs of torch's formula, which counts masked scores too: kernels pass over them,
#   and what is said of their efficiency counts so.
# - An op that multiplies but for which there is no formula is priced by its bytes alone, too low: `unpriced_ops`.
# - A collective sends its argument and its result over the link once. For a ring over many ranks that is right for an
#   all-reduce, up to an nth more than an all-gather or a reduce-scatter sends, and twice what an all-to-all sends.
# - A view takes no time: nothing runs on the device, and the host is ahead of it.

PRIORS: Mapping[str, float] = MappingProxyType(
    {
        MATMUL: 0.70,  # engineering prior: large products in 16 bit reach 0.65 to 0.75 of what a data sheet promises
        ATTENTION: 0.40,  # engineering prior: FlashAttention-2 on H100, forward
        CUDNN_ATTENTION: 0.60,  # engineering prior: long sequences on H100, forward, as FlashAttention-3
        MEMORY: 0.85,  # engineering prior: streaming kernels against the peak bandwidth
        COLLECTIVE: 0.80,  # engineering prior: large messages inside a node
    }
)
"""The share of a device's figure that is reached where nothing was measured, by class of op."""


def seconds(entry: Entry, device: Device, calibration: Calibration | None = None) -> float:
    """Return the time of one run of ``entry`` on ``device``, in seconds; see Note [The time of an op].

    What ``calibration`` measured of the same call counts first, then its efficiency of the op's class, then the prior.
    Raises ``PlanError`` if it was made on another device.
    """
    if calibration is None:
        return roofline(entry, device, PRIORS)
    if calibration.device != device.name:
        found = f"it was measured on {calibration.device}, and the plan is for {device.name}"
        fix = f"calibrate on {device.name}, or plan without a calibration"
        raise PlanError(Problem("calibration", found, fix=fix))
    measured = calibration.ops.get(call_key(entry))
    return roofline(entry, device, {**PRIORS, **calibration.efficiencies}) if measured is None else measured


def entry_times(profile: RegionProfile, device: Device, calibration: Calibration | None = None) -> tuple[float, ...]:
    """Return the time of each entry of a profile, in seconds; raises what ``seconds`` raises."""
    return tuple(seconds(entry, device, calibration) for entry in profile.entries)


def roofline(entry: Entry, device: Device, efficiencies: Mapping[str, float]) -> float:
    """Return the time of one run of ``entry``, in seconds, by its FLOPs and bytes and the efficiency of each class."""
    kind = op_class(entry)
    if kind == FREE:
        return 0.0
    if kind == COLLECTIVE:
        return entry.moved_bytes / (device.link_bytes_per_s * efficiencies[COLLECTIVE]) + device.launch_s
    computing = computing_s(entry, device) / efficiencies[kind]
    return max(computing, moving_s(entry, device) / efficiencies[MEMORY]) + device.launch_s


def computing_s(entry: Entry, device: Device) -> float:
    """Return the seconds that the FLOPs of ``entry`` take at the device's peak."""
    narrow = is_low_precision(entry) and "float8" in device.flops_per_s
    flops = entry.flops / 2 if entry.is_causal else entry.flops
    return flops / device.peak("float8" if narrow else entry.dtype)


def moving_s(entry: Entry, device: Device) -> float:
    """Return the seconds that the bytes of ``entry`` take at the peak of the device's memory."""
    return entry.moved_bytes / device.bytes_per_s
