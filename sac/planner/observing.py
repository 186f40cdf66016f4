"""One observed step: its phases at the borders of regions, in forward and backward, with live bytes and peaks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from sac.planner.meters import Meter
from sac.torch_private import (
    NO_TASK,
    current_graph_task_id,
    graph_is_retained,
    tree_leaves,
    when_backward_ends,
)

# Note [An observed step]
#
# A step begins with a forward of the model and ends with its last backward. It is divided into the phases of
# `StepPhase`, by marks at the borders of regions: in forward around each call, in backward by hooks on a region's
# result and on its first input that has a graph. Several forwards whose backward is still to come belong to one step,
# whatever the order of their backwards is: those of two losses, or of the micro-batches that a pipeline stage has in
# flight. So do passes that follow one another and accumulate gradients: what is kept of one (its loss, what a stage has
# computed) is there in the next one.
#
# A backward that retains its graph may be the first part of one that a schedule divides: for the inputs, and later for
# the weights, which no hook sees begin. What the region keeps is there until the frame of its call has gone.
#
# The hooks belong to the graph, and hold the token of the step: when the graph is freed without a backward, the token
# goes, and with it the step.


FORWARD, BACKWARD, BETWEEN = "forward", "backward", "between"
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StepPhase:
    """A phase of a step: the forward or backward of the region at ``position``, or the time between two regions.

    Positions count the calls of regions in forward order. Between regions, ``position`` is the number of regions whose
    forward is over and whose backward has not ended. ``before``, ``peak`` and ``after`` are live bytes.

    ``rises``: of a forward that was observed op by op, for each entry of its tape the peak since the entry before it,
    in bytes above ``before``; the last one, of entry -1, is that after all entries.
    ``ended``: the positions whose values backward needs no longer, from this phase on.
    """

    part: str
    position: int
    before: int
    peak: int
    after: int
    rises: tuple[tuple[int, int], ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The memory of one step in bytes; ``static``: when it begins. ``paths``: the region at each position."""

    paths: tuple[str, ...]
    phases: tuple[StepPhase, ...]
    static: int
    peak: int


@dataclass(frozen=True, slots=True)
class Observed:
    """A step that was observed. ``live`` and ``gradients``: bytes when it began.

    ``shapes``: those of the inputs of each forward. ``made``: for each phase, the bytes of gradients of parameters at
    its start.
    """

    record: StepRecord
    live: int
    gradients: int
    made: tuple[int, ...]
    shapes: tuple[Shapes, ...]

    def rebased(self, live: int, gradients: int) -> StepRecord:
        """Return the record of such a step that begins with these bytes, or one that needs more.

        If gradients are there from the start only now, backward finds those that it would have made.
        """
        others = max(0, (live - gradients) - (self.live - self.gradients))
        more = max(0, gradients - self.gradients)
        phases = []
        in_backward = False
        for phase, made in zip(self.record.phases, self.made, strict=True):
            in_backward = in_backward or phase.part == BACKWARD
            shift = others + (max(0, more - made) if in_backward else more)
            phases.append(
                replace(phase, before=phase.before + shift, peak=phase.peak + shift, after=phase.after + shift)
            )
        return replace(self.record, phases=tuple(phases), static=live, peak=max(phase.peak for phase in phases))


class _Token:
    """Held by the hooks of a step's graph."""


@dataclass(slots=True)
class _Cut:
    """The phase that begins at a mark, or goes on ``after`` an entry of a tape, and the bytes of gradients there."""

    part: str
    position: int
    made: int
    ended: tuple[int, ...] = ()
    after: int | None = None


