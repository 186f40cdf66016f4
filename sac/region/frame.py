"""One call of a region: forward, the handles that autograd holds, and one recomputation in backward."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from sac.errors import Problem, RegionError
from sac.outer_hooks import PackHooks, active_hooks, call_under_hooks, fetch
from sac.region.ambient import AmbientState, subclasses_on
from sac.region.compiled_graphs import never_compiled
from sac.region.forward_ad import dual_level_is_on, outside_transforms
from sac.region.inputs import RegionInputs
from sac.region.module_state import ModuleState, UnseenWriteError
from sac.region.settings import PLAIN, Settings
from sac.region.tables import ModuleTables
from sac.region.undo import UndoStack
from sac.stores.offload import HOOKS, TANGENTS, Offloading, OffloadUse
from sac.stores.saved_tensor import Held, SavedTensor
from sac.tensors import describe, detached, shares_storage, unchanged, version_of
from sac.torch_private import NO_TASK, current_graph_task_id, graph_is_retained

# -- What autograd holds instead of a region's tensors, and how a recomputation fills it


class Fillable(Protocol):
    """The part of the frame that a recomputation needs to fill its handles: the errors where a tensor does not fit."""

    def surplus(self, index: int, tensor: torch.Tensor) -> Problem:
        """Return the problem that forward saved fewer tensors."""

    def differs(self, handle: Handle, tensor: torch.Tensor) -> Problem:
        """Return the problem that forward saved a tensor of another shape, dtype or device."""


ALL = 1 << 62  # index of the last missing handle where that is unknown: backward may ask for any saved tensor


class StopRecompute(BaseException):
    """Ends a recomputation that has nothing left to fill; not an Exception, so that no model code swallows it."""

    def __init__(self, frame: Fillable) -> None:
        self.frame = frame


class Handle(SavedTensor):
    """Placeholder that autograd holds instead of a tensor. ``is_kept`` separates kept handles from missing ones."""

    shape: torch.Size | None = None  # compared with those of the tensor that recomputation saves in its place
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    is_kept = False
    storage = 0  # address of the tensor's storage object, set if a recorder needs it
    watches_packed = False  # nor does autograd
    task = -2  # the graph task that last unpacked this handle (-1 is autograd's "none")

    def __init__(self, index: int, tensor: torch.Tensor | None = None) -> None:
        self.index = index
        if tensor is not None:
            self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def keep(self, tensor: torch.Tensor) -> None:
        """Hold the data of ``tensor`` until autograd drops this handle."""
        # Where autograd saves an op's input, it passes the graph's own tensor, and the alias shares its version
        # counter. A leaf is held itself, as autograd holds it: DeepSpeed's ZeRO-3 takes the data of a weight away and
        # gathers it again, and an alias would hold the whole weight.
        self.is_kept, self.version = True, version_of(tensor)
        self.value = self.watched = tensor if tensor.is_leaf else detached(tensor)

    def waits(self, task: int) -> bool:
        """Return whether backward may still ask for this handle's value in graph task ``task``."""
        return self.value is None and not self.is_kept and (self.task != task or task == -1)

    def kept_value(self, path: str) -> torch.Tensor:
        """Return the held tensor; raise ``RegionError`` if it has been written to since, as autograd would."""
        watched = self.watched
        if watched is not None and self.was_changed:
            raise RegionError(
                Problem(
                    where=path or "region",
                    found=f"a tensor that backward needs ({describe(watched)}) was changed in place: it is at version "
                    f"{version_of(watched)}, backward expects version {self.version}",
                    fix="do not change it in place between the op that uses it and backward",
                )
            )
        return self.fetch()


