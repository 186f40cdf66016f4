"""Copies between a device and host memory: streams, pinned memory, and when the device's memory is freed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from sac.errors import Problem, RegionError, warn
from sac.stores.backward_order import CallNode
from sac.tables import bytes_text
from sac.torch_private import NO_TASK, current_graph_task_id, when_backward_ends

# Note [Transfers]
#
# Each device has one stream for copies to host memory (*down*) and one for copies back (*up*), so that both directions
# of the link are busy at once. `Transfers.put` copies storages down into pinned memory; a `HostCopy` is one of them.
# Streams run independently of each other, so every access waits for the one before it:
#
#   the copy down    waits for the stream that `start` was called on, which made the source
#   the copy up      waits for the copy down, and for the stream that its target was allocated on
#   a reader         waits for the copy up. It reads only memory of its own stream: on another stream than that of the
#                    source or the target, the bytes are brought up again
#   freeing memory   The stream on which the memory was allocated waits for the copy that uses it. Then the reference is
#                    released: what that stream runs next comes after the copy.
#
# Neither `record_stream` nor `event.query` is used: with them, the memory in use would depend on when copies end. Here
# it depends on the order of calls and on sizes only, so peaks repeat, and are the same on every rank.
#
# Limits. Sources stay on the device until more than `in_flight` bytes are on their way down; then the oldest are freed.
# So the values of the last regions, to which backward comes first, are still there, and nothing is copied up for them.
# What backward needs next (Note [Order of backward]) is brought up while less than `ahead` bytes have been brought up
# ahead or are still on their way down.
#
# The end. The graph holds the copies. When it drops one, torch's allocator gets the pinned memory back. That can happen
# in a garbage collection, in any thread: so nothing is locked then.

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Limits in bytes. ``smallest``: of storages that rules offload.

    ``host``: of pinned memory, None: no limit. ``strict``: whether it is an error if the host has no room.
    """

    smallest: int = MIB
    in_flight: int = 256 * MIB
    ahead: int = 256 * MIB
    host: int | None = None
    strict: bool = False


LIMITS = TransferLimits()
_CALLS_AHEAD = 16  # among which copies to bring up are looked for


def streams_of(device: torch.device) -> Any:
    """Return torch's module for the streams of ``device``, such as ``torch.cuda``.

    None if its memory is host memory, or it has no streams: then nothing is to be copied, as on MPS.
    """
    module = getattr(torch, device.type, None) if device.type not in ("cpu", "meta") else None
    return module if all(hasattr(module, name) for name in ("Stream", "stream", "current_stream")) else None


