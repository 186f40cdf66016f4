"""The time of an op in seconds: classes of ops, bytes they move, and measured figures."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sac.errors import PlanError, Problem, SacWarning, nearest
from sac.ops.facts import INFRASTRUCTURE, traits_of
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


def unpriced_ops(profile: RegionProfile) -> tuple[str, ...]:
    """Return the ops, in order, that probably multiply but have no FLOP formula, so that their times are too low.

    These are matrix products, convolutions and attentions, and all ops of a library, which may do anything.
    """
    found = (entry.op for entry in profile.entries if not entry.flops and 0 not in entry.shape and _may_multiply(entry))
    return tuple(dict.fromkeys(found))


def _may_multiply(entry: Entry) -> bool:
    op_kind = op_class(entry)
    namespace = entry.op.partition(".")[0]
    return op_kind in (MATMUL, *ATTENTIONS) or (
        op_kind == MEMORY and namespace not in {"aten", "prims", *INFRASTRUCTURE}
    )


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


# -- The time of the host that checkpointing takes


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of the host, see Note [The overhead of checkpointing].

    ``record_s``: per op of a forward that is recorded. ``rerun_s``: per op that Python runs again. ``replayed_call_s``
    and ``rerun_call_s``: per call of a region, by what its backward does.
    """

    record_s: float
    rerun_s: float
    replayed_call_s: float
    rerun_call_s: float


# What `time_overhead` in calibrate.py measured with torch 2.13.0+cpu and the C++ library on a core of an AMD EPYC.
OVERHEAD = Overhead(record_s=3.5e-6, rerun_s=4e-6, replayed_call_s=150e-6, rerun_call_s=200e-6)


# -- Calibration files: ``{schema, device, torch, efficiencies, ops, overhead, link}`` in JSON

