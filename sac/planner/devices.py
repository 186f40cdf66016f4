"""Performance figures of devices: FLOP/s, bandwidths, memory and launch time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from sac.errors import PlanError, Problem, listing, nearest

# Note [Figures of devices]
#
# FLOP/s are the vendor's data-sheet figures for dense operands, with one multiply-add counted as two, on the matrix
# units if the device has them for that dtype. NVIDIA gives most figures "with sparsity": these are halved here.
# "float32" is full precision, and "tf32" is float32 under `torch.set_float32_matmul_precision("high")`.
# Memory is the capacity on the data sheet, at 2**30 bytes per GB, as memory is built. The driver uses about one per
# cent of it, so a budget needs a margin. Link bandwidths are for one direction, which is what a ring uses; data sheets
# give the sum of both directions.
# `launch_s` is an engineering prior: the time that eager PyTorch spends on one op whatever its size.

_GIB = 2**30
_GPU_LAUNCH_S = 4e-6


@dataclass(frozen=True, slots=True)
class Device:
    """The figures of a device, see Note [Figures of devices].

    The keys of ``flops_per_s`` are torch's dtype names, ``tf32`` and ``float8`` (every fp8 format). ``bytes_per_s`` is
    the bandwidth of the memory, ``link_bytes_per_s`` that of the links to the other devices of a node, in one
    direction. ``spelling`` is a regular expression over names of the device in lower case without blanks and hyphens.
    """

    name: str
    title: str
    source: str
    spelling: str
    flops_per_s: Mapping[str, float] = field(hash=False)
    bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    launch_s: float = _GPU_LAUNCH_S

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s for ``dtype`` (torch's name); those of float32 if there is no such figure."""
        return self.flops_per_s.get("float8" if dtype.startswith("float8") else dtype, self.flops_per_s["float32"])

    def with_tf32(self) -> Device:
        """Return the device with float32 matrix products run as tf32; the device itself if it has no tf32."""
        tf32 = self.flops_per_s.get("tf32")
        return self if tf32 is None else replace(self, flops_per_s={**self.flops_per_s, "float32": tf32})


def _tera(*, half: float, float32: float, float64: float, **others: float) -> dict[str, float]:
    figures = {"bfloat16": half, "float16": half, "float32": float32, "float64": float64, **others}
    return {dtype: figure * 1e12 for dtype, figure in figures.items()}


_HOPPER = _tera(float8=1978.9, half=989.4, tf32=494.7, float32=66.9, float64=66.9)

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="a100",
            title="NVIDIA A100 SXM, 80 GB",
            source="NVIDIA A100 Tensor Core GPU data sheet",
            spelling="(nvidia)?a100(sxm4?)?(80gb)?",
            flops_per_s=_tera(half=312, tf32=156, float32=19.5, float64=19.5),
            bytes_per_s=2.039e12,
            memory_bytes=80 * _GIB,
            link_bytes_per_s=300e9,  # NVLink 3, 600 GB/s in both directions
        ),
        Device(
            name="h100",
            title="NVIDIA H100 SXM, 80 GB",
            source="NVIDIA H100 Tensor Core GPU data sheet and architecture white paper",
            spelling="(nvidia)?h100(sxm5?)?(80gb)?(hbm3)?",
            flops_per_s=_HOPPER,
            bytes_per_s=3.35e12,
            memory_bytes=80 * _GIB,
            link_bytes_per_s=450e9,  # NVLink 4, 900 GB/s in both directions
        ),
        Device(
            name="h200",
            title="NVIDIA H200 SXM, 141 GB",
            source="NVIDIA H200 Tensor Core GPU data sheet",
            spelling="(nvidia)?h200(sxm5?)?(141gb)?(hbm3e)?",
            flops_per_s=_HOPPER,  # the same chip with other memory
            bytes_per_s=4.8e12,
            memory_bytes=141 * _GIB,
            link_bytes_per_s=450e9,
        ),
        Device(
            name="b200",
            title="NVIDIA B200 SXM, 180 GB",
            source="NVIDIA Blackwell architecture brief, HGX B200 at 1000 W; memory: DGX B200 data sheet, an eighth",
            spelling="(nvidia)?b200(sxm6?)?(180gb)?(hbm3e)?",
            flops_per_s=_tera(float8=4500, half=2250, tf32=1100, float32=80, float64=40),
            bytes_per_s=8e12,
            memory_bytes=180 * _GIB,
            link_bytes_per_s=900e9,  # NVLink 5, 1.8 TB/s in both directions
        ),
        Device(
            name="mi300x",
            title="AMD Instinct MI300X, 192 GB",
            source="AMD Instinct MI300X accelerator data sheet",
            spelling="(amd)?(instinct)?mi300x(oam)?(192gb)?(hbm3)?",
            flops_per_s=_tera(float8=2614.9, half=1307.4, tf32=653.7, float32=163.4, float64=163.4),
            bytes_per_s=5.3e12,
            memory_bytes=192 * _GIB,
            link_bytes_per_s=448e9,  # seven links of 128 GB/s in both directions
        ),
        Device(
            # Processors differ too much for a data sheet: 16 cores with two 256-bit multiply-adds per cycle at 2.5 GHz
            # reach 1.28 TFLOP/s, and two channels of DDR4-3200 move 51 GB/s. Many lack 16-bit units. The link is
            # 100 Gb/s Ethernet. The ratio of the figures matters.
            name="cpu",
            title="a processor, rough figures",
            source="no data sheet: 16 cores with AVX2, two memory channels, assumed",
            spelling="cpu",
            flops_per_s=_tera(half=1.28, float32=1.28, float64=0.64),
            bytes_per_s=51.2e9,
            memory_bytes=64 * _GIB,
            link_bytes_per_s=12.5e9,
            launch_s=2e-6,
        ),
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


def device_at_hand(device: torch.device) -> Device:
    """Return the figures of a local device, with tf32 if torch uses it; raises ``PlanError`` if it is unknown."""
    if device.type != "cuda":
        return device_named(device.type)
    try:
        name = torch.cuda.get_device_name(device)
    except (AssertionError, RuntimeError) as error:  # torch's own checks of its build, the driver and the index
        found = f"torch cannot use {device} here: {error}"
        raise PlanError(Problem("device", found, fix='name the GPU, such as "h100"')) from error
    figures = device_named(name)
    return figures.with_tf32() if torch.backends.cuda.matmul.fp32_precision == "tf32" else figures
