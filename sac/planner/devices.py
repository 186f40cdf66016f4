"""Performance figures of devices: FLOP/s, bandwidths, memory and launch time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from sac.errors import PlanError, Problem, listing, nearest

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

    The keys of ``flops_per_s`` are torch's dtype names, ``tf32`` and ``float8`` (every fp8 format). ``spelling`` is a
    regular expression over names of the device in lower case without blanks and hyphens.
    """

    name: str
    title: str
    spelling: str
    flops_per_s: Mapping[str, float] = field(hash=False)
    bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
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
_AMD = "(amd)?(instinct)?mi300x(oam)?(192gb)?(hbm3)?"
_NVIDIA = "(nvidia)?{}(sxm[4-6]?)?({}gb)?(hbm3e?)?"

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        # NVIDIA's data sheets and architecture briefs; NVLink 3, 4 and 5
        Device("a100", "NVIDIA A100 SXM, 80 GB", _NVIDIA.format("a100", 80), _AMPERE, 2.039e12, 80 * _GIB, 300e9),
        Device("h100", "NVIDIA H100 SXM, 80 GB", _NVIDIA.format("h100", 80), _HOPPER, 3.35e12, 80 * _GIB, 450e9),
        Device("h200", "NVIDIA H200 SXM, 141 GB", _NVIDIA.format("h200", 141), _HOPPER, 4.8e12, 141 * _GIB, 450e9),
        Device("b200", "NVIDIA B200 SXM, 180 GB", _NVIDIA.format("b200", 180), _BLACKWELL, 8e12, 180 * _GIB, 900e9),
        # AMD's data sheet; seven links
        Device("mi300x", "AMD Instinct MI300X, 192 GB", _AMD, _MI300X, 5.3e12, 192 * _GIB, 448e9),
        # Processors differ too much for a data sheet: 16 cores with AVX2 at 2.5 GHz, two channels of DDR4-3200, and
        # 100 Gb/s Ethernet are assumed. The ratio of the figures matters.
        Device("cpu", "a processor, rough figures", "cpu", _AVX2, 51.2e9, 0, 12.5e9, launch_s=2e-6),
    )
}


def device_named(text: str) -> Device:
    """Return the device called ``text``: ``h100``, ``H-100``, or the driver's name, ``NVIDIA H100 80GB HBM3``.

    Case, blanks and hyphens do not matter. Variants with other figures (PCIe boards, 40 GB, slices of a GPU) do not
    match the device in the table. Raises ``PlanError`` for an unknown device.
    """
    written = re.sub(r"[\s_-]", "", text.lower())
    for device in DEVICES.values():
        if re.fullmatch(device.spelling, written):
            return device
    legal = listing([f"{device.name} ({device.title})" for device in DEVICES.values()])
    kin = next((name for name in DEVICES if name in written), "") or nearest(written, DEVICES)
    raise PlanError(Problem("device", f"the planner has no figures for '{text}'", legal, kin))


def figures_of(device: str | torch.device) -> Device:
    """Return the figures of a local device, with tf32 if torch uses it, or of the one that is called so.

    Raises ``PlanError`` if it is unknown.
    """
    if isinstance(device, str) and device.partition(":")[0] != "cuda":
        return device_named(device.partition(":")[0])
    device = torch.device(device)
    if device.type != "cuda":
        return device_named(device.type)
    try:
        name = torch.cuda.get_device_name(device)
    except (AssertionError, RuntimeError) as error:  # torch's own checks of its build, the driver and the index
        found = f"torch cannot use {device} here: {error}"
        raise PlanError(Problem("device", found, fix='name the GPU, such as "h100"')) from error
    figures = device_named(name)
    tf32 = figures.flops_per_s.get("tf32")
    if tf32 is None or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return figures
    return replace(figures, flops_per_s={**figures.flops_per_s, "float32": tf32})
