"""Regions and region groups: which frame runs a call."""

from __future__ import annotations

import types
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sac.decision_log import log_decisions
from sac.engine.fp8 import REASON, Fp8Function, keeps_fp8_state
from sac.engine.frame import Frame
from sac.engine.functions import install
from sac.engine.objects import attributes_of, cells
from sac.engine.op_trace import OpTraceRecorder, OpTraceRow, RegionStats
from sac.engine.reentrant import ReentrantFrame, can_be_reentrant
from sac.engine.schedule import Schedule
from sac.engine.settings import ALWAYS, REPLAY, RERUN, Settings, as_torch_says
from sac.engine.table import DecisionTable
from sac.engine.taped import TapedFrame
from sac.errors import Problem, RegionError, warn
from sac.outer_hooks import PackHooks, active_hooks
from sac.policy.model import Policy
from sac.torch_private import NO_TASK, current_graph_task_id, transform_is_active

install()
FULL = Policy(name="full", source="full")
FULL_TABLE = DecisionTable(FULL, ())


class RegionGroup:
    """Regions that share a decision table, and what calls of one have shown.

    ``not_replayable``: why a call could not be replayed; later ones use rerun. ``careful``: whether forwards need a
    mode, since they choose, write to tensors from outside or draw from other generators than the default ones (None:
    not known yet). ``harmless``: of what may be a choice or a draw, what recorded calls have shown to be none;
    ``doubt``: what calls without a mode had. ``verified``: a replay has given the forward's values. ``communicates``:
    other ranks take part. ``schedule``: that of the last call. ``functions``: what calls of autograd functions have
    shown, by (path, function).
    """

    def __init__(self, table: DecisionTable, name: str) -> None:
        self.table, self.name = table, name
        self.op_trace: tuple[OpTraceRow, ...] = ()
        self.lists_ops = True  # whether the first call fills `op_trace`
        self.not_replayable = ""
        self.careful: bool | None = None
        self.harmless: Counter[Any] = Counter()
        self.doubt: Counter[Any] = Counter()
        self.verified = False
        self.communicates = False
        self.schedule: Schedule | None = None
        self.warns = False  # when a call cannot be replayed
        self.functions: dict[Any, Any] = {}

    def learn(self, seen: Counter[Any], *, is_careful: bool) -> None:
        """Learn from a recorded call, in which autograd saved what is ``seen`` (see ``Frame``)."""
        if is_careful:
            self.careful = True
        elif not self.careful:
            self.harmless |= seen
            self.careful = None if self.doubt - self.harmless else False

    def doubts(self, seen: Counter[Any]) -> bool:
        """Return whether a call without a mode did what is not known to be harmless; later ones are recorded."""
        if not seen - self.harmless:
            return False
        self.careful, self.doubt = self.careful or None, self.doubt | seen
        return True

    def give_up(self, reason: str, where: str) -> None:
        """Use rerun from now on."""
        if self.not_replayable:
            return
        self.not_replayable = reason
        if self.warns:
            fix = "none is needed, the region runs again as Python; `engine: rerun` asks for that from the start"
            problem = Problem(where, f"replay cannot be used here: {reason}", fix=fix)
            warn(problem)

    @property
    def units_seen(self) -> set[str]:
        """The autograd Functions and named pieces that calls have shown, as ``function NAME`` or ``unit NAME``."""
        called = [key[1] for key in self.functions if isinstance(key[0], str)]
        return {one if isinstance(one, str) else f"function {one.__qualname__}" for one in called}

    def __reduce__(self) -> tuple[Any, ...]:
        return RegionGroup, (self.table, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionGroup:
        return self  # what the group has learnt is also true of copies of its regions


class Region:
    """One checkpointed module or function: its region group, and what the last call kept."""

    def __init__(self, group: RegionGroup, path: str) -> None:
        self.group, self.path = group, path
        self.stats = RegionStats()

    def run(
        self,
        function: Callable[..., Any],
        owners: tuple[nn.Module, ...],
        settings: Settings,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call; gradients are those of ``function(*args, **kwargs)``. ``owners``: modules of the function."""
        group, stats, settings = self.group, self.stats, as_torch_says(settings)
        where = self.path or group.name
        owners += tuple(argument for argument in args if isinstance(argument, nn.Module))
        try:
            if not stats.calls and any(is_lazy(parameter) for owner in owners for parameter in owner.parameters()):
                return function(*args, **kwargs)  # this call makes the parameters
            if settings.use_reentrant and can_be_reentrant(args, kwargs) and not keeps_fp8_state(owners):
                frame: Frame = ReentrantFrame(function, owners, settings, where, group)
            else:
                plain = group.table.saves_everything and not group.table.offloads and active_hooks() is None
                if plain and stats.calls:  # the first call counts the bytes
                    stats.calls += 1
                    return function(*args, **kwargs)
                refuse_transforms(where)
                frame = self.frame(function, owners, settings, active_hooks())
            output = frame.run(args, kwargs)
        except torch.OutOfMemoryError as error:
            settings.add_note(error)
            raise
        stats.engine, stats.offloads, stats.compiled_graphs = frame.engine, frame.offloads, frame.compiled_graphs
        stats.take(frame.figures, frame.input_bytes)
        if frame.trace is not None:
            group.op_trace = tuple(frame.trace.rows)
            log_decisions(self.path, group.op_trace)
        return output

    def frame(
        self,
        function: Callable[..., Any],
        owners: tuple[nn.Module, ...],
        settings: Settings,
        outer: PackHooks | None,
    ) -> Frame:
        """Return the frame that runs one call: recorded if rules decide on ops, or if the group is careful."""
        group, table, where = self.group, self.group.table, self.path or self.group.name
        group.warns = settings.engine == REPLAY
        if keeps_fp8_state(owners):
            group.give_up(REASON, where)
            # Python runs again, to its end, where the modules put scales back.
            settings = replace(settings, engine=RERUN, use_reentrant=False, early_stop=False)
            function = Fp8Function(function, where)
        is_asked = table.decides_on_ops or table.saves_everything or settings.engine == REPLAY
        if not is_asked and group.careful is False and settings.verify != ALWAYS:
            return Frame(function, owners, settings, where, group)
        # Hooks around the region must be passed the same tensors if they run it again.
        is_alone = outer is None or settings.engine == REPLAY
        replays = (is_asked or bool(group.careful)) and is_alone and settings.engine != RERUN
        trace = OpTraceRecorder() if group.lists_ops and not group.op_trace else None
        return TapedFrame(function, owners, settings, where, group, trace=trace, replays=replays)


def refuse_transforms(where: str) -> None:
    """Raise ``RegionError`` if the region is called inside ``vmap``, ``grad`` or another transform.

    Tensors of transforms have no storage, and their graph accepts no hooks. A region that runs in a recomputation is
    outside of the transforms, although backward may be batched.
    """
    if transform_is_active() and current_graph_task_id() == NO_TASK:
        found = "it is called inside a transform of torch.func (grad, vmap, jvp, ...), whose tensors cannot be kept"
        fix = "call sac.remove(model) before the transform, or torch.autograd instead of torch.func; "
        fix += "torch.func.functional_call by itself is fine"
        raise RegionError(Problem(where, found, fix=fix))


# -- Regions of functions

_groups: dict[Hashable, RegionGroup] = {}
_MOST_GROUPS = 1024
_MOST_PARTS = 32


def run_as_region(
    function: Callable[..., Any], settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``function(*args, **kwargs)`` as a region; functions of the same code and modules share a group."""
    parts = parts_of_function(function)
    group = group_of(parts, FULL_TABLE, "full")
    region = Region(group, getattr(function, "__qualname__", type(function).__name__))
    owners = tuple(part for part in parts if isinstance(part, nn.Module))
    return region.run(function, owners, settings, args, kwargs)


def group_of(parts: list[Any], table: DecisionTable, name: str) -> RegionGroup:
    """Return the group of regions without a place in a model, by the modules and the code of their functions."""
    key = tuple(part.__code__ if type(part) is types.FunctionType else weakref.ref(part) for part in parts)
    group = _groups.get((table, key))
    if group is None:
        if len(_groups) >= _MOST_GROUPS:
            _groups.clear()
        group = _groups[table, key] = RegionGroup(table, name)
        group.lists_ops = False
    return group


def parts_of_function(function: Any) -> list[Any]:
    """Return the modules and functions that a function holds directly: bound, in a partial, in its closure.

    Of an object that can be called: its method, and the modules among its attributes.
    """
    parts: list[Any] = []
    waiting = [function]
    while waiting and len(parts) < _MOST_PARTS:
        part = waiting.pop()
        if isinstance(part, nn.Module):
            parts.append(part)
        elif isinstance(part, partial):
            waiting += [part.func, *part.args, *part.keywords.values()]
        elif isinstance(part, types.MethodType):
            waiting += [part.__self__, part.__func__]
        elif isinstance(part, types.FunctionType) and not any(part is other for other in parts):
            parts.append(part)
            waiting += cells(part)
        elif isinstance(call := getattr(type(part), "__call__", None), types.FunctionType):  # noqa: B004
            waiting += [call, *(held for held in attributes_of(part).values() if isinstance(held, nn.Module))]
    return parts