class Handles:
    """The handles of one region call, by index. Autograd holds them; one that it has dropped is gone."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Handle]] = []

    def __len__(self) -> int:
        return len(self._references)

    def add(self, handle: Handle) -> None:
        """Append ``handle``, whose index is the number of those before it."""
        self._references.append(weakref.ref(handle))

    def get(self, index: int) -> Handle | None:
        """Return the handle with this index, or None if autograd has dropped it."""
        return self._references[index]()

    def alive(self) -> list[Handle]:
        """Return those that autograd still holds."""
        return [handle for reference in self._references if (handle := reference()) is not None]

    def split(self) -> tuple[list[Handle], list[int]]:
        """Return the kept ones and the indices of the missing ones, of those that autograd still holds."""
        alive = self.alive()
        return [one for one in alive if one.is_kept], [one.index for one in alive if not one.is_kept]

    def waiting(self, task: int) -> dict[int, Handle]:
        """Return those that may still be asked for in graph task ``task``, by index."""
        return {handle.index: handle for handle in self.alive() if handle.waits(task)}

    def last_waiting(self, task: int) -> int:
        """Return the index of the last handle that may still be asked for in graph task ``task``, or -1."""
        for reference in reversed(self._references):
            handle = reference()
            if handle is not None and handle.waits(task):
                return handle.index
        return -1


class RecomputeProgress:
    """Counts the tensors that autograd saves in one recomputation, puts them on the handles, decides where to stop.

    ``handles``: those of the frame, in order. ``checks``: whether shape, dtype and device are compared.
    """

    __slots__ = (
        "__weakref__",
        "checks",
        "count",
        "done",
        "early_stop",
        "frame",
        "handles",
        "last_missing",
        "since_op",
        "stop_in_pack",
        "task",
        "verify",
    )

    def __init__(
        self,
        frame: Fillable,
        handles: Handles,
        last_missing: int,
        *,
        stop_in_pack: bool,
        task: int,
        early_stop: bool,
        checks: bool,
    ) -> None:
        self.early_stop = early_stop
        self.checks = checks
        self.frame = frame
        self.handles = handles
        self.count = 0
        self.last_missing = last_missing
        self.stop_in_pack = stop_in_pack
        self.task = task
        self.done = False
        self.verify: Callable[[int, torch.Tensor], None] | None = None  # an engine's own check of filled tensors
        self.since_op: list[torch.Tensor] = []  # what autograd has saved since the last op ran

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put the tensor on its handle if backward may ask for it, and return it to autograd without its graph.

        With its graph (torch 2.13 passes an op's output with its graph) the recomputed node would hold itself. Raises
        ``RegionError`` if forward saved fewer tensors, or one of another shape, dtype or device.
        """
        if tensor.requires_grad:
            tensor = tensor.detach() if self.stop_in_pack else detached(tensor)  # no recorder: no mode to bypass
        index = self.count
        self.count = index + 1
        if self.done and self.early_stop:
            return tensor
        if index >= len(self.handles):
            self.refuse_surplus(index, tensor)
        handle = self.handles.get(index)
        if handle is not None and handle.waits(self.task):
            if (
                handle.shape is not None
                and (tensor.shape != handle.shape or tensor.dtype != handle.dtype or tensor.device != handle.device)
                and self.checks
            ):
                self.refuse_other(handle, tensor)
            handle.value = tensor
            if self.verify is not None:
                self.verify(index, tensor)
        if not self.stop_in_pack:
            self.since_op.append(tensor)
        if index >= self.last_missing:
            self.done = True
            if self.stop_in_pack and self.early_stop:
                self.stop()
        return tensor

    def refuse_surplus(self, index: int, tensor: torch.Tensor) -> NoReturn:
        """Raise ``RegionError``: forward saved fewer tensors."""
        raise RegionError(self.frame.surplus(index, tensor))

    def refuse_other(self, handle: Handle, tensor: torch.Tensor) -> NoReturn:
        """Raise ``RegionError``: forward saved a tensor of another shape, dtype or device."""
        raise RegionError(self.frame.differs(handle, tensor))

    def stop(self) -> NoReturn:
        """End the recomputation."""
        raise StopRecompute(self.frame)

    def stop_before(self, written: Sequence[torch.Tensor]) -> None:
        """Everything is filled and the next op writes to ``written``: stop early, unless that op has to run.

        It has to run if it writes to a tensor that autograd saved right before it: ``rrelu_with_noise`` fills its
        noise.
        """
        recent = self.take_recent()
        if self.early_stop and not any(shares_storage(tensor, written) for tensor in recent):
            raise StopRecompute(self.frame)

    def take_recent(self) -> list[torch.Tensor]:
        """Return ``since_op``, and forget it."""
        recent, self.since_op = self.since_op, []
        return recent

    def after_op(self) -> None:
        """An op has run: it cannot write to what autograd saved before it any more."""
        if self.since_op:
            self.since_op = []


class NoEarlyStop:
    """Progress of a run that is not counted and never stopped: another run fills, or the whole graph is needed."""

    done = False
    last_missing = ALL
    verify: Callable[[int, torch.Tensor], None] | None = None

    def stop_before(self, written: Sequence[torch.Tensor]) -> None:
        """Never called."""

    def after_op(self) -> None:
        """Nothing to do."""


