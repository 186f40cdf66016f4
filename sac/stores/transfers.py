"""Copies between a device and host memory: streams, pinned memory, and when the device's memory is freed."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from sac.errors import Problem, RegionError, warn
from sac.policy.read import bytes_text
from sac.stores.backward_order import CallNode
from sac.torch_private import NO_TASK, ending_task, when_backward_ends

# Note [Transfers]
#
# Each device has one stream for copies to host memory (*down*) and one for copies back (*up*), so that both directions
# of the link are busy at once. `Transfers.put` copies storages down into pinned memory; a `HostCopy` is one of them.
# Streams run independently of each other, so every access waits for the one before it:
#
#   the copy down    waits for the stream that `put` was called on, which made the source; in memory that is used again
#                    (a slot), also for the copies up
#   the copy up      waits for the copy down, and for the stream that its target was allocated on
#   a reader         waits for the copy up, on its own stream
#   freeing memory   The stream on which the memory was allocated waits for the copy that uses it, and for other streams
#                    that have read it. Then the reference is released: what that stream runs next comes after the
#                    copy.
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
#
# tests/unit/stores/test_transfers.py runs random programs on simulated streams: no access is unordered, and all bytes
# are right.

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Limits in bytes. ``smallest``: of storages that rules offload.

    ``host``: of pinned memory, None: no limit. ``strict``: whether it is an error if the host has no room.
    """

    smallest: int = MIB
    in_flight: int = 320 * MIB
    ahead: int = 320 * MIB
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


# -- Host memory


def pinned_memory(size: int) -> torch.Tensor:
    """Return uninitialised host memory of ``size`` bytes, of the kind that is fast to copy."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


class HostMemory:
    """Host memory for copies, within a limit.

    torch's allocator of pinned memory rounds sizes up to powers of two, and uses memory again when the copies that used
    it are done. ``limit``: of what is in use at once; None: no limit. ``failure``: why pinning failed, which is then
    taken for the limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.failure = ""
        self._used_bytes = 0
        self._returned: deque[int] = deque()

    def take(self, size: int) -> torch.Tensor | None:
        """Return ``size`` bytes, None if the limit does not allow for it."""
        rounded = _rounded(size)
        if self.limit is not None and self.used_bytes + rounded > self.limit:
            return None
        try:
            memory = pinned_memory(size)
        except RuntimeError as error:  # the driver pins no more
            self.limit, self.failure = self.used_bytes, str(error).partition("\n")[0]
            return None
        self._used_bytes += rounded
        return memory

    def give(self, size: int) -> None:
        """Count ``size`` bytes that were taken no longer. May be called from any thread."""
        self._returned.append(_rounded(size))

    @property
    def used_bytes(self) -> int:
        """The bytes in use."""
        while self._returned:
            self._used_bytes -= self._returned.popleft()
        return self._used_bytes