def pinned_memory(size: int) -> torch.Tensor:
    """Return uninitialised host memory of ``size`` bytes, of the kind that is fast to copy."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


# -- Copies


class HostCopy:
    """The bytes of one storage in host memory, from when its copy down starts; see Note [Transfers].

    ``source``: those on the device, as long as they stay there. ``memory``: those in host memory. ``call``: the region
    call that reads them in backward. ``task``: the backward that asked for them last.
    """

    __slots__ = (
        "__weakref__", "call", "down", "home", "memory", "size", "source", "target", "target_home", "task", "transfers",
        "up",
    )  # fmt: skip

    def __init__(self, transfers: Transfers, source: torch.Tensor, memory: torch.Tensor, call: CallNode | None) -> None:
        self.transfers, self.call = transfers, call
        self.source: torch.Tensor | None = source
        self.memory = memory
        self.size = source.numel()
        self.home: Any = None  # the stream that owns the memory of the source
        self.down: Any = None  # the events after the copies
        self.up: Any = None
        self.target: torch.Tensor | None = None
        self.target_home: Any = None
        self.task = NO_TASK - 1
        if call is not None:
            call.copies[self] = None

    def __del__(self) -> None:
        """Free what it still holds; takes no lock, see Note [Transfers]."""
        try:
            self.free_source()
            self.free_target()
        except Exception:  # while the interpreter shuts down, names may be gone
            pass

    def free_source(self) -> None:
        """Let the stream that owns the source wait for the copy down, and release the source."""
        if self.source is not None and self.down is not None:
            self.home.wait_event(self.down)
        self.source = None

    def free_target(self) -> None:
        """Let the stream that owns the target wait for the copy up, and release the target."""
        if self.target is not None:
            self.target_home.wait_event(self.up)
            self.target = None


def _bytes_of(copies: Iterable[HostCopy]) -> int:
    return sum(copy.size for copy in copies)


class Transfers:
    """The copies between one device and host memory; see Note [Transfers].

    ``module`` is torch's module for the device's type (``torch.cuda``). All bytes are flat uint8 tensors.
    """

    def __init__(self, device: torch.device, module: Any, limits: TransferLimits = LIMITS) -> None:
        self.limits = limits
        self._device, self._module = device, module
        self._current: Callable[[], Any] = partial(module.current_stream, device)
        self._down, self._up = module.Stream(device), module.Stream(device)
        self._host_limit, self._failure = limits.host, ""
        self._is_full = False
        self._lock = threading.RLock()
        # All copies; and those with sources on the device, the oldest first.
        self._copies: weakref.WeakSet[HostCopy] = weakref.WeakSet()
        self._flying: weakref.WeakKeyDictionary[HostCopy, None] = weakref.WeakKeyDictionary()

    def put(self, sources: Sequence[torch.Tensor], call: CallNode | None = None) -> list[HostCopy | None]:
        """Start to copy ``sources``, which nothing else holds, down; free the oldest sources over the limit.

        ``call`` is the region call that reads them in backward. None stands for a source for which the host has no
        room.
        """
        with self._lock:
            copies = self.start(sources, call)
            self._flying.update((copy, None) for copy in copies if copy is not None)
            excess = _bytes_of(self._flying) - self.limits.in_flight
            for copy in [*self._flying]:
                if excess <= 0:
                    break
                excess -= copy.size
                self._flying.pop(copy)
                copy.free_source()
            return copies

    def start(self, sources: Sequence[torch.Tensor], call: CallNode | None = None) -> list[HostCopy | None]:
        """Start to copy ``sources`` down; what others hold too stays until ``settle``. See ``put``."""
        capturing = getattr(self._module, "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            found = "offloading cannot be captured in a CUDA graph: its replays would allocate no host memory"
            fix = "capture no region that offloads or has store host; save or recompute instead"
            raise RegionError(Problem("offload", found, fix=fix))
        with self._lock:
            copies = [self._on_host(source, call) for source in sources]
            made = [copy for copy in copies if copy is not None]
            if made:
                down = self._run(self._down, [(copy.memory, copy.source) for copy in made])
                for copy in made:
                    copy.home, copy.down = self._current(), down
            return copies

    def used_host_bytes(self) -> int:
        """Return the bytes of pinned memory in use; torch's allocator rounds sizes up to powers of two."""
        return sum(pinned_bytes(copy.size) for copy in self._copies)

    def _on_host(self, source: torch.Tensor, call: CallNode | None) -> HostCopy | None:
        """Return the copy to be made of ``source``; None if the limit does not allow it or the driver pins no more."""
        size, limit = source.numel(), self._host_limit
        try:
            if limit is None or self.used_host_bytes() + pinned_bytes(size) <= limit:
                copy = HostCopy(self, source, pinned_memory(size), call)
                self._copies.add(copy)
                return copy
        except RuntimeError as error:
            self._host_limit, self._failure = self.used_host_bytes(), f": {str(error).splitlines()[0]}"
        if self.limits.strict or not self._is_full:
            self._is_full = True
            problem = Problem(
                "host_memory",
                f"{bytes_text(size)} of values stay on the device, since host memory has no room for them: of the "
                f"{bytes_text(self._host_limit or 0)} that this process may pin, {bytes_text(self.used_host_bytes())} "
                f"are in use{self._failure}",
                fix="raise host_memory if the node has more, or offload less",
            )
            if self.limits.strict:
                raise RegionError(problem)
            warn(problem)
        return None

    def _run(self, stream: Any, pairs: Iterable[tuple[Any, Any]], after: Iterable[Any] = ()) -> Any:
        """Let ``stream`` copy targets from sources, after the current stream and events; return the event after it."""
        stream.wait_stream(self._current())
        for event in after:
            stream.wait_event(event)
        with self._module.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return stream.record_event()

    def settle(self, copy: HostCopy) -> None:
        """The source is about to be written to or freed: its stream and the current one wait for the copy down."""
        if copy.source is not None:
            current = self._current()
            if current != copy.home:
                current.wait_event(copy.down)
            copy.free_source()

    def look(self, copy: HostCopy) -> torch.Tensor:
        """Return the bytes on the device, which others read too; they stay there until the running backward ends."""
        with self._lock:
            task, current = current_graph_task_id(), self._current()
            found = copy.source if current == copy.home else None
            if found is None:
                if current != copy.target_home:
                    copy.free_target()
                if copy.target is None:
                    self._bring_up([copy], task)
                current.wait_event(copy.up)
                found = copy.target
            assert found is not None
            if task == NO_TASK:  # no end at which the target could be freed
                copy.free_target()
            elif copy.task != task:
                copy.task = task
                self._look_ahead(copy.call, task)
            return found

    def take(self, copy: HostCopy) -> torch.Tensor:
        """Return the bytes in memory on the device that is the caller's to write to."""
        with self._lock:
            found = self.look(copy)
            if found is copy.source:
                return found.clone()
            copy.target = None
            return found

    def _look_ahead(self, call: CallNode | None, task: int) -> None:
        """Backward has come to ``call``: bring up its values, and within the limit what backward reads next.

        Once in each backward.
        """
        if call is None or call.looked_ahead_in == (self, task):
            return
        call.looked_ahead_in = self, task
        self._bring_up([copy for copy in [*call.copies] if self._is_away(copy, task)], task)
        ahead = [one for one in self._copies if one.target is not None and one.task != task and one.call is not call]
        room = self.limits.ahead - _bytes_of(self._flying) - _bytes_of(ahead)
        for upcoming in islice(call.upcoming(), _CALLS_AHEAD):
            batch = []
            for copy in reversed([*upcoming.copies]):
                if not self._is_away(copy, task):
                    continue
                room -= copy.size
                if room < 0:
                    break
                batch.append(copy)
            self._bring_up(batch, task)
            if room < 0:
                return

    def _is_away(self, copy: HostCopy, task: int) -> bool:
        """Return whether the bytes of ``copy`` are in host memory alone, and were not brought up in this backward."""
        return copy.source is None and copy.target is None and copy.task != task and copy.transfers is self

    def _bring_up(self, copies: Sequence[HostCopy], task: int) -> None:
        if not copies:
            return
        home = self._current()
        targets = [torch.empty(copy.size, dtype=torch.uint8, device=self._device) for copy in copies]
        pairs = [(target, copy.memory) for target, copy in zip(targets, copies, strict=True)]
        up = self._run(self._up, pairs, dict.fromkeys(copy.down for copy in copies))
        for copy, target in zip(copies, targets, strict=True):
            copy.target, copy.target_home, copy.up = target, home, up
        if task != NO_TASK:
            when_backward_ends(partial(self._free_targets, [weakref.ref(copy) for copy in copies]))

    def _free_targets(self, copies: Iterable[weakref.ref[HostCopy]]) -> None:
        """A backward has ended: another one would bring them up again."""
        with self._lock:
            for reference in copies:
                if (copy := reference()) is not None:
                    copy.free_target()


def pinned_bytes(size: int) -> int:
    """Return what torch's allocator pins for so many bytes."""
    return 1 << max(size - 1, 0).bit_length()


class TransfersByDevice:
    """The transfers of each device, made for its first tensor. A copy, or what is unpickled, starts anew.

    ``host`` and ``strict`` take the place of those of ``LIMITS``.
    """

    def __init__(self, host: int | None = None, *, strict: bool = False) -> None:
        self.host, self.strict = host, strict
        self._of: dict[torch.device, Transfers | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TransfersByDevice, strict=self.strict), (self.host,)  # streams belong to this process

    def of(self, device: torch.device) -> Transfers | None:
        """Return the transfers between ``device`` and the host; None if there is nothing to gain from them."""
        if device not in self._of:
            module, limits = streams_of(device), replace(LIMITS, host=self.host, strict=self.strict)
            self._of.setdefault(device, Transfers(device, module, limits) if module is not None else None)
        return self._of[device]