Progress = RecomputeProgress | NoEarlyStop


# -- Advice in errors on recomputations that differ from their forward

OTHER_PATH = (
    "recomputation took another path through the region's Python than forward did: look for a branch that reads a "
    "counter, a cache or a global, and pass what it reads as an argument"
)
OTHER_KIND = (
    "the region found another tensor than in forward, or one of another shape, dtype or device: do not move, cast or "
    "exchange between forward and backward what it uses (modules, attributes, globals)"
)
OTHER_VALUE = (
    "the region computed with other tensors than in forward, or in another order: do not exchange between forward and "
    "backward what it uses (data of a weight, attributes, globals), or pass it as an argument"
)
OTHER_WRITE = "let the region write in both passes or in neither: look for a branch in front of the write"
OTHER_LAYOUT = "let the region make its results in the same way in both passes: look for a branch that decides how"
WRITTEN_LATER = "do not write to the region's result, nor to what it is a view of, before backward"
_NO_RANDOM_STATE = "; preserve_rng_state is off: turn it on if the region draws random numbers"


def advised(error: RegionError, path: str, settings: Settings) -> RegionError:
    """Return ``error``, raised in the region ``path``, with advice that fits the settings of the call."""
    general = (OTHER_PATH, OTHER_KIND, OTHER_VALUE)
    if settings.preserve_rng_state or not any(one.where == (path or "region") for one in error.problems):
        return error
    return type(error)(
        replace(one, fix=one.fix + _NO_RANDOM_STATE) if one.where == (path or "region") and one.fix in general else one
        for one in error.problems
    )


# -- One call of a region: the base of both frames

RETAIN = "pass retain_graph=True to the backward call before this one"


class Recorder:
    """Interface of a recomputation engine to a frame. Abstract. Without a recorder, a frame recomputes everything.

    ``sees_ops``: whether its modes see the ops of the region. ``offloads``: the rules of which saved values wait on the
    host. ``not_recomputed``: ids of the modules that recomputation does not run; their writes to their buffers are not
    repeated.
    """

    sees_ops = True
    not_recomputed: frozenset[int] = frozenset()
    offloads: frozenset[int] = frozenset()

    def set_start(self, module_state: ModuleState, handles: Handles) -> None:
        """The forward begins with ``module_state``; ``handles`` will get those of what autograd saves."""

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward runs."""
        raise NotImplementedError

    def pack(self, tensor: torch.Tensor, handle: Handle) -> None:
        """Autograd saves ``tensor``; call ``handle.keep`` to hold it. Only called if the recorder sees ops."""

    def settle(self, packed: Any) -> None:
        """The forward is over, and no mode has seen its ops: keep the handles that ``close`` is to find kept.

        ``packed``: the tensors that autograd has saved, with their versions at that time.
        """

    def close(self, handles: list[Handle], last_missing: int) -> bool:
        """The forward is over; return whether the region can be recomputed without this recorder."""
        raise NotImplementedError

    def held(self) -> Held:
        """After the forward: yield each saved tensor that may wait elsewhere, but not the handles."""
        return ()

    def rule_of(self, handle: Handle) -> int | None:
        """Return the rule that saved what ``handle`` keeps."""
        return None

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Hand the held values to the saved-tensor hooks around the region."""
        for saved, _ in self.held():
            saved.pack_with_outer_hooks(hooks)

    def recompute_mode(self, inputs: list[tuple[int, torch.Tensor]], progress: Progress) -> AbstractContextManager[Any]:
        """Return the context in which the recomputation runs on ``inputs``, given as (position, tensor)."""
        return nullcontext()

    def check_recomputed(self) -> None:
        """Raise if recomputation did not use a value that it had to use."""

    def drop(self) -> None:
        """Release every held value."""


