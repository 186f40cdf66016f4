"""Regions and region groups: which frame runs a call."""

from __future__ import annotations

import threading
import types
import warnings
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sac.engine.frame import Frame, TapedFrame
from sac.engine.functions import install
from sac.engine.reentrant import run_reentrant
from sac.errors import Problem, SacWarning
from sac.outer_hooks import active_hooks
from sac.policy.model import PlannedRegion, Policy
from sac.recompute.op_trace import OpTraceRecorder, OpTraceRow, RegionStats, check_planned_signature, log_decisions
from sac.recompute.table import DecisionTable, rebuild_table
from sac.region.settings import REPLAY, RERUN, Settings, as_torch_says

install()
FULL = Policy(name="full", source="full")
FULL_TABLE = DecisionTable(FULL, ())


class RegionGroup:
    """Regions that share a decision table, and what the first call of one has shown.

    ``not_replayable``: why a call could not be replayed; later ones use rerun. ``careful``: whether forwards need a
    mode, since they choose, write to tensors from outside or draw from other generators than the default ones (None:
    not known yet). ``verified``: a replay has given the forward's values. ``schedule``: that of the last call.
    """

    def __init__(self, table: DecisionTable, name: str, planned: PlannedRegion | None = None) -> None:
        self.table, self.name = table, name
        self.planned = None if table.matches_modules else planned
        self.op_trace: tuple[OpTraceRow, ...] = ()
        self.calls = None
        self.lists_ops = True  # whether the first call fills `op_trace`
        self.not_replayable = ""
        self.careful: bool | None = None
        self.verified = False
        self.schedule: Any = None
        self.warns = False
        self.functions: dict[Any, Any] = {}  # (path, autograd function) -> facts

    def give_up(self, reason: str, where: str) -> None:
        """Use rerun from now on."""
        if not self.not_replayable:
            self.not_replayable = reason
            if self.warns:
                fix = "none is needed, the region runs again as Python; `engine: rerun` asks for that from the start"
                warnings.warn(str(Problem(where, f"replay cannot be used here: {reason}", fix=fix)), SacWarning, stacklevel=2)

    def __reduce__(self) -> tuple[Any, ...]:
        table = self.table
        rules = tuple(bound.index for bound in table.rules)
        return _rebuild, (table.policy, rules, table.must_save, self.name, self.planned)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionGroup:
        return self  # what the group has learnt is also true of copies of its regions


def _rebuild(policy: Policy, indices: tuple[int, ...], must_save: bool, name: str, planned: Any) -> RegionGroup:
    return RegionGroup(rebuild_table(policy, indices, must_save), name, planned)


class Region:
    """One checkpointed module or function: its region group, and what the last call kept."""

    def __init__(self, group: RegionGroup, path: str) -> None:
        self.group, self.path = group, path
        self.stats = RegionStats()

    def run(
        self, function: Callable[..., Any], owners: tuple[nn.Module, ...], settings: Settings, args: Any, kwargs: Any
    ) -> Any:
        """Run one call; gradients are those of ``function(*args, **kwargs)``. ``owners``: modules of the function."""
        group, table, stats = self.group, self.group.table, self.stats
        settings = as_torch_says(settings)
        where = self.path or group.name
        owners += tuple(one for one in args if isinstance(one, nn.Module))
        if not stats.calls and any(is_lazy(one) for owner in owners for one in owner.parameters()):
            return function(*args, **kwargs)  # this call makes the parameters
        if settings.use_reentrant:
            output, size = run_reentrant(function, owners, settings, where, args, kwargs)
            stats.take(None, size)
            return output
        if table.saves_everything and active_hooks() is None and (group.op_trace or not group.lists_ops):
            stats.calls += 1
            return function(*args, **kwargs)
        # Hooks around the region must be passed the same tensors if they run it again.
        replays = settings.engine != RERUN and settings.input_storing is None and active_hooks() is None and (table.decides_on_ops or settings.engine == REPLAY)
        frame: Frame
        trace = None
        if table.decides_on_ops or table.saves_everything or settings.engine == REPLAY or group.careful is not False:
            trace = OpTraceRecorder() if group.lists_ops and not group.op_trace else None
            group.warns = settings.engine == REPLAY
            frame = TapedFrame(function, owners, settings, where, group=group, trace=trace, replays=replays)
        else:
            frame = Frame(function, owners, settings, where)
        output = frame.run(args, kwargs, is_careful=bool(group.careful))
        stats.engine = ""
        figures = None
        if isinstance(frame, TapedFrame):
            stats.engine = REPLAY if replays and not group.not_replayable else RERUN
            figures = frame.figures
        stats.take(figures, frame.inputs.bytes)
        if trace is not None:
            check_planned_signature(group.planned, trace, self.path)
            group.op_trace = tuple(trace.rows)
            log_decisions(self.path, group.op_trace)
        return output


def run_modules(
    region: Region, function: Callable[..., Any], modules: Any, settings: Settings, args: Any, kwargs: Any
) -> Any:
    """Run ``function(*args, **kwargs)``, which calls ``modules``, as a call of ``region``."""
    owners = modules if isinstance(modules, tuple) else (modules,)
    return region.run(function, owners, settings, args, kwargs)


# -- Regions of functions

_groups: dict[Hashable, RegionGroup] = {}
_MOST = 1024


class _Calls(threading.local):
    count = 0


def run_as_region(function: Callable[..., Any], settings: Settings, args: Any, kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)`` as a region; functions of the same code and modules share a group."""
    parts = parts_of_function(function)
    key = tuple(one.__code__ if type(one) is types.FunctionType else weakref.ref(one) for one in parts)
    group = _groups.get(key)
    if group is None:
        if len(_groups) >= _MOST:
            _groups.clear()
        group = _groups[key] = RegionGroup(FULL_TABLE, "full")
        group.lists_ops = False
    region = Region(group, getattr(function, "__qualname__", type(function).__name__))
    owners = tuple(one for one in parts if isinstance(one, nn.Module))
    return region.run(function, owners, settings, args, kwargs)


def parts_of_function(function: Any) -> list[Any]:
    """Return the modules and functions that a function holds directly: bound, in a partial, in its closure."""
    found, waiting = [], [function]
    while waiting and len(found) < 32:
        one = waiting.pop()
        if isinstance(one, nn.Module):
            found.append(one)
        elif isinstance(one, partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.MethodType):
            waiting += [one.__self__, one.__func__]
        elif isinstance(one, types.FunctionType) and not any(one is other for other in found):
            found.append(one)
            for cell in one.__closure__ or ():
                try:
                    waiting.append(cell.cell_contents)
                except ValueError:
                    continue
    return found


def run_traced(function: Callable[..., Any], table: DecisionTable, args: Any, kwargs: Any) -> Any:
    """Run a region that ``torch.compile`` traces. Here `context_fn` attaches; the prototype checkpoints it in full."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


@torch.compiler.disable
def run_in_eager(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a region as it is inside of a compiled model."""
    return function(*args, **kwargs)
