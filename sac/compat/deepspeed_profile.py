"""Where a region's forward and backward begin and end: waiting for the device there, and measuring the time between."""

from __future__ import annotations

import io
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

_log = logging.getLogger("sac.deepspeed")

# Note [Region boundaries in backward]
#
# A region's backward begins when the first of the graph nodes that made its outputs is about to run. It ends when all
# its inputs that get a gradient in this backward have theirs; if there are none, and in any case, when the whole
# backward ends. Hooks on the inputs would stay on a leaf for ever: they go with the graph of the outputs.


def synchronize_device() -> None:
    """Wait for all work on the current accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@dataclass(slots=True)
class Times:
    """How long regions of one name took, in milliseconds: the number of passes, and their sum."""

    forwards: int = 0
    forward_ms: float = 0.0
    backwards: int = 0
    backward_ms: float = 0.0


@dataclass(slots=True)
class Boundaries:
    """What happens at the boundaries of regions: they wait for the device, and measure if ``measures``.

    ``times`` is by the name of the region's function.
    """

    measures: bool = False
    times: dict[str, Times] = field(default_factory=dict)

    def run(self, name: str, region: Callable[[], Any], inputs: Any) -> Any:
        """Return what ``region`` returns; ``inputs`` are what it reads."""
        synchronize_device()
        started = time.perf_counter()
        output = region()
        synchronize_device()
        self.note_forward(name, time.perf_counter() - started)
        if torch.is_grad_enabled():
            _watch_backward(self, name, _differentiable(output), _differentiable(inputs))
        return output

    def note_forward(self, name: str, seconds: float) -> None:
        """Take one forward in."""
        if self.measures:
            times = self.times.setdefault(name, Times())
            times.forwards += 1
            times.forward_ms += seconds * 1e3
            _log.info("%s: forward %.3f ms", name, seconds * 1e3)

    def note_backward(self, name: str, seconds: float) -> None:
        """Take one backward in, recomputation included."""
        if self.measures:
            times = self.times.setdefault(name, Times())
            times.backwards += 1
            times.backward_ms += seconds * 1e3
            _log.info("%s: backward %.3f ms", name, seconds * 1e3)


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _watch_backward(
    boundaries: Boundaries, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Have the region's backward noticed; see Note [Region boundaries in backward]."""
    backward = _Backward(boundaries, name)
    for node in {output.grad_fn for output in outputs} - {None}:
        node.register_prehook(backward.begin)  # type: ignore[union-attr]
    if inputs:
        reference = weakref.ref(backward)
        backward.handle = register_multi_grad_hook(inputs, lambda grads: _end(reference))


def _end(reference: weakref.ref[_Backward]) -> None:
    backward = reference()
    if backward is not None:
        backward.end()


class _Backward:
    """One region's backward, as often as it runs; alive as long as the graph nodes of the region's outputs."""

    def __init__(self, boundaries: Boundaries, name: str) -> None:
        self.boundaries = boundaries
        self.name = name
        self.handle: Any = None
        self._started: float | None = None

    def begin(self, grads: Any) -> None:
        """A node of the region's outputs is about to run."""
        if self._started is None:
            synchronize_device()
            self._started = time.perf_counter()
            # Private to torch (2.11 to 2.13), and what its own FSDP and DDP use.
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """The region's backward is over."""
        if self._started is not None:
            started, self._started = self._started, None
            synchronize_device()
            self.boundaries.note_backward(self.name, time.perf_counter() - started)

    def __del__(self) -> None:
        if self.handle is not None:
            self.handle.remove()


def table_of(times: dict[str, Times]) -> str:
    """Return the times as a table, drawn by rich where it is installed."""
    columns = ("region", "forwards", "ms per forward", "backwards", "ms per backward")
    rows = [
        (
            name,
            str(one.forwards),
            f"{one.forward_ms / max(one.forwards, 1):.3f}",
            str(one.backwards),
            f"{one.backward_ms / max(one.backwards, 1):.3f}",
        )
        for name, one in times.items()
    ]
    return _drawn_by_rich(columns, rows) if find_spec("rich") is not None else _in_columns(columns, rows)


def _in_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (columns, *rows)
    ]
    return "\n".join(lines)


def _drawn_by_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=max(80, 60 + max(map(len, (row[0] for row in rows)), default=0))).print(table)
    return text.getvalue().rstrip("\n")