class RegionCall(ABC):
    """One call of one checkpointed region.

    ``path`` names the region in messages. ``owners`` are its modules. ``compares``: whether a recorder that serves
    nothing is still useful, because it checks that recomputation saves the same values.
    """

    compares = False

    def __init__(
        self,
        function: Callable[..., Any],
        path: str,
        recorder: Recorder | None,
        owners: tuple[nn.Module, ...] = (),
        settings: Settings = PLAIN,
    ) -> None:
        self.function = function
        self.path = path
        self.recorder = recorder
        self.owners = owners
        self.settings = settings
        self.input_bytes = (0, 0)  # on devices, and on the host on their behalf: held by this region or its handles
        self.offloads: Mapping[int, OffloadUse] = {}  # after the forward: by rule
        self.kept_whole: Problem | None = None  # after the forward: why its activations are kept after all
        self.found: ModuleTables | None = None  # the tables of all owners, if they have been recorded for this call
        self.is_evidence = False  # whether ``moved_host_rng`` will be read
        self.moved_host_rng = False  # after the forward: whether it drew from Python's or NumPy's generators
        self._handles = self._new_handles()
        self._lock = threading.RLock()
        self._dropped = False

    def _new_handles(self) -> Handles:
        return Handles()

    @property
    def _sees_ops(self) -> bool:
        return self.recorder is not None and self.recorder.sees_ops

    @abstractmethod
    def run(self, inputs: RegionInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region's forward, keep what its backward needs, and return the function's result.

        ``inputs`` is built from the same ``args`` and ``kwargs``.
        """

    def _begin(self, inputs: RegionInputs) -> None:
        """Record the ambient state, the Python state and the inputs that the forward is about to use."""
        self.hooks = active_hooks()
        self.inputs = inputs
        tensors = [kept.value for kept in inputs.tensors if isinstance(kept.value, torch.Tensor)]
        not_recomputed = self.recorder.not_recomputed if self.recorder is not None else frozenset()
        function = None if _is_of_module(self.function) else self.function
        held = inputs.tensors_in_objects()
        self.ambient = AmbientState(
            tensors,
            self.owners,
            self.settings,
            function,
            held.values(),
            where=self.path or "region",
            found=self.found,
            recorded=self._sees_ops,
            not_recomputed=not_recomputed,
            shared=inputs.shared(),
        )
        self.found = None
        if self.recorder is not None:
            self.recorder.set_start(self.ambient.module_state, self._handles)

    def _run_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.recorder is None:
            return self.function(*args, **kwargs)
        with self.recorder.forward_mode():
            return self.function(*args, **kwargs)

    def _keep(self, kept: list[Handle], last_missing: int) -> None:
        """The forward is over: hold what a recomputation up to ``last_missing`` needs; nothing if it is -1."""
        if self.is_evidence and self.ambient.host_rng is not None:
            self.moved_host_rng = self.ambient.host_rng.has_moved()
        self.ambient.close(self.path, needed=last_missing >= 0)
        idle = self.recorder is not None and self.recorder.close(kept, last_missing)
        self._offload(kept)
        if idle and not (self.compares and self._sees_ops and self.settings.checks_metadata):
            self.recorder = None
        self._hold_inputs(kept, needed=last_missing >= 0)
        if self.hooks is not None and self.recorder is not None:
            self.recorder.pack_with_outer_hooks(self.hooks)

    def _offload(self, kept: list[Handle]) -> None:
        """Let what rules offload wait on the host; see Note [Offloaded values]."""
        rules = self.recorder.offloads if self.recorder is not None else ()
        if rules and self.recorder is not None and self.inputs.call is not None:
            work = Offloading(self.settings.transfers, rules)
            for handle in kept:
                work.look_at(handle, self.recorder.rule_of(handle))
            for saved, rule in self.recorder.held():
                work.look_at(saved, rule)
            reason = HOOKS if self.hooks is not None else TANGENTS if dual_level_is_on() else ""
            work.start(self.inputs.call, held=reason)
            self.offloads = work.figures

    def _hold_inputs(self, kept: list[Handle], *, needed: bool) -> None:
        """Hold the inputs until backward, or nothing if no recomputation will come: autograd holds ``kept``."""
        if not needed:
            held = [one.value for one in kept if one.is_external and isinstance(one.value, torch.Tensor)]
            self.input_bytes = self.inputs.bytes_among(held), 0
            self._drop()
            return
        self.input_bytes = self.inputs.bytes()
        self.inputs.close(self.hooks, self.path)

    def _drop(self) -> None:
        """Release everything that running the region again would need."""
        self._dropped = True
        self.inputs.drop()
        self.ambient.drop()
        if self.recorder is not None:
            self.recorder.drop()

    def _enter_forward_again(
        self, stack: UndoStack, inputs: list[tuple[int, torch.Tensor]], progress: Progress
    ) -> None:
        """Restore the state of the forward, with grad enabled, for a run of the function on the rebuilt ``inputs``.

        Raises ``RegionError`` if a parameter of the region, or a large tensor that it can reach, was changed since.
        """
        module_state = self.ambient.module_state
        if self.settings.checks_metadata and (problem := module_state.changed_parameter(self.path)) is not None:
            raise RegionError(problem)
        if self.settings.checks_metadata and (problem := module_state.changed_tensor(self.path)) is not None:
            raise RegionError(problem)
        stack.callback(module_state.note_parameters)
        self.ambient.enter_on(stack)
        stack.enter_context(torch.enable_grad())
        if self.recorder is not None:
            stack.enter_context(self.recorder.recompute_mode(inputs, progress))

    def _problem(self, found: str, fix: str = OTHER_KIND) -> Problem:
        return Problem(where=self.path or "region", found=found, fix=fix)


def _is_of_module(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` is a forward bound to a module of the region: modules are examined separately."""
    if type(function) is partial and len(function.args) == 1 and not function.keywords:
        owner, name = function.args[0], getattr(function.func, "__name__", "")
        return isinstance(owner, nn.Module) and getattr(type(owner), name, None) is function.func
    return type(function) is MethodType and isinstance(function.__self__, nn.Module)


# -- The non-reentrant frame

# Note [The walk of a region]
#
# Forward. The region's function runs under a pair of saved-tensor hooks. Autograd passes each tensor that it saves to
# `Frame._pack` and gets a `Handle` back. A handle is *kept* if the selective engine's recorder decided to hold its
# value (a saved op's output, an input or a parameter); otherwise it is *missing*. When the forward ends
# (`Frame._close`), the set of missing handles is known. If none is missing, the region never runs again and nothing
# else is held. Otherwise the inputs, the RNG states and those values of the recorder stay that are needed before the
# last missing handle.
#
# Backward. The first unpack of a missing handle runs the function again, with the inputs, RNG states, autocast and
# buffers of the forward. Its saved-tensor hooks count: the i-th tensor saved in recomputation belongs to the i-th
# handle. The run stops as soon as the last missing handle is filled (`StopRecompute`).
#
# Unseen writes. Without a recorder that sees the ops, the forward may write to a tensor that was not copied: a
# parameter, a large buffer, an input. A recomputation would then start from the wrong values. Version counters show
# this when the forward ends. So such a forward holds the tensors that autograd saves until its end, when it is known
# whether they can be recomputed. If they cannot, the handles keep them, with one warning, and later calls have a
# recorder. This does not raise the peak of a step: the region's backward also holds all of them at once.
#
# Example. A region with the policy `full` normalises its weight under `no_grad` in every third step, counting steps in
# a list. The first two steps need no recorder. When the forward of the third step ends, the weight's version has moved:
# the block keeps its activations in this step. From the fourth step on, a recorder copies the weight before each write.
#
# Several backwards. If this backward retains its graph, each handle releases its value when it is read, and everything
# that can run the region again stays. If it does not, everything else is dropped after that one run. The values stay on
# their handles until autograd drops the handles, node by node; nodes that this backward does not visit find their
# values in a later one.


class Frame(RegionCall):
    """The non-reentrant frame; see Note [The walk of a region]."""

    compares = True
    _progress: type[RecomputeProgress] = RecomputeProgress

    def run(self, inputs: RegionInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``RegionCall.run``."""
        self._forward_over = False
        # The graph task in which the last recomputation has ended: none comes after it. Before that no task's number.
        self._last_task: int | None = None
        # Until the end of a forward whose ops no recorder sees: the tensors that autograd has saved and their versions
        # at that time. See Note [The walk of a region].
        self._packed: Any = None
        self._begin(inputs)
        output = call_under_hooks(self._saved_tensor_hooks(), self._run_forward, args, kwargs)
        self._close()
        return output

    def _saved_tensor_hooks(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return what autograd calls with each tensor that it saves, and with each handle that backward reads."""
        self._packed = None if self._sees_ops else []
        return self._pack, self._unpack

    def _pack(self, tensor: torch.Tensor) -> Handle:
        handles = self._handles
        handle = Handle(len(handles), tensor)
        handles.add(handle)
        if self._packed is not None:
            self._packed.append((tensor, version_of(tensor)))
        if self.recorder is not None and self.recorder.sees_ops:
            self.recorder.pack(tensor, handle)
        return handle

    def _close(self) -> None:
        self._forward_over = True
        kept, missing = self._handles.split()
        try:
            self._hold(kept, missing)
        except UnseenWriteError as error:
            if self._packed is None:
                raise
            self.kept_whole = error.problems[0]
            kept = self._keep_whole()
        self._packed = None
        if self.hooks is not None:
            for handle in kept:
                if not handle.was_changed:  # the hooks would get another value; without it, reading the handle raises
                    handle.pack_with_outer_hooks(self.hooks)

    def _hold(self, kept: list[Handle], missing: list[int]) -> None:
        """Hold what backward will need for the missing handles; remove those from ``kept`` that will be missing too."""
        last_missing = missing[-1] if missing else -1
        if missing and not self.settings.early_stop:
            last_missing = ALL  # recomputation also reaches later handles
        self._keep(kept, last_missing)

    def _keep_whole(self) -> list[Handle]:
        """Hold the tensors that autograd saved, as autograd itself would: this call cannot be recomputed."""
        alive = self._handles.alive()
        for handle in alive:
            if not handle.is_kept:
                tensor, version = self._packed[handle.index]
                handle.keep(tensor)
                handle.version = version
        self._drop()
        return alive

    @never_compiled
    def _unpack(self, handle: Handle) -> torch.Tensor:
        """Return the tensor that autograd saved as ``handle``; recompute it if necessary."""
        if handle.is_kept:
            return handle.kept_value(self.path)
        task = current_graph_task_id()
        value = handle.value
        if task == self._last_task and value is not None:  # the usual case
            return value if type(value) is torch.Tensor else fetch(value)
        retains = task == NO_TASK or graph_is_retained()
        with self._lock:
            if handle.value is None:
                try:
                    with outside_transforms():
                        self._recompute(handle, task, last=not retains)
                except RegionError as error:
                    raise advised(error, self.path, self.settings) from error
                except torch.OutOfMemoryError as error:
                    self.settings.add_note(error)
                    raise
            value = handle.value
            if value is None:
                raise RegionError(self._unfilled(handle))
            handle.task = task
            if retains:
                handle.value = None
            return fetch(value)

    def _recompute(self, wanted: Handle, task: int, *, last: bool) -> None:
        if self._dropped:
            raise RegionError(self._unfilled(wanted))
        last = last and self._forward_over  # a gradient taken inside the region's own forward drops nothing
        wanted.task = -2  # it may have been unpacked in this task before, by an earlier read of ctx.saved_tensors
        last_missing = self._handles.last_waiting(task)
        early = self.settings.early_stop
        if not early and not self._forward_over:  # a gradient taken inside: stop at the point the forward has reached
            early, last_missing = True, len(self._handles) - 1
        progress = self._progress(
            self,
            self._handles,
            last_missing,
            stop_in_pack=not self._sees_ops,
            task=task,
            early_stop=early,
            checks=self.settings.checks_metadata,
        )
        args, kwargs, tensors = self._rebuild()
        with UndoStack() as stack:
            self._enter_forward_again(stack, tensors, progress)
            stack.enter_context(saved_tensors_hooks(progress.pack, unchanged))
            try:
                self.function(*args, **kwargs)
            except StopRecompute as stop:
                if stop.frame is not self:
                    raise
        if not progress.done:
            raise RegionError(self._too_few(progress.count))
        if self.recorder is not None:
            self.recorder.check_recomputed()
        if last:
            self._drop()
            self._last_task = task

    def _rebuild(self) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[int, torch.Tensor]]]:
        """Return the arguments of the recomputation."""
        with torch.enable_grad(), subclasses_on():
            return self.inputs.rebuild(self.path)

    # Messages

    def differs(self, handle: Handle, tensor: torch.Tensor) -> Problem:
        """See ``Fillable``."""
        forward = f"{str(handle.dtype).removeprefix('torch.')}{list(handle.shape or ())} on {handle.device}"
        return self._problem(
            f"saved tensor {handle.index} was {forward} in forward and is {describe(tensor)} on {tensor.device} "
            "in recomputation",
        )

    def surplus(self, index: int, tensor: torch.Tensor) -> Problem:
        """See ``Fillable``."""
        return self._problem(
            f"recomputation saves more tensors than forward did ({len(self._handles)}); the first extra one is "
            f"number {index}, {describe(tensor)}",
            OTHER_PATH,
        )

    def _too_few(self, count: int) -> Problem:
        found = f"recomputation saved {count} tensors, forward saved {len(self._handles)}"
        return self._problem(found, OTHER_PATH)

    def _unfilled(self, handle: Handle) -> Problem:
        return self._problem(
            f"saved tensor {handle.index} was read again after this region's memory had been freed", fix=RETAIN
        )
