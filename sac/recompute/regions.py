"""Regions and region groups: which engine runs a call."""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from sac.errors import SacWarning
from sac.native.load import library
from sac.outer_hooks import active_hooks
from sac.policy.model import PlannedRegion, Policy
from sac.recompute.evidence import GroupEvidence, RegionEvidence, remember
from sac.recompute.native_recorder import NativeReplayFrame, NativeReplayRecorder
from sac.recompute.native_rerun import NativeRerunRecorder
from sac.recompute.native_watch import NativeWatch, can_hold
from sac.recompute.op_trace import OpTraceRecorder, OpTraceRow, RegionStats, check_planned_signature, log_decisions
from sac.recompute.recorder import ReplayRecorder
from sac.recompute.replay import CAN_REPLAY, ReplayFrame, warn_not_replayable
from sac.recompute.rerun import RerunRecorder
from sac.recompute.table import DecisionTable, rebuild_table
from sac.recompute.whole_modules import ModuleRecorder, SavedModules, saved_modules
from sac.region.compiled_graphs import count_compiled
from sac.region.fingerprint import PLAIN, FunctionFingerprint, weak_identity
from sac.region.forward_ad import OnTangents, dual_level_is_on, refuse_reentrant, refuse_transforms
from sac.region.fp8_state import REASON as FP8_REASON
from sac.region.fp8_state import for_fp8, keeps_fp8_state
from sac.region.frame import Frame
from sac.region.inputs import RegionInputs
from sac.region.module_state import UnseenWriteError, has_uninitialized
from sac.region.native_frame import NativeFrame, for_library
from sac.region.reentrant import ReentrantFrame
from sac.region.settings import ALWAYS, FIRST, NEVER, REPLAY, RERUN, Settings, as_torch_says
from sac.region.tables import ModuleTables
from sac.region.writes import chooses, writes_unseen

# -- Region groups and regions

_AnyRecorder = RerunRecorder | ReplayRecorder | ModuleRecorder | NativeWatch


class RegionGroup:
    """Regions that share a decision table, the op trace of the first call, and their part of a planned policy."""

    def __init__(self, table: DecisionTable, name: str, planned: PlannedRegion | None = None) -> None:
        self.table = table
        self.name = name
        self.planned = None if table.matches_modules else planned  # a module saved as a whole hides its ops
        self.op_trace: tuple[OpTraceRow, ...] = ()
        self.lists_ops = True  # whether the first call fills `op_trace`, which takes longer than running data-free ops
        self.evidence = GroupEvidence()

    def __reduce__(self) -> tuple[Any, ...]:
        table = self.table
        rules = tuple(bound.index for bound in table.rules)
        return _rebuild, (table.policy, rules, table.must_save, self.name, self.planned)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionGroup:
        return self  # what the group has learnt is also true of copies of its regions


class _Calls(threading.local):
    count = 0


_CALLS = _Calls()  # how many region calls this thread has begun


