"""What the CPU's kernels take beside their results, measured by running each op once on tensors of its sizes."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sac.errors import PlanError, Problem
from sac.memory_timeline import mark, measure_memory
from sac.ops.names import op_name

_log = logging.getLogger(__name__)

# Note [Scratch]
#
# The memory that a kernel takes and gives back is known to nobody but itself. On the CPU the op is run, once per op and
# sizes, on zeros, and the profiler says how far the memory went up meanwhile. That is asked for after the step, for the
# moment in each of its parts at which most was alive when the op began.
#
# oneDNN's kernel for LSTMs packs what its backward needs into bytes whose number only it knows: a tensor without data
# has none of them. Its backward, run on those, takes the process with it (torch 2.13). So the op is refused.

_PACKS_BYTES = "aten::mkldnn_rnn_layer"


class Scratch:
    """Notes at what level of live bytes ops run, and tells how high each part of a step went with their scratch."""

    def __init__(self) -> None:
        self._ops: dict[Hashable, tuple[Any, Any, Any]] = {}
        self._sizes: dict[Hashable, int] = {}  # bytes that the op takes at most while it runs, results included
        self._levels: dict[Hashable, int] = {}  # of the part of the step that is going on

    def saw(self, func: Any, args: Any, kwargs: Any, before: int) -> None:
        """An op has run; ``before`` bytes were alive when it began. ``PlanError`` for one that tells no sizes."""
        if func.is_view:
            return
        if func.name() == _PACKS_BYTES:
            found = "how many bytes its kernel packs for backward is not known, so no peak can be told"
            raise PlanError(Problem(op_name(func), found, fix="use mode: full, or a policy by hand"))
        metas = tree_map_only(Tensor, _meta, (args, kwargs))
        key = func, str(metas)
        if key not in self._ops:
            self._ops[key] = func, *metas
        self._levels[key] = max(before, self._levels.get(key, 0))

    def cut(self) -> dict[Hashable, int]:
        """A part of the step is over: return the levels of its ops."""
        levels, self._levels = self._levels, {}
        return levels

    def peak(self, levels: dict[Hashable, int]) -> int:
        """Return how high a part went that ran ops at these levels."""
        self._measure()
        return max((level + self._sizes[key] for key, level in levels.items()), default=0)

    def _measure(self) -> None:
        waiting = [key for key in self._ops if key not in self._sizes]
        if not waiting:
            return
        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                timeline = measure_memory(lambda: self._run(waiting))
        finally:
            torch.set_rng_state(state)
        for place, key in enumerate(waiting):
            began, ended = timeline.marks[f"begin {place}"][-1][0], timeline.marks[f"end {place}"][-1][0]
            first, last = bisect_left(timeline.times_ms, began), bisect_left(timeline.times_ms, ended)
            self._sizes[key] = max(timeline.live_bytes[first : last + 1]) - timeline.live_bytes[first]

    def _run(self, keys: list[Hashable]) -> None:
        for place, key in enumerate(keys):
            func, args, kwargs = self._ops[key]
            try:
                args, kwargs = tree_map_only(_Meta, _zeros, (args, kwargs))
                mark(f"begin {place}")
                func(*args, **kwargs)
            except Exception:  # (zeros are no legal input of some ops)
                _log.debug("%s does not run on zeros: its scratch is not known", func)
                mark(f"begin {place}")
            mark(f"end {place}")


@dataclass(frozen=True, slots=True)
class _Meta:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _meta(tensor: Tensor) -> _Meta:
    return _Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _zeros(meta: _Meta) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype).zero_()
