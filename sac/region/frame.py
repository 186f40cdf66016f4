"""One call of a region: forward, the handles that autograd holds, and one recomputation in backward."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from sac.errors import Problem, RegionError
from sac.outer_hooks import OuterPacked, PackHooks, active_hooks, fetch, pack_with_outer_hooks
from sac.region.ambient import AmbientState, subclasses_on
from sac.region.compiled_graphs import never_compiled
from sac.region.forward_ad import outside_transforms
from sac.region.inputs import RegionInputs
from sac.region.module_state import UnseenWriteError
from sac.region.settings import PLAIN, Settings
from sac.tensors import describe, detached, metadata, shares_storage, storage_bytes, version_of
from sac.torch_private import current_graph_task_id, graph_is_retained

# -- What autograd holds instead of a region's tensors, and how a recomputation fills it


class Fillable(Protocol):
    """The frame, as far as its handles are concerned."""

    def fill(self, index: int, tensor: torch.Tensor, task: int) -> bool:
        """Put a recomputed tensor on its handle; return whether that waited for it."""


ALL = 1 << 62  # the place of a last missing handle that nobody knows: all that is saved may be asked for


class StopRecompute(BaseException):
    """Ends a recomputation that has nothing more to fill; not an Exception, so that no model code swallows it."""

    def __init__(self, frame: Fillable) -> None:
        self.frame = frame


class Handle:
    """What autograd holds instead of a tensor. Kept and missing are told apart by ``kept``."""

    # Defaults stand in the class: there is one handle per tensor that autograd saves, and few need them all.
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    is_kept = False
    storage = 0  # address of the tensor's storage object, where a recorder wants to know it
    is_external = False  # the kept value lives elsewhere too: an input, a parameter
    value: torch.Tensor | OuterPacked | None = None
    watched: torch.Tensor | None = None  # shares the value's version counter
    version = 0
    task = -2  # the graph task that last unpacked it (-1 is autograd's "none")

    def __init__(self, index: int, tensor: torch.Tensor | None = None) -> None:
        self.index = index
        if tensor is not None:  # to be compared with what recomputation saves in its place
            self.shape = tensor.shape
            self.dtype = tensor.dtype
            self.device = tensor.device

    def keep(self, tensor: torch.Tensor) -> None:
        """Hold the data of ``tensor`` until autograd drops this handle."""
        # Autograd hands over the graph's own tensor, where it saves an op's input; its version counter is shared. A
        # leaf is held itself, as autograd holds it: DeepSpeed's ZeRO-3 takes the data of a weight away and gathers it
        # again, and an alias would hold the whole weight.
        self.is_kept, self.version = True, version_of(tensor)
        self.value = self.watched = tensor if tensor.is_leaf else detached(tensor)

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Hand the held tensor to the saved-tensor hooks around the region."""
        if isinstance(self.value, torch.Tensor):
            self.value, self.watched = pack_with_outer_hooks(self.value, hooks), None

    def kept_value(self, path: str) -> torch.Tensor:
        """Return the held tensor; raises ``RegionError`` if it has been written to since, as autograd would."""
        watched = self.watched
        if watched is not None and version_of(watched) != self.version:
            raise RegionError(
                Problem(
                    where=path or "region",
                    found=f"a tensor that backward needs ({describe(watched)}) was changed in place: it is at version "
                    f"{version_of(watched)}, backward expects version {self.version}",
                    fix="do not change it in place between the op that uses it and backward",
                )
            )
        assert self.value is not None
        return fetch(self.value)


