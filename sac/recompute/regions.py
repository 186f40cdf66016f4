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
from sac.outer_hooks import surrounding_hooks
from sac.policy.model import PlannedRegion, Policy
from sac.recompute.announce import announce
from sac.recompute.op_rows import OpRow, RegionStats, Rows, check_planned
from sac.recompute.recorder import ReplayRecorder
from sac.recompute.replay import CAN_REPLAY, ReplayFrame, warn_of_trouble
from sac.recompute.rerun import RerunRecorder
from sac.recompute.schedule import Program
from sac.recompute.table import Table, rebuild_table
from sac.recompute.whole_modules import Learnt, ModuleRecorder, SavedModules, saved_modules
from sac.region.compiled_graphs import count_compiled
from sac.region.fingerprint import PLAIN, Identity, same
from sac.region.forward_ad import OnTangents, dual_level_is_on, refuse_reentrant, refuse_transforms
from sac.region.frame import Frame
from sac.region.inputs import KeptInputs
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
SORTS = 1024  # of inputs that a region remembers; variable lengths must not make it grow for ever


class Kind:
    """Regions of one sort: the table they share, the ops that the first of them ran, and what a plan says of them."""

    def __init__(self, table: Table, name: str, planned: PlannedRegion | None = None) -> None:
        self.table = table
        self.name = name
        self.planned = None if table.speaks_of_modules else planned  # a module saved as a whole hides its ops
        self.rows: tuple[OpRow, ...] = ()
        self.lists_ops = True  # whether its first call makes `rows`, which takes longer than ops without data do
        self.programs: dict[Any, Program] = {}  # of each sort of inputs
        self.no_replay = ""  # why regions of this kind are not replayed

    def __reduce__(self) -> tuple[Any, ...]:
        table = self.table
        rules = tuple(bound.index for bound in table.rules)
        return _rebuild, (table.policy, rules, table.must_save, self.name, self.planned)

    def __deepcopy__(self, memo: dict[int, Any]) -> Kind:
        return self  # what it has learnt holds for copies of its regions too


