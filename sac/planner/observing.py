"""One observed step: its phases at the borders of regions, with live bytes and peaks as an allocator counts them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sac.memory_timeline import Meter
from sac.tensors import storage_address, tensor_parts
from sac.torch_private import NO_TASK, current_graph_task_id, graph_is_retained, tree_leaves, when_backward_ends

# Note [An observed step]
#
# A step begins with a forward of the model and ends with its last backward. Marks divide it into phases (`StepPhase`):
# in forward around each call of a region, in backward by hooks on its result and on its first input that has a graph.
# Forwards may come before the backwards of others, in any order (two losses, micro-batches of a pipeline), and passes
# that accumulate gradients follow one another: what is kept of one is there in the next.
#
# A backward that retains its graph may be the first part of one that a schedule divides: for the inputs, and later for
# the weights, which no hook sees begin. What regions keep in such a step counts until its end.
#
# What a region holds besides results of its ops are its arguments, made by others and often passed on from region to
# region. When such a storage is freed depends on all regions that had it, and on the caller: it is seen, not predicted.
#
# The hooks belong to the graph, and hold the token of the step: when the graph is freed without a backward, the token
# goes, and with it the step.


FORWARD, BACKWARD, BETWEEN = "forward", "backward", "between"
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StepPhase:
    """A phase of a step: the forward or backward of the region at ``path``, or the time between two (no path).

    ``alive``: the paths of the calls whose forward is over and whose backward has not begun, or has not released them.
    ``before``, ``peak`` and ``after`` are live bytes, ``gradients`` the bytes of gradients of parameters at its start.
    ``rises``: the peaks after each op of a forward that is profiled, and after all, above ``before``.
    ``freed``: those of the record's ``passed`` that have been freed since the phase before it began.
    """

    part: str
    path: str
    alive: tuple[str, ...]
    gradients: int
    before: int = 0
    peak: int = 0
    after: int = 0
    rises: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The memory of one step in bytes; ``static``: when it begins. ``paths``: of the regions in the order of calls.

    ``shapes``: those of the inputs of each forward. ``passed``: the bytes of each storage of an argument or result of
    regions, and the paths of those that had or, if they are profiled, read it.
    """

    paths: tuple[str, ...]
    phases: tuple[StepPhase, ...]
    static: int
    shapes: tuple[Shapes, ...] = ()
    passed: tuple[tuple[int, frozenset[str]], ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes."""
        return max(phase.peak for phase in self.phases)

    def rebased(self, live: int, gradients: int) -> StepRecord:
        """Return the record of such a step that begins with these bytes, or one that needs more.

        If gradients are there from the start only now, backward finds those that it would have made.
        """
        first = self.phases[0].gradients
        others = max(0, (live - gradients) - (self.static - first))

        def rebased(phase: StepPhase) -> StepPhase:
            shift = others + max(0, gradients - max(first, phase.gradients))
            return replace(phase, before=phase.before + shift, peak=phase.peak + shift, after=phase.after + shift)

        return replace(self, phases=tuple(map(rebased, self.phases)), static=live)


class _Token:
    """Held by the hooks of a step's graph."""


class Observation:
    """Observes a step that begins now, with ``live`` bytes; see Note [An observed step].

    ``gradients``: returns the bytes of gradients. ``lost``: called when the graph is freed before its backward is over.
    """

    def __init__(self, meter: Meter, live: int, gradients: Callable[[], int], lost: Callable[[], None]) -> None:
        self._meter, self._gradients, self._on_lost = meter, gradients, lost
        self._thread = threading.get_ident()
        self._cuts = [StepPhase(BETWEEN, "", (), gradients())]  # begun
        self._begin(live)
        meter.start(live)

    def _begin(self, live: int) -> None:
        """The step begins with the last cut."""
        self._first, self._live = len(self._cuts) - 1, live
        self.shapes: list[Shapes] = []  # of each forward
        self._paths: list[str] = []
        self._token: Any = lambda: None
        self._alive: list[str] = []
        self._passed: list[tuple[int, set[str]]] = []
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}  # those of ``_passed`` that are not freed, by address
        self._waiting: list[int] = []  # calls whose backward has not begun
        self._tasks: set[int] = set()  # backwards that are running, or have failed
        self._is_retained = False
        self._ended = False

    def begin_again(self, live: int) -> None:
        """A step begins now, not before: measure on, since a profiler is not to be stopped and started at once."""
        self._alive, self._there = [], {}
        self._cut(BETWEEN)
        self._begin(live)

    @property
    def waits(self) -> bool:
        """Whether a backward is running, or to come: that of a forward whose graph is alive."""
        if self._tasks:
            return current_graph_task_id() != NO_TASK
        return bool(self._waiting) and self._token() is not None

    def is_whole(self, has_changed: bool) -> bool:
        """Return whether all forwards have had their backward, and parameters gradients, or a change since then.

        Trainers also run a model to learn the shapes of its results.
        """
        has_gradients = any(cut.gradients for cut in self._cuts[self._first :])
        return self._ended and not self._waiting and (has_changed or has_gradients)

    @property
    def is_here(self) -> bool:
        """Whether it was begun in this thread, the only one in which it can be ended."""
        return threading.get_ident() == self._thread

    def enter(self, path: str, args: Any, kwargs: Any) -> None:
        """The forward of a region begins."""
        self._paths.append(path)
        self._ended = False
        if (token := self._token()) is None:
            token = _Token()
            self._token = weakref.ref(token, self._lost)
        self._new = token  # until the hooks on the result hold it
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.grad_fn is not None]
        for tensor in tensors[:1]:
            tensor.register_hook(partial(self._end_backward, token, path))
        self._pass((args, kwargs))
        self._cut(FORWARD, path)

    def after_op(self) -> None:
        """An op has run in the region that was entered last."""
        self._meter.mark()
        self._cuts.append(self._cuts[-1])

    def leave(self, output: Any) -> None:
        """The forward of the region that was entered last is over."""
        position = len(self._paths) - 1
        token, self._new = self._new, None
        tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.grad_fn is not None]
        for tensor in tensors:
            tensor.register_hook(partial(self._begin_backward, token, position))
        if tensors:
            self._waiting.append(position)
            self._alive.append(self._paths[position])
        self._pass(output)
        self._cut(BETWEEN)

    def _pass(self, values: Any) -> None:
        """Note the storages of arguments or results of the region that was entered last."""
        for part in (part for leaf in tree_leaves(values) if isinstance(leaf, Tensor) for part in tensor_parts(leaf)):
            with suppress(RuntimeError):  # sparse tensors and those of torch.func have no storage
                one = StorageWeakRef(part.untyped_storage())
                if one.cdata not in self._there:
                    self._there[one.cdata] = one, len(self._passed)
                    self._passed.append((self._meter.bytes_of(part), set()))
                self._passed[self._there[one.cdata][1]][1].add(self._paths[-1])

    def read(self, tensors: Iterable[Tensor]) -> None:
        """The region that was entered last reads tensors from outside, which need not be its arguments."""
        addresses = {storage_address(part) for tensor in tensors for part in tensor_parts(tensor)}
        for address in addresses & self._there.keys():
            self._passed[self._there[address][1]][1].add(self._paths[-1])

    def place(self) -> tuple[str, str]:
        """Return the part of the step that runs, and the path of its region; empty between two."""
        return self._cuts[-1].part, self._cuts[-1].path

    def _lost(self, token: Any) -> None:
        if token is self._token and not self._ended and current_graph_task_id() == NO_TASK:
            self._on_lost()

    def _cut(self, part: str, path: str = "") -> None:
        self._meter.mark()
        freed = {address: number for address, (one, number) in self._there.items() if one.expired()}
        self._there = {address: one for address, one in self._there.items() if address not in freed}
        self._cuts.append(StepPhase(part, path, tuple(self._alive), self._gradients(), freed=tuple(freed.values())))

    def _begin_backward(self, token: _Token, position: int, gradient: Tensor) -> None:
        if self._token() is not token or position not in self._waiting:  # another result, or a second backward
            return
        self._waiting.remove(position)
        task = current_graph_task_id()
        if task != NO_TASK and task not in self._tasks:
            self._tasks.add(task)
            when_backward_ends(partial(self._end_task, task))
        self._is_retained = self._is_retained or (task != NO_TASK and graph_is_retained())
        if not self._is_retained:
            self._alive.remove(self._paths[position])
        self._cut(BACKWARD, self._paths[position])

    def _end_backward(self, token: _Token, path: str, gradient: Tensor) -> None:
        if (self._cuts[-1].part, self._cuts[-1].path) == (BACKWARD, path):
            self._cut(BETWEEN)

    def _end_task(self, task: int) -> None:
        self._tasks.discard(task)
        if not self._tasks and not self._ended:
            self._ended = not self._waiting
            self._cut(BETWEEN)

    def end(self) -> StepRecord | None:
        """Stop measuring; return what was observed, or None if no backward has run through all regions."""
        if not self.is_here:
            return None
        self._meter.mark()
        levels = self._meter.stop()
        if not self._ended or self._waiting or len(levels) != len(self._cuts):
            return None
        phases: list[StepPhase] = []
        before = levels[self._first - 1][1] if self._first else self._live
        marks = zip(self._cuts[self._first :], levels[self._first :], strict=True)
        for _, of_one in groupby(marks, key=lambda pair: id(pair[0])):
            cuts, found = zip(*of_one, strict=True)
            rises = tuple(peak - before for peak, _ in found)
            phases.append(replace(cuts[0], before=before, peak=before + max(rises), after=found[-1][1], rises=rises))
            before = found[-1][1]
        in_step = phases if self._is_retained else phases[:-1]  # the last one came after backward
        passed = tuple((size, frozenset(paths)) for size, paths in self._passed)
        return StepRecord(tuple(self._paths), tuple(in_step), self._live, tuple(self.shapes), passed)
