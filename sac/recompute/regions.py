"""Regions and what their calls have in common: which engine runs a call, and what earlier calls have shown."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sac.errors import SacWarning
from sac.outer_hooks import active_hooks
from sac.policy.model import PlannedRegion, Policy
from sac.recompute.op_trace import OpTraceRecorder, OpTraceRow, RegionStats, check_planned_signature, log_decisions
from sac.recompute.recorder import ReplayRecorder
from sac.recompute.replay import CAN_REPLAY, ReplayFrame, warn_not_replayable
from sac.recompute.rerun import RerunRecorder
from sac.recompute.schedule import TapeLayout
from sac.recompute.table import DecisionTable, rebuild_table
from sac.recompute.whole_modules import ModuleEvidence, ModuleRecorder, SavedModules, saved_modules
from sac.region.compiled_graphs import count_compiled
from sac.region.fingerprint import PLAIN, FunctionFingerprint, weak_identity
from sac.region.forward_ad import OnTangents, dual_level_is_on, refuse_reentrant, refuse_transforms
from sac.region.frame import Frame
from sac.region.inputs import RegionInputs
from sac.region.module_state import UnseenWriteError, has_uninitialized
from sac.region.reentrant import ReentrantFrame
from sac.region.settings import ALWAYS, FIRST, NEVER, REPLAY, RERUN, Settings, as_torch_says
from sac.region.writes import needs_recorder
from sac.tensors import plain_address
from sac.torch_private import tree_leaves

# -- A kind of region: layers that share a table, what their first calls have shown, and what was last kept

# Note [Evidence]
#
# What earlier calls have shown saves time in later ones, and never changes a result.
#
# Where rules decide on ops, and where `engine: replay` is asked for, every call runs under a recorder. In `full`, and
# where rules speak of whole modules only, a recorder is not needed for most regions, and takes longer than all else. So
# the first call on each sort of inputs runs under one. If that shows nothing that needs a dispatch mode (no op that
# chooses, no generator passed by the caller, no write to something from outside, no last op that writes to what
# autograd has saved), later calls on the same sort of inputs enter none. Inputs are of one sort if dtypes, shapes,
# needed gradients and plain values are the same, and if the function is made of the same parts as before (Note [Which
# function is it]). Evidence is per region.
#  - A call that read a tensor's value, or drew from Python's or NumPy's random numbers, may have branched on it: it
#    shows nothing about other calls.
#  - A region that has once needed a recorder has one in every later call.
#  - A call without one is right by itself, whatever it does: what it can reach is noted before and put back (Note
#    [Python state], Note [Buffers advance once]), and if it has written to something of which there is no copy, its
#    activations are kept (Note [The walk of a region]).
#
# Example. A layer that is dropped with probability 0.5 by `torch.rand(()).item()`, and has an `rrelu` at its end. The
# first call drops it, and no op runs but `rand`. That call read a value, so the next one is recorded too; and since the
# code of the layer names `rrelu`, all are.


_AnyRecorder = RerunRecorder | ReplayRecorder | ModuleRecorder
MOST_SIGNATURES = 1024  # of inputs that a region remembers; variable lengths must not make it grow for ever


class RegionGroup:
    """Regions of one sort: the table they share, the ops that the first of them ran, and what a plan says of them."""

    def __init__(self, table: DecisionTable, name: str, planned: PlannedRegion | None = None) -> None:
        self.table = table
        self.name = name
        self.planned = None if table.matches_modules else planned  # a module saved as a whole hides its ops
        self.op_trace: tuple[OpTraceRow, ...] = ()
        self.lists_ops = True  # whether its first call makes `rows`, which takes longer than ops without data do
        self.layouts: dict[Any, TapeLayout] = {}  # of each sort of inputs
        self.not_replayable = ""  # why regions of this kind are not replayed

    def __reduce__(self) -> tuple[Any, ...]:
        table = self.table
        rules = tuple(bound.index for bound in table.rules)
        return _rebuild, (table.policy, rules, table.must_save, self.name, self.planned)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionGroup:
        return self  # what it has learnt holds for copies of its regions too


class Region:
    """One checkpointed module: its kind, what its calls have shown, and what the last one kept."""

    def __init__(self, group: RegionGroup, path: str) -> None:
        self.group = group
        self.path = path
        self.stats = RegionStats()
        self.function_keys: dict[
            Hashable, object
        ] = {}  # what the function was made of in a call: the mark of such calls
        self._needs_no_mode: set[Any] = set()  # sorts of inputs that need no mode
        self._module_evidence: dict[
            Any, ModuleEvidence
        ] = {}  # sorts of inputs -> what a call has shown of modules saved as a whole
        self._verified: set[Any] = set()  # sorts of inputs of which a call has been compared with its replay
        self._needs_recorder = False  # a call has needed one, or would have: none goes without any more

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "_needs_no_mode": set(),
            "_module_evidence": {},
            "_verified": set(),
            "function_keys": {},
        }  # a copy learns anew: sorts hold weak references, which cannot be copied

    def run(
        self,
        function: Callable[..., Any],
        owners: tuple[nn.Module, ...],
        function_key: Hashable,
        settings: Settings,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call; gradients are those of ``function(*args, **kwargs)``.

        ``owners`` are the function's modules. Calls with another ``mark``, which stands for what the function is made
        of, share no evidence; those without one have none.
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
                    return function(*args, **kwargs)  # the result that is kept of a module has no tangents
                function, (args, kwargs) = on_tangents, primals
        inputs = RegionInputs(args, kwargs)
        if inputs.owners:
            owners += inputs.owners
        signature = None
        if in_dual_level:
            inputs.signature = None
        if function_key is not None and inputs.signature is not None:
            signature = (function_key, settings.freeze_buffers, settings.use_reentrant, inputs.signature)
        if self.group.table.saves_everything and signature in self._needs_no_mode and active_hooks() is None:
            self.stats.calls += 1
            return function(*args, **kwargs)
        if settings.input_storing is not None:
            inputs.store(settings.input_storing, args, kwargs, self.path)
        leaves = partial(inputs.leaves_of, args, kwargs)
        frame, recorder = self._frame(function, owners, settings, signature, inputs, leaves)
        try:
            output = frame.run(inputs, args, kwargs)
        except UnseenWriteError:
            self._always_record()
            raise
        if (recorder is None or not recorder.sees_ops) and frame.ambient.module_state.were_written:
            self._always_record()
        if frame.kept_whole is not None:
            self._always_record()
            warnings.warn(str(frame.kept_whole), SacWarning, stacklevel=2)
        if isinstance(recorder, (RerunRecorder, ReplayRecorder)):
            check_planned_signature(self.group.planned, recorder.op_trace, self.path)  # before inputs are released
        if settings.input_storing is not None:
            inputs.finish(settings.input_storing, args, kwargs, output)
        if isinstance(recorder, (RerunRecorder, ReplayRecorder)):
            self._take_evidence(recorder, frame, signature)
        elif isinstance(recorder, ModuleRecorder):
            self.stats.take(recorder.modules.evidence.figures, frame.input_bytes)
        else:
            self.stats.take(None, frame.input_bytes)
        return output

    def _frame(
        self,
        function: Callable[..., Any],
        owners: tuple[nn.Module, ...],
        settings: Settings,
        signature: Any,
        inputs: RegionInputs,
        leaves: Callable[[], list[Any]],
    ) -> tuple[Frame | ReentrantFrame, _AnyRecorder | None]:
        """Return what runs one call, and the recorder that it needs, if any; see Note [Evidence]."""
        table = self.group.table
        is_known = signature is not None and signature in self._needs_no_mode and not table.saves_everything
        records = not is_known or self._needs_recorder or table.decides_on_ops or settings.engine == REPLAY
        if records and self._is_replayed(settings):
            return self._replay_frame(function, owners, settings, signature, inputs, leaves)
        self.stats.engine = RERUN if records else ""
        recorder: _AnyRecorder | None = None
        if records or table.matches_modules:
            recorder = self._recorder(owners, settings, signature, inputs, sees_ops=records)
        group = ReentrantFrame if settings.use_reentrant else Frame
        frame = group(function, self.path, recorder, owners, settings)
        frame.is_evidence = records and not (self._needs_recorder or table.decides_on_ops)
        return frame, recorder

    def _replay_frame(
        self,
        function: Callable[..., Any],
        owners: tuple[nn.Module, ...],
        settings: Settings,
        signature: Any,
        inputs: RegionInputs,
        leaves: Callable[[], list[Any]],
    ) -> tuple[ReplayFrame, ReplayRecorder]:
        verifies = settings.verify == ALWAYS or (settings.verify == FIRST and signature not in self._verified)
        layout = self.group.layouts.get(inputs.signature)
        recorder = ReplayRecorder(
            self.group.table, self.path, owners, settings, self._new_trace(), verifies=verifies, layout=layout
        )
        recorder.begin(inputs, leaves())
        give_up = partial(self._give_up, settings.engine == REPLAY)
        self._note_verified(signature)
        self.stats.engine = REPLAY
        frame = ReplayFrame(function, self.path, recorder, owners, settings, give_up=give_up, given_up=self._given_up)
        return frame, recorder

    def _is_replayed(self, settings: Settings) -> bool:
        """Whether a call that needs a recorder is recomputed by replay."""
        table = self.group.table
        if (
            (self.group.not_replayable and active_hooks() is None)  # see Note [Replay]
            or table.matches_modules
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

    def _note_verified(self, signature: Any) -> None:
        if len(self._verified) >= MOST_SIGNATURES:
            self._verified.clear()
        self._verified.add(signature)

    def _give_up(self, asked: bool, reason: str) -> None:
        """A call could not be replayed: later ones of this kind go under the rerun engine.

        ``asked``: whether the user asked for replay, and so is told.
        """
        if not self.group.not_replayable:
            self.group.not_replayable = reason
            if asked:
                warn_not_replayable(self.path, reason)

    def _given_up(self) -> str:
        return self.group.not_replayable

    def _always_record(self) -> None:
        """A call without a recorder wrote to something: no call goes without one any more."""
        self._needs_no_mode.clear()
        self._module_evidence.clear()
        self._needs_recorder = True

    def _recorder(
        self, owners: tuple[nn.Module, ...], settings: Settings, signature: Any, inputs: RegionInputs, *, sees_ops: bool
    ) -> RerunRecorder | ModuleRecorder:
        table = self.group.table
        modules, not_recomputed = None, frozenset[int]()
        if table.matches_modules:
            evidence = self._module_evidence.get(signature)
            modules = SavedModules(table, self.path, settings, evidence)
            if evidence is None:
                modules.evidence.not_recomputed = saved_modules(owners, table)
            not_recomputed = modules.evidence.not_recomputed
            if not sees_ops:
                module_recorder = ModuleRecorder(modules, not_recomputed)
                module_recorder.begin(inputs)
                return module_recorder
        op_trace = self._new_trace()
        recorder = RerunRecorder(
            table,
            self.path,
            owners,
            op_trace,
            freeze_buffers=settings.freeze_buffers,
            early_stop=settings.early_stop,
            modules=modules,
            not_recomputed=not_recomputed,
            verifies=settings.verify != NEVER,
        )
        recorder.begin(inputs)
        return recorder

    def _take_evidence(
        self, recorder: RerunRecorder | ReplayRecorder, frame: Frame | ReentrantFrame, signature: Any
    ) -> None:
        if recorder.op_trace is not None:
            self.group.op_trace = tuple(recorder.op_trace.rows)
            log_decisions(self.path, self.group.op_trace)
        everything = self.group.table.saves_everything
        if not everything and (
            recorder.needs_mode or frame.ambient.module_state.were_written or needs_recorder(frame.owners)
        ):
            self._needs_recorder = True
        is_proof = not (self._needs_recorder or recorder.reads_values or frame.moved_host_rng)
        if signature is not None and (everything or is_proof):
            if len(self._needs_no_mode) >= MOST_SIGNATURES:
                self._needs_no_mode.clear()
            self._needs_no_mode.add(signature)
        modules = recorder.state.modules if isinstance(recorder, RerunRecorder) else None
        if signature is not None and modules is not None:
            if len(self._module_evidence) >= MOST_SIGNATURES:
                self._module_evidence.clear()
            modules.evidence.figures = recorder.figures
            self._module_evidence[signature] = modules.evidence
        if isinstance(recorder, ReplayRecorder) and signature is not None and recorder.layout is not None:
            layouts = self.group.layouts
            if len(layouts) >= MOST_SIGNATURES:
                layouts.clear()
            layouts[signature[-1]] = recorder.layout
        self.stats.take(recorder.figures, frame.input_bytes)


def _rebuild(
    policy: Policy, indices: tuple[int, ...], must_save: bool, name: str, planned: PlannedRegion | None
) -> RegionGroup:
    return RegionGroup(rebuild_table(policy, indices, must_save), name, planned)


# -- Regions of functions and modules: what earlier calls have shown of each, and which of them a call is one of

# Note [What a function changes itself]
#
# Two calls are of one function if all that the function holds is the same (Note [Which function is it]). A function
# that counts its calls would be another one each time. But what a call changes itself is not the same in recomputation
# either, so it cannot be what decides which ops run; wherever a first call is seen to change something, that is no part
# of the function's identity from then on.

FULL = Policy(name="full", source="full")
FULL_TABLE = DecisionTable(FULL, ())
_MOST_REGIONS = 1024
_OF_ONE_FUNCTION = ()  # the mark of all calls of a region that serves one function only

_regions: dict[Hashable, Region] = {}
_groups: dict[Hashable, RegionGroup] = {}
_changing_parts: dict[Hashable, dict[Hashable, frozenset[int]]] = {}  # which parts a function changes; see `_skeleton`


def run_as_region(
    function: Callable[..., Any], settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``function(*args, **kwargs)`` as a region, by what earlier calls of the same function have shown."""
    fingerprint = _fingerprint_of(function)
    owners = tuple(fingerprint.owners)
    key = _key(fingerprint) if fingerprint.is_known else None
    region = _regions.get(key) if key is not None else None
    if region is not None:
        return region.run(function, owners, _OF_ONE_FUNCTION, settings, args, kwargs)
    region = Region(_group_of(function), _name_of(function))
    output = region.run(function, owners, _OF_ONE_FUNCTION, settings, args, kwargs)
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

    The modules may have been changed since its last call: by an attribute, a hook, a part put into training.
    """
    is_first = not region.stats.calls
    output = _run_modules(region, function, modules, settings, args, kwargs)
    if is_first:
        region.stats.compiled_graphs = count_compiled(output, (args, kwargs))
    return output


def _run_modules(
    region: Region,
    function: Callable[..., Any],
    modules: nn.Module | tuple[nn.Module, ...],
    settings: Settings,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    fingerprint = _fingerprint_of(modules)
    owners = tuple(fingerprint.owners)
    if not fingerprint.is_known:
        return region.run(function, owners, None, settings, args, kwargs)
    key = _key(fingerprint)
    function_key = region.function_keys.get(key)
    if function_key is not None:
        return region.run(function, owners, function_key, settings, args, kwargs)
    function_key = _put(region.function_keys, key, object())
    output = region.run(function, owners, function_key, settings, args, kwargs)
    after = _fingerprint_of(modules)
    _note_changes(fingerprint, after)
    _put(region.function_keys, _key(after), function_key)
    return output


def _fingerprint_of(function: Any) -> FunctionFingerprint:
    fingerprint = FunctionFingerprint()
    fingerprint.look_at(function)
    return fingerprint


def _key(fingerprint: FunctionFingerprint) -> Hashable:
    parts = fingerprint.parts
    known = _changing_parts.get(parts[0])  # as a rule None: most functions change nothing
    for place in known.get(_stable_parts(parts), ()) if known else ():
        parts = [*parts[:place], None, *parts[place + 1 :]]
    return tuple(parts)


def _stable_parts(parts: list[Any]) -> Hashable:
    """Return what stays the same of a function that changes plain values: what it holds beside them."""
    return len(parts), tuple(part for part in parts if type(part) not in PLAIN)


def _note_changes(before: FunctionFingerprint, after: FunctionFingerprint) -> None:
    stable = _stable_parts(after.parts)
    if after.is_known and stable == _stable_parts(before.parts):
        pairs = enumerate(zip(before.parts, after.parts, strict=True))
        changed = {place for place, (one, other) in pairs if one != other}
        if changed:
            known = _changing_parts.get(after.parts[0]) or _put(_changing_parts, after.parts[0], {})
            _put(known, stable, known.get(stable, frozenset()) | changed)


def _group_of(function: Any) -> RegionGroup:
    """Return one kind for all functions of the same code, and for all modules of a class."""
    while type(function) in (partial, types.MethodType):
        function = function.func if type(function) is partial else function.__func__
    key = weak_identity(function.__code__ if type(function) is types.FunctionType else type(function))
    return _groups.get(key) or _put(_groups, key, RegionGroup(FULL_TABLE, "full"))


def _name_of(function: Any) -> str:
    """Return how messages name the region."""
    is_function = type(function) in (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    name: str = function.__qualname__ if is_function else type(function).__name__
    return name


def _put(known: dict[Hashable, Any], key: Hashable, value: Any) -> Any:
    if len(known) >= _MOST_REGIONS:
        known.clear()
    known[key] = value
    return value


# -- What a region's forward leaves behind, so that its outputs can be computed again


@dataclass
class OutputAnchor:
    """What one forward leaves for discarding: its outputs with memory of their own, and the node that saved them.

    A plain dataclass, and empty when the region begins: calls of one function are of one sort (Note [Evidence]).
    """

    chosen: tuple[int, ...] | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    node: torch.Tensor | None = None

    def take(self, output: Any, inputs: Any) -> None:
        """Save the tensors of ``output`` for backward, in recomputation the same ones again."""
        leaves = tree_leaves(output)
        is_first = self.chosen is None
        if self.chosen is None:
            taken = {None, *map(plain_address, tree_leaves(inputs))}
            self.chosen = tuple(place for place, leaf in enumerate(leaves) if plain_address(leaf) not in taken)
        if not self.chosen or not torch.is_grad_enabled():
            return
        tensors = tuple(leaves[place] for place in self.chosen if isinstance(leaves[place], torch.Tensor))
        anchor = torch.empty(0, requires_grad=True)
        node = _Anchor.apply(anchor, *(tensor.detach() for tensor in tensors))  # type: ignore[no-untyped-call]
        if is_first:
            self.tensors, self.node = tensors, node


def anchored(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does as ``function``, and lets the ``note`` that it is given take what it returns."""
    noting = partial(_call, function)
    noting.__qualname__ = getattr(function, "__qualname__", type(function).__name__)  # type: ignore[attr-defined]
    return noting  # not a closure: calls of one function are told to be so by its parts


def _call(function: Callable[..., Any], *args: Any, anchor: OutputAnchor) -> Any:
    output = function(*args)
    anchor.take(output, args)
    return output


class _Anchor(torch.autograd.Function):
    """Saves tensors, and is part of no other graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on this node")
