"""An upper bound of the memory that one call of a CPU kernel needs while it runs, from a run of it."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from sac.errors import PlanError, Problem
from sac.memory_timeline import mark, measure_memory
from sac.ops.facts import traits_of
from sac.ops.names import op_name
from sac.torch_private import tree_leaves, tree_map_only

_log = logging.getLogger(__name__)

# Note [Kernel workspace]
#
# Only a kernel itself knows the memory that it allocates and frees while it runs. On the CPU, each op is run once per
# combination of sizes, on zeros, and the profiler measures how far memory rises meanwhile. This happens after the step,
# for the highest level of live bytes in each phase at which the op began. The bound is that rise.
#
# A large op would take seconds and gigabytes. It is run at a smaller size instead: one dimension, wherever it occurs
# in the call, is divided. What the kernel then allocates in addition to its results is multiplied by as much (once more
# for each time that the dimension occurs in one tensor) and added to the results, whose sizes are known. The bound is a
# little too high for scratch in proportion to the size, and much too high for a fixed amount, such as a buffer per
# thread. The size stays far above those at which kernels choose between algorithms. An op that does not run counts with
# its results and a copy of each argument.
#
# A collective is not run, since other ranks would have to meet in it: it counts with its results. What the library that
# sends them allocates is not known.
#
# oneDNN's kernel for LSTMs packs the data for its backward into a buffer whose size only the kernel knows; a tensor
# without data does not have this buffer. The backward, run on such tensors, crashes the process (torch 2.13). So the op
# is refused.

_PACKS_BYTES = "aten::mkldnn_rnn_layer"

# Ops with an argument that counts elements: with zeros, the kernel would leave out most of its work.
_COUNTS = {"aten::_embedding_bag_backward": 4, "aten::_embedding_bag_dense_backward": 3}

_MARGIN = Fraction(9, 8)  # of scratch that a smaller call has shown

LARGE_BYTES = 64 * 2**20  # of the arguments and results of a call
LARGE_FLOPS = 2 * 10**9


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The memory layout of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The bytes of its elements: an expanded tensor has fewer in memory."""
        return prod(size for size, step in zip(self.shape, self.stride, strict=True) if step) * self.dtype.itemsize

    def divided(self, size: int, into: int) -> TensorMeta:
        """Return the layout with each dimension of ``size`` elements reduced to ``into``."""
        strides = list(self.stride)
        for own, step in zip(self.shape, self.stride, strict=True):
            if own == size and step:
                strides = [
                    other if other <= step else other // (step * size) * step * into + other % (step * size)
                    for other in strides
                ]
        return TensorMeta(tuple(into if one == size else one for one in self.shape), tuple(strides), self.dtype)


@dataclass(frozen=True, slots=True)
class SizedCall:
    """One call of an op. ``args`` and ``kwargs`` have a ``TensorMeta`` for each tensor, ``made`` those of the results.

    Results in the memory of an argument are not among ``made``.
    """

    func: Any
    args: Any
    kwargs: Any
    made: tuple[TensorMeta, ...]
    flops: int

    @property
    def read(self) -> tuple[TensorMeta, ...]:
        """The layouts of the tensors among the arguments."""
        return tuple(one for one in tree_leaves((self.args, self.kwargs)) if isinstance(one, TensorMeta))

    @property
    def made_bytes(self) -> int:
        """The bytes of the results."""
        return sum(one.bytes for one in self.made)

    @property
    def bytes(self) -> int:
        """The bytes of the arguments and results."""
        return sum(one.bytes for one in self.read) + self.made_bytes

    @property
    def is_large(self) -> bool:
        """Whether the call takes too long, or too much memory, to be run."""
        return self.bytes > LARGE_BYTES or self.flops > LARGE_FLOPS

    @property
    def is_collective(self) -> bool:
        """Whether ranks meet in the call."""
        return traits_of(self.func).is_collective

    def divided(self, size: int, into: int) -> SizedCall:
        """Return the call with each dimension of ``size`` elements reduced to ``into``; also numbers that name it."""

        def smaller(leaf: Any) -> Any:
            if isinstance(leaf, TensorMeta):
                return leaf.divided(size, into)
            return into if type(leaf) is int and leaf == size else leaf

        args, kwargs = tree_map_only((TensorMeta, int), smaller, (self.args, self.kwargs))
        return SizedCall(self.func, args, kwargs, tuple(one.divided(size, into) for one in self.made), 0)