class Region:
    """One checkpointed module: its kind, what its calls have shown, and what the last one kept."""

    def __init__(self, kind: Kind, path: str) -> None:
        self.kind = kind
        self.path = path
        self.stats = RegionStats()
        self.marks: dict[Hashable, object] = {}  # what the function was made of in a call: the mark of such calls
        self._free: set[Any] = set()  # sorts of inputs that need no mode
        self._learnt: dict[Any, Learnt] = {}  # sorts of inputs -> what a call has shown of modules saved as a whole
        self._verified: set[Any] = set()  # sorts of inputs of which a call has been compared with its replay
        self._needs_recorder = False  # a call has needed one, or would have: none goes without any more

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "_free": set(),
            "_learnt": {},
            "_verified": set(),
            "marks": {},
        }  # a copy learns anew: sorts hold weak references, which cannot be copied

    def run(
        self,
        function: Callable[..., Any],
        owners: tuple[nn.Module, ...],
        mark: Hashable,
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
                if self.kind.table.speaks_of_modules:
                    return function(*args, **kwargs)  # the result that is kept of a module has no tangents
                function, (args, kwargs) = on_tangents, primals
        inputs = KeptInputs(args, kwargs)
        if inputs.owners:
            owners += inputs.owners
        sort = None
        if in_dual_level:
            inputs.kind = None
        if mark is not None and inputs.kind is not None:
            sort = (mark, settings.freeze_buffers, settings.use_reentrant, inputs.kind)
        if self.kind.table.saves_everything and sort in self._free and surrounding_hooks() is None:
            self.stats.calls += 1
            return function(*args, **kwargs)
        if settings.keeping is not None:
            inputs.store(settings.keeping, args, kwargs, self.path)
        leaves = partial(inputs.leaves_of, args, kwargs)
        frame, recorder = self._frame(function, owners, settings, sort, inputs, leaves)
        try:
            output = frame.run(inputs, args, kwargs)
        except UnseenWriteError:
            self._be_surprised()
            raise
        if (recorder is None or not recorder.sees_ops) and frame.surroundings.bindings.were_written:
            self._be_surprised()
        if frame.kept_whole is not None:
            self._be_surprised()
            warnings.warn(str(frame.kept_whole), SacWarning, stacklevel=2)
        if isinstance(recorder, (RerunRecorder, ReplayRecorder)):
            check_planned(self.kind.planned, recorder.rows, self.path)  # before inputs are released
        if settings.keeping is not None:
            inputs.finish(settings.keeping, args, kwargs, output)
        if isinstance(recorder, (RerunRecorder, ReplayRecorder)):
            self._learn(recorder, frame, sort)
        elif isinstance(recorder, ModuleRecorder):
            self.stats.take(recorder.modules.learnt.figures, frame.input_bytes)
        else:
            self.stats.take(None, frame.input_bytes)
        return output

    def _frame(
        self,
        function: Callable[..., Any],
        owners: tuple[nn.Module, ...],
        settings: Settings,
        sort: Any,
        inputs: KeptInputs,
        leaves: Callable[[], list[Any]],
    ) -> tuple[Frame | ReentrantFrame, _AnyRecorder | None]:
        """Return what runs one call, and the recorder that it needs, if any; see Note [Evidence]."""
        table = self.kind.table
        is_known = sort is not None and sort in self._free and not table.saves_everything
        records = not is_known or self._needs_recorder or table.decides_on_ops or settings.engine == REPLAY
        if records and self._is_replayed(settings):
            return self._replay_frame(function, owners, settings, sort, inputs, leaves)
        self.stats.engine = RERUN if records else ""
        recorder: _AnyRecorder | None = None
        if records or table.speaks_of_modules:
            recorder = self._recorder(owners, settings, sort, inputs, sees_ops=records)
        kind = ReentrantFrame if settings.use_reentrant else Frame
        frame = kind(function, self.path, recorder, owners, settings)
        frame.is_evidence = records and not (self._needs_recorder or table.decides_on_ops)
        return frame, recorder

    def _replay_frame(
        self,
        function: Callable[..., Any],
        owners: tuple[nn.Module, ...],
        settings: Settings,
        sort: Any,
        inputs: KeptInputs,
        leaves: Callable[[], list[Any]],
    ) -> tuple[ReplayFrame, ReplayRecorder]:
        verifies = settings.verify == ALWAYS or (settings.verify == FIRST and sort not in self._verified)
        program = self.kind.programs.get(inputs.kind)
        recorder = ReplayRecorder(
            self.kind.table, self.path, owners, settings, self._new_rows(), verifies=verifies, program=program
        )
        recorder.begin(inputs, leaves())
        give_up = partial(self._give_up, settings.engine == REPLAY)
        self._note_verified(sort)
        self.stats.engine = REPLAY
        frame = ReplayFrame(function, self.path, recorder, owners, settings, give_up=give_up, given_up=self._given_up)
        return frame, recorder

    def _is_replayed(self, settings: Settings) -> bool:
        """Whether a call that needs a recorder is recomputed by replay."""
        table = self.kind.table
        if (
            (self.kind.no_replay and surrounding_hooks() is None)  # see Note [Replay]
            or table.speaks_of_modules
            or settings.engine == RERUN
            or settings.use_reentrant
            or not CAN_REPLAY
        ):
            return False
        if settings.engine == REPLAY:
            return True
        return bool(table.rules) and not table.saves_everything and surrounding_hooks() is None  # see Note [Auto]

    def _new_rows(self) -> Rows | None:
        return Rows() if self.kind.lists_ops and not self.kind.rows else None

    def _note_verified(self, sort: Any) -> None:
        if len(self._verified) >= SORTS:
            self._verified.clear()
        self._verified.add(sort)

    def _give_up(self, asked: bool, reason: str) -> None:
        """A call could not be replayed: later ones of this kind go under the rerun engine.

        ``asked``: whether the user asked for replay, and so is told.
        """
        if not self.kind.no_replay:
            self.kind.no_replay = reason
            if asked:
                warn_of_trouble(self.path, reason)

    def _given_up(self) -> str:
        return self.kind.no_replay

    def _be_surprised(self) -> None:
        """A call without a recorder wrote to something: no call goes without one any more."""
        self._free.clear()
        self._learnt.clear()
        self._needs_recorder = True

    def _recorder(
        self, owners: tuple[nn.Module, ...], settings: Settings, sort: Any, inputs: KeptInputs, *, sees_ops: bool
    ) -> RerunRecorder | ModuleRecorder:
        table = self.kind.table
        modules, apart = None, frozenset[int]()
        if table.speaks_of_modules:
            learnt = self._learnt.get(sort)
            modules = SavedModules(table, self.path, settings, learnt)
            if learnt is None:
                modules.learnt.apart = saved_modules(owners, table)
            apart = modules.learnt.apart
            if not sees_ops:
                module_recorder = ModuleRecorder(modules, apart)
                module_recorder.begin(inputs)
                return module_recorder
        rows = self._new_rows()
        recorder = RerunRecorder(
            table,
            self.path,
            owners,
            rows,
            freeze_buffers=settings.freeze_buffers,
            early_stop=settings.early_stop,
            modules=modules,
            apart=apart,
            verifies=settings.verify != NEVER,
        )
        recorder.begin(inputs)
        return recorder

    def _learn(self, recorder: RerunRecorder | ReplayRecorder, frame: Frame | ReentrantFrame, sort: Any) -> None:
        if recorder.rows is not None:
            self.kind.rows = tuple(recorder.rows.rows)
            announce(self.path, self.kind.rows)
        everything = self.kind.table.saves_everything
        if not everything and (
            recorder.needs_mode or frame.surroundings.bindings.were_written or needs_recorder(frame.owners)
        ):
            self._needs_recorder = True
        is_proof = not (self._needs_recorder or recorder.reads_values or frame.moved_host_rng)
        if sort is not None and (everything or is_proof):
            if len(self._free) >= SORTS:
                self._free.clear()
            self._free.add(sort)
        modules = recorder.record.modules if isinstance(recorder, RerunRecorder) else None
        if sort is not None and modules is not None:
            if len(self._learnt) >= SORTS:
                self._learnt.clear()
            modules.learnt.figures = recorder.figures
            self._learnt[sort] = modules.learnt
        if isinstance(recorder, ReplayRecorder) and sort is not None and recorder.program is not None:
            programs = self.kind.programs
            if len(programs) >= SORTS:
                programs.clear()
            programs[sort[-1]] = recorder.program
        self.stats.take(recorder.figures, frame.input_bytes)


def _rebuild(
    policy: Policy, indices: tuple[int, ...], must_save: bool, name: str, planned: PlannedRegion | None
) -> Kind:
    return Kind(rebuild_table(policy, indices, must_save), name, planned)


# -- Regions of functions and modules: what earlier calls have shown of each, and which of them a call is one of

# Note [What a function changes itself]
#
# Two calls are of one function if all that the function holds is the same (Note [Which function is it]). A function
# that counts its calls would be another one each time. But what a call changes itself is not the same in recomputation
# either, so it cannot be what decides which ops run; wherever a first call is seen to change something, that is no part
# of the function's identity from then on.

FULL = Policy(name="full", source="full")
FULL_TABLE = Table(FULL, ())
_MOST_REGIONS = 1024
_OF_ONE_FUNCTION = ()  # the mark of all calls of a region that serves one function only

_regions: dict[Hashable, Region] = {}
_kinds: dict[Hashable, Kind] = {}
_changing: dict[Hashable, dict[Hashable, frozenset[int]]] = {}  # which parts a function changes; see `_skeleton`


def run_as_region(
    function: Callable[..., Any], settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``function(*args, **kwargs)`` as a region, by what earlier calls of the same function have shown."""
    identity = _identify(function)
    owners = tuple(identity.owners)
    key = _key(identity) if identity.is_known else None
    region = _regions.get(key) if key is not None else None
    if region is not None:
        return region.run(function, owners, _OF_ONE_FUNCTION, settings, args, kwargs)
    region = Region(_kind_of(function), _name_of(function))
    output = region.run(function, owners, _OF_ONE_FUNCTION, settings, args, kwargs)
    if key is not None:
        _note_changes(identity, _identify(function))
        _put(_regions, _key(identity), region)
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
    identity = _identify(modules)
    owners = tuple(identity.owners)
    if not identity.is_known:
        return region.run(function, owners, None, settings, args, kwargs)
    key = _key(identity)
    mark = region.marks.get(key)
    if mark is not None:
        return region.run(function, owners, mark, settings, args, kwargs)
    mark = _put(region.marks, key, object())
    output = region.run(function, owners, mark, settings, args, kwargs)
    after = _identify(modules)
    _note_changes(identity, after)
    _put(region.marks, _key(after), mark)
    return output


def _identify(function: Any) -> Identity:
    identity = Identity()
    identity.look_at(function)
    return identity


def _key(identity: Identity) -> Hashable:
    parts = identity.parts
    known = _changing.get(parts[0])  # as a rule None: most functions change nothing
    for place in known.get(_skeleton(parts), ()) if known else ():
        parts = [*parts[:place], None, *parts[place + 1 :]]
    return tuple(parts)


def _skeleton(parts: list[Any]) -> Hashable:
    """Return what stays the same of a function that changes plain values: what it holds beside them."""
    return len(parts), tuple(part for part in parts if type(part) not in PLAIN)


def _note_changes(before: Identity, after: Identity) -> None:
    skeleton = _skeleton(after.parts)
    if after.is_known and skeleton == _skeleton(before.parts):
        pairs = enumerate(zip(before.parts, after.parts, strict=True))
        changed = {place for place, (one, other) in pairs if one != other}
        if changed:
            known = _changing.get(after.parts[0]) or _put(_changing, after.parts[0], {})
            _put(known, skeleton, known.get(skeleton, frozenset()) | changed)


def _kind_of(function: Any) -> Kind:
    """Return one kind for all functions of the same code, and for all modules of a class."""
    while type(function) in (partial, types.MethodType):
        function = function.func if type(function) is partial else function.__func__
    key = same(function.__code__ if type(function) is types.FunctionType else type(function))
    return _kinds.get(key) or _put(_kinds, key, Kind(FULL_TABLE, "full"))


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
class Note:
    """What one forward leaves for discarding: its outputs with memory of their own, and the node that saved them.

    A plain dataclass, and empty when the region begins: calls of one function are of one sort (Note [Evidence]).
    """

    chosen: tuple[int, ...] | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    remembered: torch.Tensor | None = None

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
        remembered = _Remembered.apply(anchor, *(tensor.detach() for tensor in tensors))  # type: ignore[no-untyped-call]
        if is_first:
            self.tensors, self.remembered = tensors, remembered


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does as ``function``, and lets the ``note`` that it is given take what it returns."""
    noting = partial(_call, function)
    noting.__qualname__ = getattr(function, "__qualname__", type(function).__name__)  # type: ignore[attr-defined]
    return noting  # not a closure: calls of one function are told to be so by its parts


def _call(function: Callable[..., Any], *args: Any, note: Note) -> Any:
    output = function(*args)
    note.take(output, args)
    return output


class _Remembered(torch.autograd.Function):
    """Saves tensors, and is part of no other graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on this node")
