"""The region frame: one checkpointed call, non-reentrant, whatever it keeps and however it is run again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from sac.errors import Problem, RegionError
from sac.region.handles import Filling, Handle, StopRecompute
from sac.region.inputs import KeptInputs
from sac.region.parking import PackHooks, fetch, surrounding_hooks
from sac.region.settings import PLAIN, Settings
from sac.region.storages import describe
from sac.region.surroundings import Surroundings

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
# How often. If this backward retains its graph, handles give their value away and everything that can run the region
# again stays. If it does not, everything else is dropped after that one run and the values lie on their handles until
# autograd drops the handle, node by node; nodes that this backward does not visit find theirs in a later one.


class Recorder(Protocol):
    """What a recomputation engine does for a frame. The frame works without one (full recomputation)."""

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward runs."""

    def pack(self, tensor: torch.Tensor, handle: Handle) -> None:
        """Autograd saves ``tensor``; call ``handle.keep`` to hold it."""

    def close(self, handles: list[Handle], last_missing: int) -> bool:
        """The forward is over; return whether the region can be recomputed without this recorder."""

    def park(self, hooks: PackHooks) -> None:
        """Hand what is held to the saved-tensor hooks around the region."""

    def recompute_mode(self, inputs: list[tuple[int, torch.Tensor]], filling: Filling) -> AbstractContextManager[Any]:
        """Return the context in which the recomputation runs on ``inputs``, given with their positions."""

    def check_recomputed(self) -> None:
        """Raise if a value that had to be used was not."""

    def drop(self) -> None:
        """Let every held value go."""


def _call(reference: weakref.ref[Handle]) -> Handle | None:
    return reference()


def _metadata(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Frame:
    """One call of one checkpointed region; see Note [The walk of a region].

    ``path`` names the region in messages. ``owners`` are its modules with buffers or parameters.
    """

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
        self._handles: list[weakref.ref[Handle]] = []
        self._forward_over = False
        self._lock = threading.RLock()
        self._dropped = False
        self.input_bytes = (0, 0)  # on devices and on the host for them; 0 where no recomputation will come

    def run(self, inputs: KeptInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region's forward and keep what its backward needs; returns the function's result.

        ``inputs`` are made of the same ``args`` and ``kwargs``.
        """
        self.hooks = surrounding_hooks()
        self.inputs = inputs
        tensors = [kept.data for kept in self.inputs.tensors if isinstance(kept.data, torch.Tensor)]
        self.surroundings = Surroundings(tensors, self.owners, self.settings)
        with saved_tensors_hooks(self._pack, self._unpack):
            if self.recorder is None:
                output = self.function(*args, **kwargs)
            else:
                with self.recorder.forward_mode():
                    output = self.function(*args, **kwargs)
        self._close()
        return output

    def _pack(self, tensor: torch.Tensor) -> Handle:
        handle = Handle(len(self._handles), tensor)
        self._handles.append(weakref.ref(handle))
        if self.recorder is not None:
            self.recorder.pack(tensor, handle)
        return handle

    def _close(self) -> None:
        self._forward_over = True
        alive = [handle for handle in (reference() for reference in self._handles) if handle is not None]
        kept = [handle for handle in alive if handle.kept]
        last_missing = max((handle.index for handle in alive if not handle.kept), default=-1)
        self.surroundings.close()
        if self.recorder is not None and self.recorder.close(kept, last_missing):
            self.recorder = None
        if last_missing < 0:
            self._drop()
        else:
            self.input_bytes = self.inputs.bytes()
            self.inputs.close(self.hooks, self.path)
        if self.hooks is not None:
            for handle in kept:
                handle.park(self.hooks)
            if self.recorder is not None:
                self.recorder.park(self.hooks)

    def _drop(self) -> None:
        """Hold nothing any more that could run the region again."""
        self._dropped = True
        self.inputs.drop()
        if self.recorder is not None:
            self.recorder.drop()

    def _unpack(self, handle: Handle) -> torch.Tensor:
        if handle.kept:
            return handle.kept_value(self.path)
        task = torch._C._current_graph_task_id()
        retains = task == -1 or _graph_is_retained()
        with self._lock:
            if handle.value is None:
                self._recompute(handle, task, last=not retains)
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
        if self.settings.checks_metadata and _metadata(tensor) != (handle.shape, handle.dtype, handle.device):
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
        filling = Filling(self, last_missing, stop_in_pack=self.recorder is None, task=task, early_stop=early)
        with torch.enable_grad():
            args, kwargs, tensors = self.inputs.rebuild(self.path)
        with ExitStack() as stack:
            self.surroundings.enter_on(stack)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(filling.pack, _same))
            if self.recorder is not None:
                stack.enter_context(self.recorder.recompute_mode(tensors, filling))
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

    # Messages

    def _where(self) -> str:
        return self.path or "region"

    def _differs(self, handle: Handle, tensor: torch.Tensor) -> Problem:
        forward = f"{str(handle.dtype).removeprefix('torch.')}{list(handle.shape)} on {handle.device}"
        return Problem(
            where=self._where(),
            found=f"saved tensor {handle.index} was {forward} in forward and is {describe(tensor)} on {tensor.device} "
            "in recomputation",
            fix="make the region's forward depend on its inputs, parameters and random state only",
        )

    def _surplus(self, index: int, tensor: torch.Tensor) -> Problem:
        return Problem(
            where=self._where(),
            found=f"recomputation saves more tensors than forward did ({len(self._handles)}); the first one more is "
            f"number {index}, {describe(tensor)}",
            fix="make the region's forward depend on its inputs, parameters and random state only",
        )

    def _too_few(self, count: int) -> Problem:
        return Problem(
            where=self._where(),
            found=f"recomputation saved {count} tensors, forward saved {len(self._handles)}",
            fix="make the region's forward depend on its inputs, parameters and random state only",
        )

    def _unfilled(self, handle: Handle) -> Problem:
        return Problem(
            where=self._where(),
            found=f"saved tensor {handle.index} was read again after this region's memory had been freed",
            fix="pass retain_graph=True to the backward call before this one",
        )


def _graph_is_retained() -> bool:
    # Private name (torch 2.0 to 2.13); without it every backward is taken to retain its graph: memory then goes when
    # the graph does.
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return bool(ask()) if ask is not None else True