def _rounded(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


# -- Copies


class HostCopy:
    """The bytes of one storage in host memory, from when its copy down starts; see Note [Transfers].

    ``source``: those on the device, as long as they stay there. ``memory``: those in host memory; ``is_slot``: others
    own it. ``call``: the region call that reads them in backward. ``task``: the backward that asked for them last.
    ``figures.spared_bytes`` counts the bytes if backward finds them in the source.
    """

    __slots__ = (
        "__weakref__", "call", "down", "figures", "home", "is_slot", "memory", "readers", "size", "source", "target",
        "target_home", "task", "transfers", "up",
    )  # fmt: skip

    def __init__(
        self, transfers: Transfers, source: torch.Tensor, memory: torch.Tensor, call: CallNode | None, *, is_slot: bool
    ) -> None:
        self.transfers, self.call, self.is_slot = transfers, call, is_slot
        self.source: torch.Tensor | None = source
        self.memory = memory
        self.size = source.numel()
        self.figures: Any = None
        self.home: Any = None  # the stream that owns the memory of the source
        self.down: Any = None  # the events after the copies
        self.up: Any = None
        self.target: torch.Tensor | None = None
        self.target_home: Any = None
        self.readers: tuple[Any, ...] = ()  # other streams that have read the source or the target
        self.task = NO_TASK - 1
        if call is not None:
            call.add_copy(self)

    def __del__(self) -> None:
        try:  # noqa: SIM105  (a context would take longer than what is in it)
            self.transfers.retire(self)
        except Exception:  # while the interpreter shuts down, names may be gone
            pass


def _bytes_of(copies: Iterable[HostCopy]) -> int:
    return sum(copy.size for copy in copies)


class Transfers:
    """The copies between one device and host memory; see Note [Transfers].

    ``module`` is torch's module for the device's type (``torch.cuda``). All bytes are flat uint8 tensors.
    """

    def __init__(self, device: torch.device, module: Any, limits: TransferLimits = LIMITS) -> None:
        self.limits = limits
        self._device, self._module = device, module
        self._down, self._up = module.Stream(device), module.Stream(device)
        self.host = HostMemory(limits.host)
        self._is_full = False
        self._lock = threading.RLock()
        # Copies with sources on the device, the oldest first; and those brought up ahead and not asked for yet.
        self._flying: weakref.WeakKeyDictionary[HostCopy, None] = weakref.WeakKeyDictionary()
        self._early: weakref.WeakSet[HostCopy] = weakref.WeakSet()

    def put(self, sources: Sequence[torch.Tensor], call: CallNode | None = None) -> list[HostCopy | None]:
        """Start to copy ``sources``, which nothing else holds, down; free the oldest sources over the limit.

        ``call`` is the region call that reads them in backward. None stands for a source for which the host has no
        room.
        """
        with self._lock:
            copies = self._start_down(sources, call)
            for copy in copies:
                if copy is not None:
                    self._flying[copy] = None
            excess = _bytes_of(self._flying) - self.limits.in_flight
            for copy in [*self._flying]:
                if excess <= 0:
                    break
                excess -= copy.size
                self._free_source(copy)
            return copies

    def put_one(
        self, source: torch.Tensor, call: CallNode | None = None, slot: torch.Tensor | None = None
    ) -> HostCopy | None:
        """Start to copy ``source``, which others hold too, into ``slot`` or into memory of its own; see ``settle``.

        None: the host has no room.
        """
        with self._lock:
            return self._start_down([source], call, slot)[0]

    def _start_down(
        self, sources: Sequence[torch.Tensor], call: CallNode | None, slot: torch.Tensor | None = None
    ) -> list[HostCopy | None]:
        self._refuse_capture()
        copies: list[HostCopy | None] = []
        for source in sources:
            memory = slot if slot is not None else self.host.take(source.numel())
            copy = None if memory is None else HostCopy(self, source, memory, call, is_slot=slot is not None)
            copies.append(copy)
        without = sum(source.numel() for source, copy in zip(sources, copies, strict=True) if copy is None)
        if without:
            self._tell_full(without)
        made = [copy for copy in copies if copy is not None]
        if made:
            if slot is not None:
                self._down.wait_stream(self._up)
            down = self._run(self._down, [(copy.memory, copy.source) for copy in made])
            for copy in made:
                copy.home, copy.down = self.current(), down
        return copies

    def _tell_full(self, size: int) -> None:
        """Warn once that values of ``size`` bytes stay on the device; raise ``RegionError`` under ``strict``."""
        if self._is_full and not self.limits.strict:
            return
        self._is_full = True
        why = f": {self.host.failure}" if self.host.failure else ""
        problem = Problem(
            "host_memory",
            f"{bytes_text(size)} of values stay on the device, since host memory has no room for them: of the "
            f"{bytes_text(self.host.limit or 0)} that this process may pin, {bytes_text(self.host.used_bytes)} are in "
            f"use{why}",
            fix="raise host_memory if the node has more, or offload less",
        )
        if self.limits.strict:
            raise RegionError(problem)
        warn(problem)

    def _refuse_capture(self) -> None:
        capturing = getattr(self._module, "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            found = "offloading cannot be captured in a CUDA graph: its replays would allocate no host memory"
            fix = "capture no region that offloads or has store host; save or recompute instead"
            raise RegionError(Problem("offload", found, fix=fix))

    def _run(self, stream: Any, pairs: Iterable[tuple[Any, Any]], after: Iterable[Any] = ()) -> Any:
        """Let ``stream`` copy targets from sources, after the current stream and events; return the event after it."""
        stream.wait_stream(self.current())
        for event in after:
            stream.wait_event(event)
        with self._module.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return stream.record_event()

    def settle(self, copy: HostCopy) -> None:
        """The source is about to be written to or freed: its stream and the current one wait for the copy down."""
        if copy.source is not None:
            current = self.current()
            if current != copy.home:
                current.wait_event(copy.down)
            self._free_source(copy)

    def look(self, copy: HostCopy) -> torch.Tensor:
        """Return the bytes on the device, which others read too; they stay there until the running backward ends."""
        with self._lock:
            task, current = ending_task(), self.current()
            found, home = copy.source, copy.home
            if found is None:
                if copy.target is None:
                    self._bring_up([copy], task)
                found, home = copy.target, copy.target_home
                current.wait_event(copy.up)
            assert found is not None
            if current != home and current not in copy.readers:
                copy.readers = *copy.readers, current
            if task == NO_TASK:  # no end at which the target could be freed
                self._free_target(copy)
            elif copy.task != task:
                copy.task = task
                self._early.discard(copy)
                if copy.source is not None and copy.figures is not None:
                    copy.figures.spared_bytes, copy.figures = copy.figures.spared_bytes + copy.size, None
                self.look_ahead(copy.call)
            return found

    def take(self, copy: HostCopy) -> torch.Tensor:
        """Return the bytes in new memory on the device, which is the caller's to write to."""
        with self._lock:
            task, current = ending_task(), self.current()
            if copy.target is not None and current != copy.target_home:
                self._free_target(copy)  # the caller's memory has to belong to its stream
            if copy.target is None:
                self._bring_up([copy], task)
            current.wait_event(copy.up)
            self._early.discard(copy)
            found, copy.target, copy.task = copy.target, None, task
            assert found is not None
            return found

    def look_ahead(self, call: CallNode | None) -> None:
        """Backward has come to ``call``: bring up its values, and within the limit what backward reads next.

        Once in each backward.
        """
        with self._lock:
            task = ending_task()
            if call is None or task == NO_TASK or call.looked_ahead_in == (self, task):
                return
            call.looked_ahead_in = self, task
            own = call.alive()
            self._bring_up([copy for copy in own if self._is_away(copy, task)], task)
            self._early.difference_update(own)
            room = self.limits.ahead - _bytes_of(self._flying) - _bytes_of(self._early)
            for upcoming in islice(call.upcoming(), _CALLS_AHEAD):
                batch = []
                for copy in reversed(upcoming.alive()):
                    if not self._is_away(copy, task):
                        continue
                    room -= copy.size
                    if room < 0:
                        break
                    batch.append(copy)
                self._bring_up(batch, task)
                self._early.update(batch)
                if room < 0:
                    return

    def retire(self, copy: HostCopy) -> None:
        """Free everything that ``copy``, which is dying, still holds; takes no lock, see Note [Transfers]."""
        if copy.source is not None and copy.down is not None:
            self._release(copy, copy.home, copy.down)
        if copy.target is not None:
            self._release(copy, copy.target_home, copy.up)
        if not copy.is_slot:
            self.host.give(copy.size)

    def _is_away(self, copy: HostCopy, task: int) -> bool:
        """Return whether the bytes of ``copy`` are in host memory alone, and were not brought up in this backward."""
        return copy.source is None and copy.target is None and copy.task != task and copy.transfers is self

    def _bring_up(self, copies: Sequence[HostCopy], task: int) -> None:
        if not copies:
            return
        home = self.current()
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
                    self._free_target(copy)

    def _free_source(self, copy: HostCopy) -> None:
        self._release(copy, copy.home, copy.down)
        copy.source = None
        self._flying.pop(copy, None)

    def _free_target(self, copy: HostCopy) -> None:
        if copy.target is not None:
            self._release(copy, copy.target_home, copy.up)
            copy.target = None
            self._early.discard(copy)

    def _release(self, copy: HostCopy, home: Any, done: Any) -> None:
        """Let the stream ``home``, whose memory is about to be freed, wait for a copy and for other streams' reads."""
        home.wait_event(done)
        for reader in copy.readers:
            if reader != home:
                home.wait_stream(reader)

    def current(self) -> Any:
        """Return the device's current stream."""
        return self._module.current_stream(self._device)


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
            module, host = streams_of(device), LIMITS.host if self.host is None else self.host
            limits = replace(LIMITS, host=host, strict=self.strict)
            self._of.setdefault(device, Transfers(device, module, limits) if module is not None else None)
        return self._of[device]
