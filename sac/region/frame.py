"""The non-reentrant frame: one checkpointed call, whatever it keeps and however it is run again."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from sac.errors import Problem, RegionError
from sac.region.advice import OTHER_PATH, advised
from sac.region.call import RETAIN, RegionCall, graph_is_retained
from sac.region.eager import never_compiled
from sac.region.handles import ALL, Filling, Handle, StopRecompute
from sac.region.inputs import KeptInputs
from sac.region.parking import fetch
from sac.region.states.ambient import subclasses_on
from sac.region.states.bindings import UnseenWriteError
from sac.region.storages import describe, metadata, version_of
from sac.region.transforms import outside_transforms

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

    def run(self, inputs: KeptInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
                handle.park(self.hooks)

    def _hold(self, alive: list[Handle]) -> list[Handle]:
        """Hold what backward will need for these handles; return those that keep a value of their own."""
        kept = [handle for handle in alive if handle.kept]
        last_missing = max((handle.index for handle in alive if not handle.kept), default=-1)
        if last_missing >= 0 and not self.settings.early_stop:
            last_missing = ALL  # recomputation reaches what comes later too
        self._keep(kept, last_missing)
        return kept

    def _keep_whole(self, alive: list[Handle], packed: list[tuple[torch.Tensor, int]]) -> list[Handle]:
        """Hold what autograd has saved, as it would itself: this call cannot be recomputed."""
        for handle in alive:
            if not handle.kept:
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
        if handle.kept:
            return handle.kept_value(self.path)
        task = torch._C._current_graph_task_id()
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
        return not handle.kept and handle.value is None and (handle.task != task or task == -1)

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
        filling = Filling(self, last_missing, stop_in_pack=not seen, task=task, early_stop=early)
        args, kwargs, tensors = self._rebuild()
        with ExitStack() as stack:
            self._enter_forward_again(stack, tensors, filling)
            stack.enter_context(saved_tensors_hooks(filling.pack, _same))
            try:
                self.function(*args, **kwargs)
            except StopRecompute as stop:
                if stop.frame is not self:
                    raise
        if not filling.done:
            raise RegionError(self._too_few(filling.count))
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