SCHEMA = "sac/calibration/v1"
_FIELDS = ("device", "torch", "efficiencies", "ops")
_PARTS = tuple(part.name for part in fields(Overhead))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements on one device with one version of torch.

    ``efficiencies`` are the reached shares of the device's figures, by class of op; ``ops`` the seconds of one call, by
    ``call_key``; ``overhead`` what checkpointing takes of the host, None in files of earlier versions; ``link`` the
    bytes per second to the host and back, None if the device has no such link or it was not measured.
    """

    device: str
    torch: str
    efficiencies: Mapping[str, float] = field(hash=False)
    ops: Mapping[str, float] = field(hash=False)
    overhead: Overhead | None = None
    link: tuple[float, float] | None = None


def call_key(entry: Entry) -> str:
    """Return the key of a measured time: the op, its first result, and its FLOPs and bytes.

    An entry does not hold the shapes of an op's arguments. Its FLOPs and bytes replace them: two products with equal
    results and FLOPs have equal operands.
    """
    causal = " causal" if entry.is_causal else ""
    return f"{entry.op} {entry.dtype}{[*entry.shape]} {entry.flops} FLOP {entry.moved_bytes} B{causal}"


def save_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write ``calibration`` to a file; raises ``PlanError`` if it cannot be written."""
    written = {"schema": SCHEMA, **asdict(calibration)}
    if calibration.link is None:
        del written["link"]
    text = json.dumps(written, indent=1) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(Problem(os.fspath(path), f"the file cannot be written: {error.strerror}")) from error


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Return the calibration in a file; warns if it was made with another version of torch.

    Raises ``PlanError`` that lists every problem if the file cannot be read or is not a calibration.
    """
    where = os.fspath(path)
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(Problem(where, f"the file cannot be read: {error.strerror}")) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(Problem(where, f"this is not JSON: {error}", "a calibration file")) from error
    problems = [Problem(where, found, legal, near) for found, legal, near in _problems_of(raw)]
    if problems:
        raise PlanError(problems)
    overhead = Overhead(**raw["overhead"]) if raw.get("overhead") is not None else None
    link = (float(raw["link"][0]), float(raw["link"][1])) if raw.get("link") is not None else None
    calibration = Calibration(**{name: raw[name] for name in _FIELDS}, overhead=overhead, link=link)
    if calibration.torch != torch.__version__:
        found = f"{where}: it was measured with torch {calibration.torch}, and this is torch {torch.__version__}"
        warnings.warn(f"{found}; calibrate again", SacWarning, stacklevel=2)
    return calibration


def _problems_of(raw: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each problem: what was found, what is legal, and the nearest spelling."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = (
            f"schema is {_shown(raw, 'schema')}" if isinstance(raw, dict) and "schema" in raw else "it has no schema"
        )
        yield f"this is not a calibration file: {found}", f'schema: "{SCHEMA}"', ""
        return
    for name in ("device", "torch"):
        if not isinstance(raw.get(name), str):
            yield f'"{name}" is {_shown(raw, name)}', "text", ""
    link = raw.get("link")
    if link is not None and not (isinstance(link, list) and len(link) == 2 and all(map(_is_rate, link))):
        yield f'"link" is {_shown(raw, "link")}', "two numbers above 0: bytes per second to the host and back", ""
    parts: dict[str, tuple[str, tuple[str, ...] | None]] = {
        "efficiencies": ("class of op", CLASSES),
        "ops": ("call", None),
    }
    if raw.get("overhead") is not None:
        parts["overhead"] = "part of it", _PARTS
    for name, (unit, legal) in parts.items():
        if not isinstance(raw.get(name), dict):
            yield f'"{name}" is {_shown(raw, name)}', f"a mapping with a number per {unit}", ""
            continue
        if name == "overhead" and (missing := [key for key in _PARTS if key not in raw[name]]):
            yield f'"{name}" lacks {", ".join(missing)}', ", ".join(_PARTS), ""
        for key, value in raw[name].items():
            if legal is not None and key not in legal:
                yield f'"{name}" has "{key}"', ", ".join(legal), nearest(key, legal)
            elif type(value) not in (int, float) or not isfinite(value) or value < 0 or (not value and legal != _PARTS):
                least = "of 0 or more" if legal == _PARTS else "above 0"
                yield f'"{name}" has {json.dumps(value)} for "{key}"', f"a number {least}", ""


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value) and value > 0


def _shown(raw: Mapping[str, Any], name: str) -> str:
    return json.dumps(raw[name])[:40] if name in raw else "missing"


# -- The time of an op on a device: measured, otherwise by the roofline

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
"""The default efficiency by class of op: the share of a device's figure that is reached, if nothing was measured."""


def seconds(entry: Entry, device: Device, calibration: Calibration | None = None) -> float:
    """Return the time of one run of ``entry`` on ``device``, in seconds; see Note [The time of an op].

    The time that ``calibration`` measured for the same call takes precedence, then its efficiency of the op's class,
    then the prior. Raises ``PlanError`` if the calibration was made on another device.
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
    """Return the time of each entry of a profile, in seconds; raises the errors of ``seconds``."""
    return tuple(seconds(entry, device, calibration) for entry in profile.entries)


def roofline(entry: Entry, device: Device, efficiencies: Mapping[str, float]) -> float:
    """Return the time of one run of ``entry``, in seconds, by its FLOPs and bytes and the efficiency of each class."""
    op_kind = op_class(entry)
    if op_kind == FREE:
        return 0.0
    if op_kind == COLLECTIVE:
        return entry.moved_bytes / (device.link_bytes_per_s * efficiencies[COLLECTIVE]) + device.launch_s
    computing = computing_s(entry, device) / efficiencies[op_kind]
    return max(computing, moving_s(entry, device) / efficiencies[MEMORY]) + device.launch_s


def computing_s(entry: Entry, device: Device) -> float:
    """Return the seconds that the FLOPs of ``entry`` take at the device's peak."""
    narrow = is_low_precision(entry) and "float8" in device.flops_per_s
    flops = entry.flops / 2 if entry.is_causal else entry.flops
    return flops / device.peak("float8" if narrow else entry.dtype)


def moving_s(entry: Entry, device: Device) -> float:
    """Return the seconds that the bytes of ``entry`` take at the peak of the device's memory."""
    return entry.moved_bytes / device.bytes_per_s
