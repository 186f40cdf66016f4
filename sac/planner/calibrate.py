"""Time the ops of one block on the local device."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import exp, log
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sac.blocks.applying import apply
from sac.engine.rng import random_state_kept
from sac.errors import PlanError, Problem, SacWarning, listing
from sac.ops.facts import traits_of
from sac.planner.cost import (
    ATTENTIONS,
    COLLECTIVE,
    FREE,
    MATMUL,
    MEMORY,
    Calibration,
    Overhead,
    call_key,
    computing_s,
    entry_of_call,
    moving_s,
    op_class,
)
from sac.planner.devices import Device, device_at_hand
from sac.planner.profile import Entry
from sac.recompute.module_tracker import BareMode
from sac.tensors import last_offset
from sac.torch_private import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

_REPEATS = 5


def calibrate(block: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Calibration:
    """Run ``block(*args, **kwargs)`` forward once, time each distinct call of an op in it, and fit the efficiencies.

    Each call runs again a few times on new tensors, and the median is used. The block, its buffers, the arguments and
    the random state are not changed. Collectives are not timed, since all ranks would have to meet in them. An op that
    cannot run again is named in a warning and keeps the efficiency of its class.

    Raises:
        PlanError: if the planner has no figures for the device, or no op that can be timed was run.
    """
    device = _device_of(block, args, kwargs or {})
    figures = device_at_hand(device)
    with random_state_kept(block.parameters()):
        measured = _time_all(_record(block, args, kwargs or {}), device)
    if not measured:
        raise PlanError(Problem(type(block).__name__, "its forward ran no op on plain tensors that can be timed"))
    times: dict[str, list[float]] = {}
    for entry, seconds in measured:
        times.setdefault(call_key(entry), []).append(seconds)
    ops = {key: fmean(of_key) for key, of_key in times.items()}  # calls that differ only in strides share a key
    return Calibration(figures.name, torch.__version__, fit_efficiencies(measured, figures), ops)


def fit_efficiencies(measured: Sequence[tuple[Entry, float]], device: Device) -> dict[str, float]:
    """Return the efficiency, the share of the device's figures that the measured calls reached, by class of op.

    ``measured`` holds entries with their seconds. The log of the efficiency is the log of the time at the full figure
    minus the log of the measured time; the mean of these differences is the least-squares fit. Calls that are mostly
    launch overhead and memory-bound products are not used. A class without any other call is omitted.
    """
    logarithms: dict[str, list[float]] = {}
    for entry, seconds in measured:
        op_kind = op_class(entry)
        moving = moving_s(entry, device)
        ideal = moving if op_kind == MEMORY else computing_s(entry, device)
        is_bound = op_kind == MEMORY or (op_kind in (MATMUL, *ATTENTIONS) and ideal > moving)
        if is_bound and min(ideal, seconds) > device.launch_s:
            logarithms.setdefault(op_kind, []).append(log(ideal / (seconds - device.launch_s)))
    return {op_kind: exp(fmean(found)) for op_kind, found in logarithms.items()}


@dataclass(frozen=True, slots=True)
class _Blank:
    """A tensor to create: floating-point ones with new numbers, others with their old values (possibly indices)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    values: Tensor | None = field(compare=False)

    def fill(self) -> Tensor:
        """Return a new tensor of the same layout; its numbers are in [0, 1), legal for probabilities and roots."""
        if self.values is not None:
            return self.values.clone()
        extent = 1 + last_offset(self.shape, self.stride)
        numbers = torch.rand(0 if 0 in self.shape else extent, device=self.device).to(self.dtype)
        return numbers.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an op that can be repeated."""

    op: Any
    leaves: tuple[Any, ...]
    structure: TreeSpec
    entry: Entry

    def prepare(self) -> Callable[[], Any]:
        """Return a function that runs the op on new tensors."""
        filled = [leaf.fill() if isinstance(leaf, _Blank) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(filled, self.structure)
        return partial(self.op, *args, **kwargs)


class _Recorder(BareMode):
    """Records each distinct call of an op on plain tensors, keyed by its arguments."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow compiled functions inside the block under this mode."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Any, _Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and record it."""
        kwargs = kwargs or {}
        flat, structure = tree_flatten((args, kwargs))
        if traits_of(func).is_infrastructure or not all(map(_is_plain, flat)):
            return func(*args, **kwargs)
        leaves = tuple(map(_as_leaf, flat))  # before the op writes to them
        out = func(*args, **kwargs)
        entry = entry_of_call(func, args, kwargs, out)
        if op_class(entry) not in (FREE, COLLECTIVE):
            called_with = tuple(leaf if isinstance(leaf, _Blank) else repr(leaf) for leaf in leaves)
            self.calls.setdefault((func, str(structure), called_with), _Call(func, leaves, structure, entry))
        return out


def _record(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Call]:
    """Return the distinct calls of one forward, run on copies of the arguments and of the buffers."""
    copied_args, copied_kwargs = tree_map_only(Tensor, torch.clone, (tuple(args), dict(kwargs)))
    buffers = {name: buffer.clone() for name, buffer in block.named_buffers()}
    recorder = _Recorder()
    with torch.enable_grad(), recorder:
        functional_call(block, buffers, copied_args, copied_kwargs)
    return [*recorder.calls.values()]


def _is_plain(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return True
    return type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided and not leaf.is_meta


def _as_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Generator):
        return leaf.clone_state()
    if not isinstance(leaf, Tensor):
        return leaf
    has_numbers = leaf.is_floating_point() or leaf.is_complex()
    values = None if has_numbers else leaf.detach().clone()
    return _Blank(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, values)


def _time_all(calls: Sequence[_Call], device: torch.device) -> list[tuple[Entry, float]]:
    timed: list[tuple[Entry, float]] = []
    failed: dict[str, str] = {}
    with torch.no_grad(), torch.autocast(device.type, enabled=False):  # its casts were recorded as separate calls
        for call in calls:
            try:
                timed.append((call.entry, median_seconds(call.prepare(), device)))
            except Exception as error:  # a kernel may refuse for any reason
                failed.setdefault(call.entry.op, f"{call.entry.op} ({type(error).__name__}: {error})")
    if failed:
        warnings.warn(
            f"these ops could not be run by themselves: {listing([*failed.values()])}", SacWarning, stacklevel=3
        )
    return timed


def median_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of ``run``, after one run that is not timed."""
    run()
    if device.type != "cuda":
        samples = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            run()
            samples.append(time.perf_counter() - started)
        return median(samples)
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize()
    milliseconds: list[float] = [before.elapsed_time(after) for before, after in pairwise(marks)]
    return median(milliseconds) / 1e3