class RecomputeProgress:
    """One recomputation's count of what autograd saves in it, and where to stop."""

    __slots__ = (
        "__weakref__",
        "count",
        "done",
        "early_stop",
        "frame",
        "last_missing",
        "since_op",
        "stop_in_pack",
        "task",
        "verify",
    )

    def __init__(
        self, frame: Fillable, last_missing: int, *, stop_in_pack: bool, task: int, early_stop: bool = True
    ) -> None:
        self.early_stop = early_stop
        self.frame = frame
        self.count = 0
        self.last_missing = last_missing
        self.stop_in_pack = stop_in_pack
        self.task = task
        self.done = False
        self.verify: Callable[[int, torch.Tensor], None] | None = None  # an engine's own check of what is filled in
        self.since_op: list[torch.Tensor] = []  # what autograd has saved since the last op ran

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the tensor to the handle it belongs to, and autograd the data alone.

        With its graph (torch 2.13 hands over an op's output with it) the recomputed node would hold itself.
        """
        if tensor.requires_grad:
            tensor = tensor.detach() if self.stop_in_pack else detached(tensor)  # no recorder: no mode to pass by
        index, self.count = self.count, self.count + 1
        if not self.done or not self.early_stop:
            if self.frame.fill(index, tensor, self.task) and self.verify is not None:
                self.verify(index, tensor)
            self.done = index >= self.last_missing
            if self.stop_in_pack:
                if self.done and self.early_stop:
                    raise StopRecompute(self.frame)
            else:
                self.since_op.append(tensor)
        return tensor

    def stop_before(self, written: Sequence[torch.Tensor]) -> None:
        """Everything is filled and an op is about to run that writes to ``written``: stop early, unless it has to run.

        It has to if it writes to what autograd saved right before it, as ``rrelu_with_noise`` fills its noise.
        """
        recent, self.since_op = self.since_op, []
        if self.early_stop and not any(shares_storage(tensor, written) for tensor in recent):
            raise StopRecompute(self.frame)

    def after_op(self) -> None:
        """An op has run: it cannot write any more to what autograd saved before it."""
        if self.since_op:
            self.since_op = []


class NoEarlyStop:
    """A recomputation that nobody counts and nobody stops: another one's filling, or a graph that is wanted whole."""

    done = False
    last_missing = ALL
    verify: Callable[[int, torch.Tensor], None] | None = None

    def stop_before(self, written: Sequence[torch.Tensor]) -> None:
        """Never asked."""

    def after_op(self) -> None:
        """Nothing to do."""


Progress = RecomputeProgress | NoEarlyStop


# -- Kept views that are small against what they would pin


def clone_small_views(handles: list[Handle]) -> None:
    """Replace views that are small against their storage by copies, so that they do not pin it."""
    groups: dict[int, list[Handle]] = defaultdict(list)
    for handle in handles:
        groups[handle.storage].append(handle)
    for group in groups.values():
        tensors = {_view_of(h.value): h.value for h in group if isinstance(h.value, torch.Tensor)}
        whole = max(storage_bytes(t) for t in tensors.values())
        if sum(t.numel() * t.element_size() for t in tensors.values()) < whole:
            copies = {view: _dense_copy(tensor) for view, tensor in tensors.items()}
            for handle in group:
                if isinstance(handle.value, torch.Tensor):
                    handle.value, handle.watched = copies[_view_of(handle.value)], None


def _view_of(tensor: Any) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same order of dimensions in memory and none of the gaps."""
    return tensor.clone(memory_format=torch.preserve_format)


# -- What to do about a recomputation that is not like its forward: one text per kind of difference

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
    """Return ``error`` of the region ``path`` with advice that fits the settings of the call."""
    general = (OTHER_PATH, OTHER_KIND, OTHER_VALUE)
    if settings.preserve_rng_state or not any(one.where == (path or "region") for one in error.problems):
        return error
    return type(error)(
        replace(one, fix=one.fix + _NO_RANDOM_STATE) if one.where == (path or "region") and one.fix in general else one
        for one in error.problems
    )


# -- One call of a region: what both frames hold of it, and how they run its function in either pass

RETAIN = "pass retain_graph=True to the backward call before this one"


class Recorder(Protocol):
    """What a recomputation engine does for a frame. The frame works without one (full recomputation).

    ``sees_ops``: whether its modes see the ops of the region. ``apart``: modules that recomputation does not run, by
    id; what they write to their buffers is not written again.
    """

    sees_ops: bool
    not_recomputed: frozenset[int]

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward runs."""

    def pack(self, tensor: torch.Tensor, handle: Handle) -> None:
        """Autograd saves ``tensor``; call ``handle.keep`` to hold it."""

    def close(self, handles: list[Handle], last_missing: int) -> bool:
        """The forward is over; return whether the region can be recomputed without this recorder."""

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Hand what is held to the saved-tensor hooks around the region."""

    def recompute_mode(self, inputs: list[tuple[int, torch.Tensor]], progress: Progress) -> AbstractContextManager[Any]:
        """Return the context in which the recomputation runs on ``inputs``, given with their positions."""

    def check_recomputed(self) -> None:
        """Raise if a value that had to be used was not."""

    def drop(self) -> None:
        """Let every held value go."""


class RegionCall(ABC):
    """One call of one checkpointed region.

    ``path`` names the region in messages. ``owners`` are its modules. ``compares``: a recorder that need not serve
    anything is still of use, to tell whether recomputation saves the same values.
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
        self.input_bytes = (0, 0)  # on devices and on the host for them: held by this region, or else by its handles
        self.kept_whole: Problem | None = None  # after the forward: why its activations are kept after all
        self.is_evidence = False  # whether somebody will ask ``moved_host_rng``
        self.moved_host_rng = False  # after the forward: whether it drew from Python's or NumPy's generators
        self._lock = threading.RLock()
        self._dropped = False

    @abstractmethod
    def run(self, inputs: RegionInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region's forward and keep what its backward needs; returns the function's result.

        ``inputs`` are made of the same ``args`` and ``kwargs``.
        """

    def _begin(self, inputs: RegionInputs) -> None:
        """Take note of all that the forward is about to see."""
        self.hooks = active_hooks()
        self.inputs = inputs
        tensors = [kept.data for kept in inputs.tensors if isinstance(kept.data, torch.Tensor)]
        recorded = self.recorder is not None and self.recorder.sees_ops
        not_recomputed = self.recorder.not_recomputed if self.recorder is not None else frozenset()
        function = None if _is_of_module(self.function) else self.function
        held = inputs.tensors_in_objects()
        self.ambient = AmbientState(
            tensors,
            self.owners,
            self.settings,
            function,
            held.values(),
            recorded=recorded,
            not_recomputed=not_recomputed,
        )

    def _run_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.recorder is None:
            return self.function(*args, **kwargs)
        with self.recorder.forward_mode():
            return self.function(*args, **kwargs)

    def _keep(self, kept: list[Handle], last_missing: int) -> None:
        """The forward is over: hold what a recomputation up to ``last_missing`` takes, nothing if it is -1."""
        if self.is_evidence and self.ambient.host_rng is not None:
            self.moved_host_rng = self.ambient.host_rng.has_moved()
        self.ambient.close(self.path, needed=last_missing >= 0)
        idle = self.recorder is not None and self.recorder.close(kept, last_missing)
        if idle and not (self.compares and self.settings.checks_metadata):
            self.recorder = None
        self._hold_inputs(kept, needed=last_missing >= 0)
        if self.hooks is not None and self.recorder is not None:
            self.recorder.pack_with_outer_hooks(self.hooks)

    def _hold_inputs(self, kept: list[Handle], *, needed: bool) -> None:
        """Hold the inputs until backward, or nothing at all if no recomputation will come: autograd holds ``kept``."""
        if not needed:
            held = [one.value for one in kept if one.is_external and isinstance(one.value, torch.Tensor)]
            self.input_bytes = self.inputs.bytes_among(held), 0
            self._drop()
            return
        self.input_bytes = self.inputs.bytes()
        self.inputs.close(self.hooks, self.path)

    def _drop(self) -> None:
        """Hold nothing any more that could run the region again."""
        self._dropped = True
        self.inputs.drop()
        self.ambient.drop()
        if self.recorder is not None:
            self.recorder.drop()

    def _enter_forward_again(
        self, stack: ExitStack, inputs: list[tuple[int, torch.Tensor]], progress: Progress
    ) -> None:
        """Enter all that the forward saw, with grad enabled, for a run of the function on the rebuilt ``inputs``.

        Raises ``RegionError`` if a parameter of the region was changed since.
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
    """Return whether ``function`` is a forward bound to one of the region's modules, which are looked at themselves."""
    if type(function) is partial and len(function.args) == 1 and not function.keywords:
        return isinstance(function.args[0], nn.Module)
    return type(function) is MethodType and isinstance(function.__self__, nn.Module)


# -- The non-reentrant frame: one checkpointed call, whatever it keeps and however it is run again

# Note [The walk of a region]
#
# Forward. The region's function runs under a pair of saved-tensor hooks. Autograd hands each tensor that it wants to
# save to `Frame._pack` and gets back a `Handle`. A handle is *kept* when somebody decided to hold its value (the
# recorder of the selective engine: the value is a saved op's output, an input or a parameter) and *missing* otherwise.
# At the end (`Frame._close`) it is known which handles are missing. None missing: the region will never be run again
# and nothing else is held. Otherwise the inputs, the RNG states and the recorder's values stay, as far as they are of
# use before the last missing handle.
#
# Backward. The first unpack of a missing handle runs the function again, with inputs, RNG, autocast and buffers as
# they were, under hooks that count: the i-th tensor saved in recomputation belongs to the i-th handle. As soon as the
# last missing handle is filled the run is stopped (`StopRecompute`).
#
# Unseen writes. Where no recorder sees the ops, the forward may have written to something of which there is no copy: a
# parameter, a large buffer, an input. Versions tell when it is over, and a recomputation would then start from the
# wrong values. So the tensors that autograd has saved are held until the end of such a forward, when it is known
# whether they can be recomputed; if not, the handles keep them, with one warning, and later calls have a recorder. The
# peak of a step is no higher for it: the region's backward holds all of them at once too.
#
# Example. `full`, and a block that normalises its weight under `no_grad` in every third step, by a counter in a list.
# In the first two steps nothing needs a recorder. In the third one the weight's version has moved when the forward
# ends: the block's activations are kept in this step, and from the fourth on a recorder copies the weight before it is
# written to.
#
# How often. If this backward retains its graph, handles give their value away and everything that can run the region
# again stays. If it does not, everything else is dropped after that one run and the values lie on their handles until
# autograd drops the handle, node by node; nodes that this backward does not visit find theirs in a later one.


def _call(reference: weakref.ref[Handle]) -> Handle | None:
    return reference()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Frame(RegionCall):
    """The non-reentrant frame; see Note [The walk of a region]."""

    compares = True

    def run(self, inputs: RegionInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``RegionCall.run``."""
        self._handles: list[weakref.ref[Handle]] = []
        self._forward_over = False
        # Without a recorder: what autograd has saved, with its version then. See Note [The walk of a region].
        self._packed: list[tuple[torch.Tensor, int]] | None = None
        if self.recorder is None or not self.recorder.sees_ops:
            self._packed = []
        self._begin(inputs)
        with saved_tensors_hooks(self._pack, self._unpack):
            output = self._run_forward(args, kwargs)
        self._close()
        return output

    def _pack(self, tensor: torch.Tensor) -> Handle:
        handle = Handle(len(self._handles), tensor)
        self._handles.append(weakref.ref(handle))
        if self._packed is not None:
            self._packed.append((tensor, version_of(tensor)))
        if self.recorder is not None:
            self.recorder.pack(tensor, handle)
        return handle

    def _close(self) -> None:
        self._forward_over = True
        packed, self._packed = self._packed, None
        alive = self._alive()
        try:
            kept = self._hold(alive)
        except UnseenWriteError as error:
            if packed is None:
                raise
            self.kept_whole = error.problems[0]
            kept = self._keep_whole(alive, packed)
        if self.hooks is not None:
            for handle in kept:
                handle.pack_with_outer_hooks(self.hooks)

    def _hold(self, alive: list[Handle]) -> list[Handle]:
        """Hold what backward will need for these handles; return those that keep a value of their own."""
        kept = [handle for handle in alive if handle.is_kept]
        last_missing = max((handle.index for handle in alive if not handle.is_kept), default=-1)
        if last_missing >= 0 and not self.settings.early_stop:
            last_missing = ALL  # recomputation reaches what comes later too
        self._keep(kept, last_missing)
        return kept

    def _keep_whole(self, alive: list[Handle], packed: list[tuple[torch.Tensor, int]]) -> list[Handle]:
        """Hold what autograd has saved, as it would itself: this call cannot be recomputed."""
        for handle in alive:
            if not handle.is_kept:
                tensor, version = packed[handle.index]
                handle.keep(tensor)
                handle.version = version
        self._drop()
        return alive

    def _alive(self) -> list[Handle]:
        return [handle for handle in (reference() for reference in self._handles) if handle is not None]

    @never_compiled
    def _unpack(self, handle: Handle) -> torch.Tensor:
        return self._value_of(handle)

    def _value_of(self, handle: Handle) -> torch.Tensor:
        """Return the tensor that autograd has saved as ``handle``, recomputed if need be."""
        if handle.is_kept:
            return handle.kept_value(self.path)
        task = current_graph_task_id()
        retains = task == -1 or graph_is_retained()
        with self._lock:
            if handle.value is None:
                try:
                    with outside_transforms():
                        self._recompute(handle, task, last=not retains)
                except RegionError as error:
                    raise advised(error, self.path, self.settings) from error
            value = handle.value
            if value is None:
                raise RegionError(self._unfilled(handle))
            handle.task = task
            if retains:
                handle.value = None
            return fetch(value)

    def fill(self, index: int, tensor: torch.Tensor, task: int) -> bool:
        """Put the ``index``-th tensor that recomputation saves on its handle; return whether that waited for it."""
        if index >= len(self._handles):
            raise RegionError(self._surplus(index, tensor))
        handle = self._handles[index]()
        if handle is None or not self._waits(handle, task):
            return False
        known = handle.shape is not None and self.settings.checks_metadata
        if known and metadata(tensor) != (handle.shape, handle.dtype, handle.device):
            raise RegionError(self._differs(handle, tensor))
        handle.value = tensor
        return True

    @staticmethod
    def _waits(handle: Handle, task: int) -> bool:
        """Return whether backward may still ask for this handle's value in graph task ``task``."""
        return not handle.is_kept and handle.value is None and (handle.task != task or task == -1)

    def _recompute(self, wanted: Handle, task: int, *, last: bool) -> None:
        if self._dropped:
            raise RegionError(self._unfilled(wanted))
        last = last and self._forward_over  # a gradient taken inside the region's own forward drops nothing
        wanted.task = -2  # it may have been unpacked in this task before: a second read of ctx.saved_tensors
        last_missing = max(
            handle.index for handle in map(_call, self._handles) if handle is not None and self._waits(handle, task)
        )
        early = self.settings.early_stop
        if not early and not self._forward_over:  # a gradient taken inside: the end is where the forward has got to
            early, last_missing = True, len(self._handles) - 1
        seen = self.recorder is not None and self.recorder.sees_ops
        progress = RecomputeProgress(self, last_missing, stop_in_pack=not seen, task=task, early_stop=early)
        args, kwargs, tensors = self._rebuild()
        with ExitStack() as stack:
            self._enter_forward_again(stack, tensors, progress)
            stack.enter_context(saved_tensors_hooks(progress.pack, _same))
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

    def _rebuild(self) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[int, torch.Tensor]]]:
        """Return the arguments of the recomputation."""
        with torch.enable_grad(), subclasses_on():
            return self.inputs.rebuild(self.path)

    # Messages

    def _differs(self, handle: Handle, tensor: torch.Tensor) -> Problem:
        forward = f"{str(handle.dtype).removeprefix('torch.')}{list(handle.shape or ())} on {handle.device}"
        return self._problem(
            f"saved tensor {handle.index} was {forward} in forward and is {describe(tensor)} on {tensor.device} "
            "in recomputation",
        )

    def _surplus(self, index: int, tensor: torch.Tensor) -> Problem:
        return self._problem(
            f"recomputation saves more tensors than forward did ({len(self._handles)}); the first one more is "
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