class PendingCall(NamedTuple):
    """A call of a region for which there is no frame yet.

    ``signature``: of the function and its inputs, None if no evidence is kept for the call.
    """

    function: Callable[..., Any]
    owners: tuple[nn.Module, ...]
    settings: Settings
    signature: Any
    inputs: RegionInputs
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Region:
    """One checkpointed module: its region group, the evidence from its calls, and what the last call kept."""

    def __init__(self, group: RegionGroup, path: str) -> None:
        self.group = group
        self.path = path
        self.stats = RegionStats()
        self.evidence = RegionEvidence()

    def run(
        self,
        function: Callable[..., Any],
        owners: tuple[nn.Module, ...],
        found: ModuleTables | None,
        function_key: Hashable,
        settings: Settings,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call; gradients are those of ``function(*args, **kwargs)``.

        ``owners``: the modules of the function, and ``found`` their tables, if these have been recorded just now.
        ``function_key`` stands for the function's parts. Calls share evidence only if their keys are equal; a call
        without a key has none.
        """
        refuse_transforms(self.path)
        settings = as_torch_says(settings)
        if not self.stats.calls and has_uninitialized(owners):
            return function(*args, **kwargs)  # see Note [Lazy modules]
        in_dual_level = dual_level_is_on()
        if in_dual_level:  # see Note [Tangents]
            on_tangents = OnTangents(function, owners, self.path)
            primals = on_tangents.taken_from(args, kwargs)
            if on_tangents.is_needed:
                if settings.use_reentrant:
                    refuse_reentrant(self.path)
                if self.group.table.matches_modules:
                    return function(*args, **kwargs)  # the kept result of a module has no tangents
                function, (args, kwargs) = on_tangents, primals
        inputs = RegionInputs(args, kwargs)
        if inputs.owners:
            owners += inputs.owners
            found = None
        if keeps_fp8_state(owners):
            self._give_up(settings.engine == REPLAY, FP8_REASON)
            settings = for_fp8(settings, owners)
        signature = None
        if in_dual_level:
            inputs.signature = None
        if function_key is not None and inputs.signature is not None:
            signature = (function_key, settings.freeze_buffers, settings.use_reentrant, inputs.signature)
        table = self.group.table
        is_plain = table.saves_everything and not table.offloads  # plain autograd does what the policy says
        if is_plain and signature in self.evidence.needs_no_mode and active_hooks() is None:
            self.stats.calls += 1
            found = None
            return function(*args, **kwargs)
        if settings.input_storing is not None:
            inputs.store(settings.input_storing, args, kwargs, self.path)
        if table.offloads:
            inputs.follow(args, kwargs)
        frame, recorder = self._frame(PendingCall(function, owners, settings, signature, inputs, args, kwargs))
        _CALLS.count = number = _CALLS.count + 1
        frame.found, found = found, None
        try:
            output = frame.run(inputs, args, kwargs)
        except UnseenWriteError:
            self.evidence.require_recorder()
            raise
        except torch.OutOfMemoryError as error:
            settings.add_note(error)
            raise
        if (recorder is None or not recorder.sees_ops) and frame.ambient.module_state.were_written:
            self.evidence.require_recorder()
        if frame.kept_whole is not None:
            self.evidence.require_recorder()
            warnings.warn(str(frame.kept_whole), SacWarning, stacklevel=2)
        if self.group.planned is not None and isinstance(recorder, (RerunRecorder, ReplayRecorder)):
            check_planned_signature(self.group.planned, recorder.op_trace, self.path)
        if settings.input_storing is not None or table.offloads:
            inputs.finish(output)
        self.stats.offloads = frame.offloads
        self.stats.stalls = inputs.call.stalls if inputs.call is not None else None
        if isinstance(recorder, (RerunRecorder, ReplayRecorder)):
            self._take_evidence(recorder, frame, signature, is_alone=_CALLS.count == number)
        elif isinstance(recorder, ModuleRecorder):
            self.stats.take(recorder.modules.evidence.figures, frame.input_bytes)
        else:
            self.stats.take(recorder.figures if recorder is not None else None, frame.input_bytes)
        return output

    def _frame(self, call: PendingCall) -> tuple[Frame | ReentrantFrame, _AnyRecorder | None]:
        """Return the frame that runs one call, and its recorder if it needs one; see Note [Evidence]."""
        table, settings, signature = self.group.table, call.settings, call.signature
        native = library()
        without_watch = settings.use_reentrant or table.saves_everything or table.matches_modules
        is_watched = native is not None and not without_watch
        is_known = (
            signature is not None
            and not table.saves_everything
            and (signature in self.evidence.needs_no_mode or (is_watched and signature in self.evidence.may_branch))
        )
        # Inside of hooks, an outer checkpoint expects the same tensors in its recomputation as in its forward.
        holds = (
            self.evidence.chooses
            and is_watched
            and not self.stats.compiled_graphs
            and active_hooks() is None
            and can_hold(native)
        )
        records = (
            not is_known
            or self.evidence.needs_recorder
            or (self.evidence.chooses and not holds)
            or table.decides_on_ops
            or settings.engine == REPLAY
        )
        if records and self._is_replayed(settings):
            return self._replay_frame(call)
        self.stats.engine = RERUN if records or self.evidence.chooses else ""
        recorder: _AnyRecorder | None = None
        if records or table.matches_modules:
            recorder = self._recorder(call, sees_ops=records)
        if recorder is None and is_watched:
            recorder = NativeWatch(
                native,
                table,
                self.path,
                call.inputs,
                watches_writes=settings.freeze_buffers,
                holds=holds,
                compares=settings.verify != NEVER,
            )
        frame_type: Any = Frame if native is None else for_library(NativeFrame, native)
        frame: Frame | ReentrantFrame = (ReentrantFrame if settings.use_reentrant else frame_type)(
            call.function, self.path, recorder, call.owners, settings
        )
        frame.is_evidence = records and not (self.evidence.needs_recorder or table.decides_on_ops)
        return frame, recorder

    def _replay_frame(self, call: PendingCall) -> tuple[ReplayFrame, ReplayRecorder]:
        settings, signature = call.settings, call.signature
        verifies = settings.verify == ALWAYS or (settings.verify == FIRST and signature not in self.evidence.verified)
        layout = self.group.evidence.layouts.get(call.inputs.signature)
        op_trace = self._new_trace()
        native = library() if op_trace is None else None  # the library shows no op to Python
        recorder: ReplayRecorder = (ReplayRecorder if native is None else partial(NativeReplayRecorder, native))(
            self.group.table,
            self.path,
            call.owners,
            settings,
            op_trace,
            verifies=verifies,
            layout=layout,
            evidence=self.group.evidence,
        )
        if self.group.table.matches_modules:
            known = self.evidence.modules.get((REPLAY, signature))
            recorder.modules = SavedModules(
                self.group.table, self.path, settings, known, is_watched=True, is_taped=True
            )
        recorder.begin(call.inputs, call.inputs.leaves_of(call.args, call.kwargs))
        give_up = partial(self._give_up, settings.engine == REPLAY)
        if signature is not None and settings.verify == FIRST:
            remember(self.evidence.verified, signature)
        self.stats.engine = REPLAY
        frame_type: Any = ReplayFrame if native is None else for_library(NativeReplayFrame, native)
        frame: ReplayFrame = frame_type(
            call.function, self.path, recorder, call.owners, settings, give_up=give_up, given_up=self._given_up
        )
        return frame, recorder

    def _is_replayed(self, settings: Settings) -> bool:
        """Return whether a call that needs a recorder is recomputed by replay."""
        table = self.group.table
        if (
            (self.group.evidence.not_replayable and active_hooks() is None)  # see Note [Replay]
            or (table.matches_modules and not table.decides_on_ops)
            or settings.engine == RERUN
            or settings.use_reentrant
            or not CAN_REPLAY
        ):
            return False
        if settings.engine == REPLAY:
            return True
        return bool(table.rules) and not table.saves_everything and active_hooks() is None  # see Note [Auto]

    def _new_trace(self) -> OpTraceRecorder | None:
        return OpTraceRecorder() if self.group.lists_ops and not self.group.op_trace else None

    def _give_up(self, asked: bool, reason: str) -> None:
        """Use the rerun engine for later calls of this region group, since a call could not be replayed.

        ``asked``: whether the user set `engine: replay`; then a warning is given.
        """
        if not self.group.evidence.not_replayable:
            self.group.evidence.not_replayable = reason
            if asked:
                warn_not_replayable(self.path, reason)

    def _given_up(self) -> str:
        return self.group.evidence.not_replayable

    def _recorder(self, call: PendingCall, *, sees_ops: bool) -> RerunRecorder | ModuleRecorder:
        table, settings = self.group.table, call.settings
        modules, not_recomputed = None, frozenset[int]()
        if table.matches_modules:
            evidence = self.evidence.modules.get(call.signature)
            modules = SavedModules(table, self.path, settings, evidence, is_watched=sees_ops)
            if evidence is None:
                modules.evidence.not_recomputed = saved_modules(call.owners, table)
            not_recomputed = modules.evidence.not_recomputed
            if not sees_ops:
                module_recorder = ModuleRecorder(modules, not_recomputed)
                module_recorder.begin(call.inputs)
                return module_recorder
        op_trace = self._new_trace()
        native = library()
        recorder = (RerunRecorder if native is None else partial(NativeRerunRecorder, native))(
            table,
            self.path,
            call.owners,
            op_trace,
            freeze_buffers=settings.freeze_buffers,
            early_stop=settings.early_stop,
            modules=modules,
            not_recomputed=not_recomputed,
            verifies=settings.verify != NEVER,
        )
        recorder.begin(call.inputs)
        return recorder

    def _take_evidence(
        self, recorder: RerunRecorder | ReplayRecorder, frame: Frame | ReentrantFrame, signature: Any, *, is_alone: bool
    ) -> None:
        """Learn from a call. ``is_alone``: no other region ran inside."""
        if recorder.op_trace is not None:
            self.group.op_trace = tuple(recorder.op_trace.rows)
            log_decisions(self.path, self.group.op_trace)
        everything = self.group.table.saves_everything
        evidence = self.evidence
        is_known = signature is not None and signature in evidence.needs_no_mode  # of the same modules and options
        if not (everything or evidence.needs_recorder):
            evidence.needs_recorder = bool(
                (recorder.needs_mode and not (recorder.only_chooses and is_alone))
                or frame.ambient.module_state.were_written
                or (not is_known and writes_unseen(frame.owners))
            )
            evidence.chooses |= recorder.needs_mode or (not is_known and any(map(chooses, frame.owners)))
        if signature is not None:
            if everything or not evidence.needs_recorder:
                may_branch = not everything and (recorder.reads_values or frame.moved_host_rng)
                if not may_branch:
                    remember(evidence.needs_no_mode, signature)
                elif not _may_communicate(self.group.table, frame.owners):
                    remember(evidence.may_branch, signature)
            if isinstance(recorder, ReplayRecorder):
                layouts, layout = self.group.evidence.layouts, recorder.layout
                if layout is not None and layouts.get(signature[-1]) is not layout:
                    remember(layouts, signature[-1], layout)
                if recorder.modules is not None:
                    remember(evidence.modules, (REPLAY, signature), recorder.modules.evidence)
            elif (modules := recorder.state.modules) is not None:
                modules.evidence.figures = recorder.figures
                remember(evidence.modules, signature, modules.evidence)
        self.stats.take(recorder.figures, frame.input_bytes)
        self.stats.native_ops = recorder.native_ops


def _may_communicate(table: DecisionTable, owners: tuple[nn.Module, ...]) -> bool:
    """Return whether ops of a region may be collectives, or consist of some, as those on a DTensor do.

    If a rank keeps the activations of a call, as a watch may ask for, the others must not wait for it in backward.
    """
    if any(type(one) is not nn.Parameter for owner in owners for one in owner._parameters.values() if one is not None):
        return True
    return any(site.is_collective for sites in table.sites_at.values() for site in sites.values())


def _rebuild(
    policy: Policy, indices: tuple[int, ...], must_save: bool, name: str, planned: PlannedRegion | None
) -> RegionGroup:
    return RegionGroup(rebuild_table(policy, indices, must_save), name, planned)


# -- The region of a function or module call

# Note [What a function changes itself]
#
# Two calls are calls of the same function if all parts that the function holds are equal (Note [Which function is it]).
# By that rule, a function that counts its calls would be a new function in every call. But a part that the call itself
# changes also differs in recomputation, so it cannot decide which ops run. If a first call changes a part, that part is
# left out of the function's fingerprint from then on.

FULL = Policy(name="full", source="full")
FULL_TABLE = DecisionTable(FULL, ())
_MOST_REGIONS = 1024
_OF_ONE_FUNCTION = ()  # function key of all calls of a region that serves only one function

_regions: dict[Hashable, Region] = {}
_groups: dict[Hashable, RegionGroup] = {}
_changing_parts: dict[Hashable, dict[Hashable, frozenset[int]]] = {}  # parts that a function changes: `_stable_parts`


def run_as_region(
    function: Callable[..., Any], settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``function(*args, **kwargs)`` as a region, using the evidence from earlier calls of the same function."""
    fingerprint = _fingerprint_of(function)
    key = _key(fingerprint) if fingerprint.is_known else None
    region = _regions.get(key) if key is not None else None
    if region is not None:
        return region.run(function, *fingerprint.taken(), _OF_ONE_FUNCTION, settings, args, kwargs)
    region = Region(_group_of(function), _name_of(function))
    output = region.run(function, *fingerprint.taken(), _OF_ONE_FUNCTION, settings, args, kwargs)
    if key is not None:
        _note_changes(fingerprint, _fingerprint_of(function))
        _put(_regions, _key(fingerprint), region)
    return output


def run_modules(
    region: Region,
    function: Callable[..., Any],
    modules: nn.Module | tuple[nn.Module, ...],
    settings: Settings,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run ``function(*args, **kwargs)``, which calls ``modules``, as a call of ``region``.

    The modules may have changed since the region's last call: an attribute, a hook, a submodule set to training mode.
    """
    surveys = region.evidence.surveys
    again = surveys.taken(modules)
    if again is not None and again.key is not None:  # the usual case
        return region.run(function, again.owners, again.tables, again.key, settings, args, kwargs)
    is_first, keys = not region.stats.calls, region.evidence.function_keys
    fingerprint = _fingerprint_of(modules)
    key = _key(fingerprint) if fingerprint.is_known else None
    known = keys.get(key) if key is not None else None
    function_key = known if known is not None or key is None else _put(keys, key, object())
    owners, found = fingerprint.taken()
    if known is not None and found is not None and surveys.is_wanted(again) and isinstance(modules, nn.Module):
        found = surveys.wanted_in(found, modules, known)
    elif again is not None:
        found = again.tables
    output = region.run(function, owners, found, function_key, settings, args, kwargs)
    if known is None and key is not None:
        after = _fingerprint_of(modules)
        _note_changes(fingerprint, after)
        _put(keys, _key(after), function_key)
    if is_first:
        region.stats.compiled_graphs = count_compiled(output, (args, kwargs))
    return output


def _fingerprint_of(function: Any) -> FunctionFingerprint:
    fingerprint = FunctionFingerprint()
    fingerprint.look_at(function)
    return fingerprint


def _key(fingerprint: FunctionFingerprint) -> Hashable:
    parts = fingerprint.parts
    known = _changing_parts.get(parts[0])  # usually None: most functions change nothing
    for index in known.get(_stable_parts(parts), ()) if known else ():
        parts = [*parts[:index], None, *parts[index + 1 :]]
    return tuple(parts)


def _stable_parts(parts: list[Any]) -> Hashable:
    """Return what stays the same in a function that changes plain values: the number of its parts, and all others."""
    return len(parts), tuple(part for part in parts if type(part) not in PLAIN)


def _note_changes(before: FunctionFingerprint, after: FunctionFingerprint) -> None:
    stable = _stable_parts(after.parts)
    if after.is_known and stable == _stable_parts(before.parts):
        pairs = enumerate(zip(before.parts, after.parts, strict=True))
        changed = {index for index, (one, other) in pairs if one != other}
        if changed:
            known = _changing_parts.get(after.parts[0]) or _put(_changing_parts, after.parts[0], {})
            _put(known, stable, known.get(stable, frozenset()) | changed)


def _group_of(function: Any) -> RegionGroup:
    """Return the region group of a function or module: one per code object, one per module class."""
    while type(function) in (partial, types.MethodType):
        function = function.func if type(function) is partial else function.__func__
    key = weak_identity(function.__code__ if type(function) is types.FunctionType else type(function))
    return _groups.get(key) or _put(_groups, key, RegionGroup(FULL_TABLE, "full"))


def _name_of(function: Any) -> str:
    """Return the region's name in messages."""
    is_function = type(function) in (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    name: str = function.__qualname__ if is_function else type(function).__name__
    return name


def _put(known: dict[Hashable, Any], key: Hashable, value: Any) -> Any:
    if len(known) >= _MOST_REGIONS:
        known.clear()
    known[key] = value
    return value
