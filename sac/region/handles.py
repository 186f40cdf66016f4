"""What autograd holds instead of a region's tensors, and how a recomputation fills it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sac.errors import Problem, RegionError
from sac.region.detach import detached
from sac.region.parking import PackHooks, Parked, fetch, park
from sac.region.storages import describe, shares_storage, version_of


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
    kept = False
    storage = 0  # address of the tensor's storage object, where a recorder wants to know it
    borrowed = False  # the kept value lives elsewhere too: an input, a parameter
    value: torch.Tensor | Parked | None = None
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
        self.kept, self.version = True, version_of(tensor)
        self.value = self.watched = tensor if tensor.is_leaf else detached(tensor)

    def park(self, hooks: PackHooks) -> None:
        """Hand the held tensor to the saved-tensor hooks around the region."""
        if isinstance(self.value, torch.Tensor):
            self.value, self.watched = park(self.value, hooks), None

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


class Filling:
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

    def settle(self, written: Sequence[torch.Tensor]) -> None:
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


class ToTheEnd:
    """A recomputation that nobody counts and nobody stops: another one's filling, or a graph that is wanted whole."""

    done = False
    last_missing = ALL
    verify: Callable[[int, torch.Tensor], None] | None = None

    def settle(self, written: Sequence[torch.Tensor]) -> None:
        """Never asked."""

    def after_op(self) -> None:
        """Nothing to do."""


Ending = Filling | ToTheEnd