class Observation:
    """Observes a step that begins now; see Note [An observed step]."""

    def __init__(
        self,
        meter: Meter,
        live: int,
        gradients: Callable[[], int],
        shapes: Shapes,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._meter = meter
        self._on_lost = lost  # called when the graph is freed before its backward is over
        self._gradients = gradients
        self._cuts = [_Cut(BETWEEN, 0, gradients())]
        self._tasks: set[int] = set()  # backwards that are running
        self._begin(live, shapes)
        meter.start(live)

    def _begin(self, live: int, shapes: Shapes) -> None:
        """The step begins with the last cut."""
        self._from = len(self._cuts) - 1
        self._live, self._started_with = live, self._cuts[-1].made
        self.shapes = [shapes]  # of each forward
        self._paths: list[str] = []
        self._token: Any = None
        self._waiting: list[int] = []  # positions whose backward has not begun
        self._frames: dict[int, Any] = {}  # weak references to those of calls, by position
        self._retained: set[int] = set()  # positions whose backward has begun, and whose graph stays
        self._is_divided = False  # backwards may have come after those that were seen to begin
        self._ended = False

    def begin_again(self, live: int, shapes: Shapes) -> None:
        """A step begins now, not before: measure on, since a profiler is not to be stopped and started at once."""
        self._cut(BETWEEN, 0)
        self._begin(live, shapes)

    @property
    def waits(self) -> bool:
        """Whether the graph of a forward is alive whose backward is still to come, or runs."""
        return bool(self._tasks) or (bool(self._waiting) and self._token is not None and self._token() is not None)

    @property
    def is_whole(self) -> bool:
        """Whether every forward so far has had its backward."""
        return self._ended and not self._waiting

    @property
    def has_gradients(self) -> bool:
        """Whether parameters have had gradients: trainers also run a model to learn the shapes of its results."""
        return any(cut.made for cut in self._cuts[self._from :])

    def enter(self, path: str, args: Any, kwargs: Any) -> None:
        """The forward of a region begins."""
        position = len(self._paths)
        self._paths.append(path)
        self._ended = False
        token = self._token() if self._token is not None else None
        if token is None:
            token = _Token()
            self._token = weakref.ref(token, self._lost)
        self._new = token  # until the hooks on the result hold it
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._end_backward, token, position))
                break
        self._cut(FORWARD, position, self._cuts[-1].made)

    def after_op(self, entry: int) -> None:
        """The op of an entry of the tape of the region that was entered last has run."""
        self._meter.mark()
        self._cuts.append(replace(self._cuts[-1], ended=(), after=entry))

    def leave(self, output: Any, frame: Any = None) -> None:
        """The forward of the region that was entered last is over; ``frame``: a weak reference to that of its call."""
        position = len(self._paths) - 1
        if frame is not None:
            self._frames[position] = frame
        token, self._new = self._new, None
        has_graph = False
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._begin_backward, token, position))
                has_graph = True
        if has_graph:
            self._waiting.append(position)
        self._cut(BETWEEN, position + 1, self._cuts[-1].made)

    def place(self) -> tuple[str, str]:
        """Return the part of the step that runs, and the path of its region; empty between two."""
        cut = self._cuts[-1]
        return cut.part, "" if cut.part == BETWEEN else self._paths[cut.position]

    def _lost(self, token: Any) -> None:
        if token is self._token and not self._ended and current_graph_task_id() == NO_TASK:
            self._on_lost()

    @property
    def has_failed(self) -> bool:
        """Whether a backward has begun that will not end; to be asked outside of backwards."""
        return bool(self._tasks)

    def _cut(self, part: str, position: int, made: int | None = None, ended: tuple[int, ...] = ()) -> None:
        self._meter.mark()
        gone = {one for one in self._retained if self._frames[one]() is None}
        self._retained -= gone
        made = self._gradients() if made is None else made
        self._cuts.append(_Cut(part, position, made, (*ended, *sorted(gone))))

    def _begin_backward(self, token: _Token, position: int, gradient: Tensor) -> None:
        is_current = self._token is not None and self._token() is token
        if not is_current or position not in self._waiting:  # another result of the region, or a second backward
            return
        self._waiting.remove(position)
        task = current_graph_task_id()
        if task != NO_TASK and task not in self._tasks:
            self._tasks.add(task)
            when_backward_ends(partial(self._end_task, task))
        if position in self._frames and task != NO_TASK and graph_is_retained():
            self._retained.add(position)
            self._is_divided = True
            self._cut(BACKWARD, position)
        else:
            self._cut(BACKWARD, position, ended=(position,))

    def _end_backward(self, token: _Token, position: int, gradient: Tensor) -> None:
        if (self._cuts[-1].part, self._cuts[-1].position) == (BACKWARD, position):
            self._cut(BETWEEN, position)

    def _end_task(self, task: int) -> None:
        self._tasks.discard(task)
        if not self._tasks and not self._ended:
            self._ended = not self._waiting
            self._cut(BETWEEN, len(self._waiting))

    def end(self) -> Observed | None:
        """Stop measuring; return what was observed, or None if no backward has run through all regions."""
        self._meter.mark()
        levels = self._meter.stop()
        if not self.is_whole or len(levels) != len(self._cuts):
            return None
        phases, before = [], levels[self._from - 1].live if self._from else self._live
        cuts = self._cuts[self._from :]
        afters = [*(cut.after for cut in cuts[1:]), None]
        measured = [*zip(cuts, afters, levels[self._from :], strict=True)]
        if not self._is_divided:
            del measured[-1]  # what came after backward
        rises: list[tuple[int, int]] = []
        for cut, after, level in measured:
            if cut.after is None:
                rises, begin = [], cut
            rises.append((-1 if after is None else after, level.peak - before))
            if after is None:
                peak = before + max(rise for _, rise in rises)
                several = tuple(rises) if len(rises) > 1 else ()
                phases.append(StepPhase(begin.part, begin.position, before, peak, level.live, several, begin.ended))
                before = level.live
        peak = max(phase.peak for phase in phases)
        record = StepRecord(tuple(self._paths), tuple(phases), self._live, peak)
        made = tuple(cut.made for cut, _, _ in measured if cut.after is None)
        return Observed(record, self._live, self._started_with, made, tuple(self.shapes))