# -- The link to host memory

_LINK_BYTES = 256 << 20


def time_link(device: torch.device) -> tuple[float, float] | None:
    """Return the bytes per second of copies to pinned host memory and back; None for a device without a link."""
    if device.type != "cuda":
        return None
    there = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    down = median_seconds(lambda: host.copy_(there, non_blocking=True), device)
    up = median_seconds(lambda: there.copy_(host, non_blocking=True), device)
    return _LINK_BYTES / down, _LINK_BYTES / up


# -- The overhead of checkpointing, on chains of tiny ops

_LENGTHS = 32, 256  # ops
_ROUNDS = 20
_ALTERNATE = {"schema": "sac/v1", "name": "overhead", "rules": [{"id": "half", "ops": "*", "do": "alternate"}]}
_WAYS: Mapping[str, Any] = {
    "none": "none",
    "rerun": {"mode": "full", "blocks": ["*"]},
    "replay": {"mode": "selective", "policy": _ALTERNATE, "blocks": ["*"], "engine": "replay"},
}


class _Chain(nn.Module):
    """A chain of tiny ops, half of which are views: about the mix of a transformer block."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.ops, self.scale = ops, nn.Parameter(torch.ones(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.ops // 4):
            x = (torch.tanh(x) * self.scale).transpose(0, 1).transpose(0, 1)
        return x


def time_overhead(device: torch.device) -> Overhead:
    """Return what checkpointing takes of this machine's host: steps of short and long chains, with it and without.

    Raises ``PlanError`` if the planner has no figures for the device.
    """
    launch_s = device_at_hand(device).launch_s
    x = torch.ones(8, 32, device=device, requires_grad=True)
    chains = {}
    for length in _LENGTHS:
        for name, value in _WAYS.items():
            chains[name, length] = apply(nn.Sequential(_Chain(length), _Chain(length)).to(device), value)
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in chains}
    for _ in range(_ROUNDS):
        for key, chain in chains.items():
            started = time.process_time()
            chain(x).sum().backward()
            samples[key].append((time.process_time() - started) / 2)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    # Other processes make some rounds slower, and the first calls of a region learn.
    seconds = {key: sorted(found)[_ROUNDS // 4] for key, found in samples.items()}
    short, long = _LENGTHS

    def line(way: str) -> tuple[float, float]:
        added = [seconds[way, length] - seconds["none", length] for length in _LENGTHS]
        slope = max(0.0, (added[1] - added[0]) / (long - short))
        return slope, max(0.0, added[0] - slope * short)

    (rerun, rerun_call), (replay, replay_call) = line("rerun"), line("replay")
    # Half of the ops are launched; replay runs half of these.
    return Overhead(max(0.0, replay - launch_s / 4), max(0.0, rerun - launch_s / 2), replay_call, rerun_call)


def _device_of(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device of the block: that of its first parameter, buffer or argument."""
    tensors = [*block.parameters(), *block.buffers(), *tree_leaves((args, kwargs))]
    return next((tensor.device for tensor in tensors if isinstance(tensor, Tensor)), torch.device("cpu"))