def meta_of(tensor: Tensor) -> TensorMeta:
    """Return the memory layout of ``tensor``."""
    return TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def refuse_packed(func: Any) -> None:
    """Raise ``PlanError`` for an op whose buffer sizes are unknown; see Note [Kernel workspace]."""
    if func.name() == _PACKS_BYTES:
        found = "how many bytes its kernel packs for backward is not known, so the peak cannot be computed"
        raise PlanError(Problem(op_name(func), found, fix="use mode: full, or a policy by hand"))


def peak_bounds(calls: Sequence[SizedCall]) -> list[int]:
    """Return upper bounds of the bytes by which memory rises during each call; see Note [Kernel workspace]."""
    found = [call.made_bytes if call.is_collective else call.bytes for call in calls]
    left = {index: _runs_of(call) for index, call in enumerate(calls) if not call.is_collective}
    while left:  # one profile for the first run of each call, one for the second where the first fails, …
        tried = {index: first for index, runs in left.items() if (first := next(runs, None)) is not None}
        rises = _measured([run for run, _ in tried.values()])
        for (index, (run, factor)), rise in zip(tried.items(), rises, strict=True):
            if rise is not None:
                found[index] = calls[index].made_bytes + ceil(max(0, rise - run.made_bytes) * factor)
        failed = {index for index, rise in zip(tried, rises, strict=True) if rise is None}
        left = {index: runs for index, runs in left.items() if index in failed}
    return found


def _runs_of(call: SizedCall) -> Iterator[tuple[SizedCall, Fraction]]:
    """Yield calls to run instead of ``call``, and the factor of their scratch: ``call`` itself if it is not large.

    Of smaller calls, those come first in which the largest dimension that occurs once in a tensor is divided.

    Attention gets fewer rows only: its kernel chooses the size of its scratch by the length, and a smaller number of
    heads may not fit the number of key heads, which the kernel does not check (torch 2.13: the process crashes).
    Convolutions run on one row first, however large it is: their kernels are chosen by all other sizes.
    """
    if not call.is_large:
        yield call, Fraction(1)
        return
    if "convolution" in call.func.name():
        rows = call.args[0].shape[0]
        yield call.divided(rows, 1) if rows > 1 else call, rows * _MARGIN
    metas = (*call.read, *call.made)
    much = max(Fraction(call.bytes, LARGE_BYTES), Fraction(call.flops, LARGE_FLOPS))
    sizes = [size for one in metas for size in (one.shape[:1] if "attention" in call.func.name() else one.shape)]
    times = {size: max(one.shape.count(size) for one in metas) for size in sizes if size > 1}
    for size in sorted(times, key=lambda size: (times[size], -size)):
        into = max(1, int(size / much))
        smaller, factor = call.divided(size, into), Fraction(size, into) ** times[size]
        if smaller.bytes <= 2 * LARGE_BYTES and call.flops <= 2 * LARGE_FLOPS * factor:
            yield smaller, factor * _MARGIN


def _measured(calls: Sequence[SizedCall]) -> list[int | None]:
    """Return the rise of memory during each call; None for those that do not run."""
    if not calls:
        return []
    state = torch.get_rng_state()
    failed: set[int] = set()
    try:
        with torch.no_grad():
            timeline = measure_memory(lambda: _run(calls, failed))
    finally:
        torch.set_rng_state(state)
    found: list[int | None] = []
    for index in range(len(calls)):
        began, ended = timeline.marks[f"begin {index}"][-1][0], timeline.marks[f"end {index}"][-1][0]
        first, last = bisect_left(timeline.times_ms, began), bisect_left(timeline.times_ms, ended)
        rise = max(timeline.live_bytes[first : last + 1]) - timeline.live_bytes[first]
        found.append(None if index in failed else rise)
    return found


def _run(calls: Sequence[SizedCall], failed: set[int]) -> None:
    for index, call in enumerate(calls):
        try:
            args, kwargs = tree_map_only(TensorMeta, _zeros, (call.args, call.kwargs))
            if (place := _COUNTS.get(call.func.name())) is not None:
                args[place].fill_(1)
            mark(f"begin {index}")
            call.func(*args, **kwargs)
        except Exception:  # (zeros are not a legal input of some ops)
            _log.debug("%s does not run on zeros: its scratch is not known", call.func)
            failed.add(index)
            mark(f"begin {index}")
        mark(f"end {index}")


def _zeros(meta: TensorMeta) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype).zero_()
