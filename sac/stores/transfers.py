"""Copies between a device and host memory: streams, pinned memory, and when the device's memory is freed."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from sac.errors import Problem, RegionError, SacWarning
from sac.policy.read import bytes_text
from sac.stores.backward_order import CallNode
from sac.torch_private import NO_TASK, ending_task, when_backward_ends

# Note [Transfers]
#
# Each device has one stream for copies to host memory (*down*) and one for copies back (*up*), so that both directions
# of the link are busy at once. `Transfers.put` copies storages down into pinned memory; a `HostCopy` is one of them.
# Streams run independently of each other, so every access waits for the one before it:
#
#   the copy down    waits for the stream that `put` was called on, which made the source; and for the last copy that
#                    used this buffer, which may have been one up
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
# The end. The graph holds the copies. When it drops one, torch's allocator gets the buffer back. That can happen in a
# garbage collection, in any thread: so nothing is locked then.
#
# tests/unit/stores/test_transfers.py runs random programs on simulated streams: no access is unordered, and all bytes
# are right. It also leaves out each wait, to show that it is needed.

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

# -- Devices


def has_own_memory(device: torch.device) -> bool:
    """Return whether ``device`` has memory other than host memory."""
    return device.type not in ("cpu", "meta")


def streams_of(device: torch.device) -> Any:
    """Return torch's module for the streams of ``device``, such as ``torch.cuda``; None if it has none, as on MPS."""
    module = getattr(torch, device.type, None) if has_own_memory(device) else None
    return module if all(hasattr(module, name) for name in ("Stream", "stream", "current_stream")) else None


class _OneStream:
    """Stands for the streams of a device without streams: everything happens at once."""

    def Stream(self, device: torch.device) -> _OneStream:  # noqa: N802 (as torch.cuda has it)
        return self

    def current_stream(self, device: torch.device) -> _OneStream:
        return self

    def stream(self, stream: _OneStream) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def wait(self, other: Any = None) -> None:
        """Nothing to wait for."""

    wait_stream = wait_event = synchronize = wait

    def record_event(self) -> _OneStream:
        return self


# -- Host memory


class HostBuffer:
    """Flat host memory; ``used``: the events after the last copies that used it."""

    __slots__ = ("memory", "used")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.used: tuple[Any, ...] = ()


class HostMemory:
    """Host memory for copies, within a limit.

    torch's allocator of pinned memory rounds sizes up to powers of two, and uses memory again when the copies that used
    it are done. ``make`` allocates bytes. ``limit``: of what is in use at once; None: no limit. ``failure``: why
    ``make`` has failed, which is taken for the limit.
    """

    def __init__(self, make: Callable[[int], torch.Tensor], limit: int | None = None) -> None:
        self.limit = limit
        self.failure = ""
        self._make = make
        self._used_bytes = 0
        self._returned: deque[int] = deque()

    def take(self, size: int) -> HostBuffer | None:
        """Return a buffer of ``size`` bytes, None if the limit does not allow for it."""
        pinned = _pinned_bytes(size)
        if self.limit is not None and self.used_bytes + pinned > self.limit:
            return None
        try:
            buffer = HostBuffer(self._make(size))
        except RuntimeError as error:  # the driver pins no more
            self.limit, self.failure = self.used_bytes, str(error).partition("\n")[0]
            return None
        self._used_bytes += pinned
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Count ``buffer`` no longer. May be called from any thread."""
        self._returned.append(_pinned_bytes(buffer.memory.numel()))

    @property
    def used_bytes(self) -> int:
        """The bytes in use."""
        while self._returned:
            self._used_bytes -= self._returned.popleft()
        return self._used_bytes

    def problem(self, size: int) -> Problem:
        """Return the problem that ``take`` found no room for values of ``size`` bytes."""
        why = f": {self.failure}" if self.failure else ""
        return Problem(
            "host_memory",
            f"{bytes_text(size)} of values stay on the device, since host memory has no room for them: of the "
            f"{bytes_text(self.limit or 0)} that this process may pin, {bytes_text(self.used_bytes)} are in use{why}",
            fix="raise host_memory if the node has more, or offload less",
        )


def _pinned_bytes(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


# -- Copies


class Done:
    """``event``, after copies; ``known``: the streams that have waited for it, so they need not wait again."""

    __slots__ = ("event", "known")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.known: list[Any] = []


class Tally:
    """The bytes of some copies. They may leave it in any thread, see Note [Transfers]."""

    __slots__ = ("_bytes", "_left")

    def __init__(self) -> None:
        self._bytes = 0
        self._left: deque[int] = deque()

    def add(self, copy: HostCopy) -> None:
        """Count ``copy`` until it leaves."""
        copy.tally, self._bytes = self, self._bytes + copy.size

    def leave(self, copy: HostCopy) -> None:
        """Count ``copy`` no longer."""
        copy.tally = None
        self._left.append(copy.size)

    @property
    def bytes(self) -> int:
        """The bytes of the copies that are counted."""
        while self._left:
            self._bytes -= self._left.popleft()
        return self._bytes


class HostCopy:
    """The bytes of one storage in host memory, from when its copy down starts; see Note [Transfers].

    ``source``: those on the device, as long as they stay there. ``call``: the region call that reads them in backward.
    ``task``: the backward that asked for them last. ``figures.spared_bytes`` counts the bytes if backward finds them in
    the source. ``tally``: what counts the bytes, while they are on their way down or have been brought up ahead.
    """

    __slots__ = (
        "__weakref__",
        "buffer",
        "call",
        "down",
        "figures",
        "home",
        "is_counted",
        "readers",
        "size",
        "source",
        "tally",
        "target",
        "target_home",
        "task",
        "transfers",
        "up",
    )

    def __init__(self, transfers: Transfers, source: torch.Tensor, buffer: HostBuffer, *, is_counted: bool) -> None:
        self.transfers = transfers
        self.source: torch.Tensor | None = source
        self.size = source.numel()
        self.buffer = buffer
        self.is_counted = is_counted
        self.call: CallNode | None = None
        self.figures: Any = None
        self.home: Any = None  # the stream that owns the memory of the source
        self.down: Done | None = None  # the copies
        self.up: Done | None = None
        self.target: torch.Tensor | None = None
        self.target_home: Any = None
        self.readers: tuple[Any, ...] = ()  # other streams that have read the source or the target
        self.task = NO_TASK - 1
        self.tally: Tally | None = None

    def take(self) -> torch.Tensor:
        """Return the bytes in new memory on the device, which is the caller's to write to."""
        return self.transfers.take(self)

    def settle(self) -> None:
        """The source is about to be written to or freed: its stream and the current one wait for the copy down."""
        self.transfers.settle(self)

    def finish(self) -> torch.Tensor:
        """Block the host until the copy down is done; return the bytes in host memory."""
        assert self.down is not None
        self.down.event.synchronize()
        return self.buffer.memory[: self.size]

    def __del__(self) -> None:
        try:  # noqa: SIM105  (a context would take longer than what is in it)
            self.transfers.retire(self)
        except Exception:  # while the interpreter shuts down, names may be gone
            pass


class Transfers:
    """The copies between one device and host memory; see Note [Transfers].

    ``module`` is torch's module for the device's type (``torch.cuda``), None for a device without streams: its copies
    are synchronous. All bytes are flat uint8 tensors.
    """

    def __init__(self, device: torch.device, module: Any, limits: TransferLimits = LIMITS) -> None:
        self.limits = limits
        self._device = device
        self.is_async = module is not None
        self._module = module if module is not None else _OneStream()
        self._down, self._up = self._module.Stream(device), self._module.Stream(device)
        self.host = HostMemory(self.host_memory, limits.host)
        self._is_full = False
        self._lock = threading.RLock()
        self._flying: deque[weakref.ref[HostCopy]] = deque()  # sources on the device, the oldest first
        self._sweep_at = 0  # so many of them, and those that have died are sought
        self._in_flight, self._early = Tally(), Tally()  # early: brought up ahead, and not asked for yet

    def host_memory(self, size: int) -> torch.Tensor:
        """Return uninitialised host memory of ``size`` bytes, of the kind that is fast to copy."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.is_async)

    def copy_down(self, copy: HostCopy, source: torch.Tensor) -> None:
        """Copy ``source`` to the host, on the current stream."""
        copy.buffer.memory[: copy.size].copy_(source, non_blocking=self.is_async)

    def new_target(self, copy: HostCopy) -> torch.Tensor:
        """Return memory of the device for the bytes of ``copy``."""
        return torch.empty(copy.size, dtype=torch.uint8, device=self._device)

    def copy_up(self, copy: HostCopy, target: torch.Tensor) -> None:
        """Copy the bytes back into ``target``, on the current stream."""
        target.copy_(copy.buffer.memory[: copy.size], non_blocking=self.is_async)

    def put(self, sources: Sequence[torch.Tensor], call: CallNode | None = None) -> list[HostCopy | None]:
        """Start to copy ``sources``, which nothing else holds, down; free the oldest sources over the limit.

        ``call`` is the region call that reads them in backward. None stands for a source for which the host has no
        room.
        """
        with self._lock:
            copies: list[HostCopy | None] = []
            made: list[HostCopy] = []
            without = 0
            for source in sources:
                buffer = self.host.take(source.numel())
                if buffer is None:
                    without += source.numel()
                    copies.append(None)
                    continue
                copy = HostCopy(self, source, buffer, is_counted=True)
                copies.append(copy)
                made.append(copy)
            if without:  # if this raises, the copies die, and give their buffers back
                self._tell_full(without)
            self._start_down(made)
            if len(self._flying) >= self._sweep_at:
                self._flying = deque(one for one in self._flying if one() is not None)
                self._sweep_at = 2 * len(self._flying) + 64
            for copy in made:
                reference = weakref.ref(copy)
                copy.call = call
                if call is not None:
                    call.copies.append(reference)
                self._in_flight.add(copy)
                self._flying.append(reference)
            while self._flying and self._in_flight.bytes > self.limits.in_flight:
                oldest = self._flying.popleft()()
                if oldest is not None:
                    self._free_source(oldest)
            return copies

    def put_one(self, source: torch.Tensor, buffer: HostBuffer | None = None) -> HostCopy | None:
        """Start to copy ``source``, which others hold too, into ``buffer`` or into memory of its own; see ``settle``.

        None: the host has no room.
        """
        with self._lock:
            is_counted = buffer is None
            buffer = buffer if buffer is not None else self.host.take(source.numel())
            if buffer is None:
                self._tell_full(source.numel())
                return None
            copy = HostCopy(self, source, buffer, is_counted=is_counted)
            self._start_down([copy])
            return copy

    def _tell_full(self, size: int) -> None:
        """Warn once that values of ``size`` bytes stay on the device; raise ``RegionError`` under ``strict``."""
        if not self._is_full or self.limits.strict:
            self._is_full = True
            problem = self.host.problem(size)
            if self.limits.strict:
                raise RegionError(problem)
            warnings.warn(str(problem), SacWarning, stacklevel=2)

    def _refuse_capture(self) -> None:
        capturing = getattr(self._module, "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            raise RegionError(
                Problem(
                    "offload",
                    "offloading cannot be captured in a CUDA graph: its replays would allocate no host memory",
                    fix="capture no region that offloads or has store host; save or recompute instead",
                )
            )

    def _start_down(self, copies: Sequence[HostCopy]) -> None:
        if not copies:
            return
        self._refuse_capture()
        home, done = self.current(), self._run(self._down, self.copy_down, copies, [copy.source for copy in copies])
        for copy in copies:
            copy.home, copy.down = home, done

    def _run(
        self,
        stream: Any,
        run: Callable[[HostCopy, torch.Tensor], None],
        copies: Sequence[HostCopy],
        on_device: Sequence[Any],
    ) -> Done:
        """Let ``stream`` copy between host memory and tensors ``on_device``, which the current stream has made."""
        stream.wait_stream(self.current())
        for used in _last_uses(copies):
            stream.wait_event(used)
        with self._module.stream(stream):
            for copy, tensor in zip(copies, on_device, strict=True):
                run(copy, tensor)
            event = stream.record_event()
        used = (event,)
        for copy in copies:
            copy.buffer.used = used
        return Done(event)

    def settle(self, copy: HostCopy) -> None:
        """See ``HostCopy.settle``.

        Takes no lock: as long as the source is there, only the call that has put it uses the copy.
        """
        if copy.source is not None:
            self._wait(self.current(), copy.down)
            self._free_source(copy)

    def look(self, copy: HostCopy) -> torch.Tensor:
        """Return the bytes on the device, which others read too; they stay there until the running backward ends."""
        with self._lock:
            task, current = ending_task(), self.current()
            found, home = copy.source, copy.home
            if found is None:
                if copy.target is None:
                    self._bring_up(self._siblings(copy, task), task)
                found, home = copy.target, copy.target_home
                self._wait(current, copy.up)
            assert found is not None
            if current != home and current not in copy.readers:
                copy.readers = *copy.readers, current
            if copy.task != task and task != NO_TASK:
                copy.task = task
                if copy.source is None:
                    if copy.tally is not None:
                        copy.tally.leave(copy)
                elif copy.figures is not None:
                    copy.figures.spared_bytes, copy.figures = copy.figures.spared_bytes + copy.size, None
                if copy.call is not None and copy.call.looked_ahead_in != (self, task):
                    self.look_ahead(copy.call)
            elif task == NO_TASK:  # no end at which the target could be freed
                self._free_target(copy)
            return found

    def take(self, copy: HostCopy) -> torch.Tensor:
        """See ``HostCopy.take``."""
        with self._lock:
            task, current = ending_task(), self.current()
            if copy.target is not None and current != copy.target_home:
                self._free_target(copy)  # the caller's memory has to belong to its stream
            if copy.target is None:
                self._bring_up(self._siblings(copy, task), task)
            self._wait(current, copy.up)
            if copy.tally is not None:
                copy.tally.leave(copy)
            found, copy.target, copy.task = copy.target, None, task
            assert found is not None
            return found

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device of a flat tensor in host memory."""
        with self._lock:
            current = self.current()
            target = torch.empty(host.numel(), dtype=host.dtype, device=self._device)
            self._up.wait_stream(current)
            with self._module.stream(self._up):
                target.copy_(host, non_blocking=self.is_async)
                event = self._up.record_event()
            current.wait_event(event)
            return target

    def look_ahead(self, call: CallNode) -> None:
        """Backward has come to ``call``: bring up what it reads next, within the limit; once in each backward."""
        task = ending_task()
        if task == NO_TASK:
            return
        with self._lock:
            if call.looked_ahead_in == (self, task):
                return
            call.looked_ahead_in = self, task
            for reference in call.copies:
                copy = reference()
                if copy is not None and copy.tally is self._early:
                    self._early.leave(copy)
            room = self.limits.ahead - self._in_flight.bytes - self._early.bytes
            for upcoming in islice(call.upcoming(), _CALLS_AHEAD):
                batch = []
                for reference in reversed(upcoming.copies):
                    copy = reference()
                    if copy is None or not self._is_away(copy) or copy.task == task:
                        continue
                    room -= copy.size
                    if room < 0:
                        break
                    batch.append(copy)
                self._bring_up(batch, task)
                for copy in batch:
                    self._early.add(copy)
                if room < 0:
                    return

    def retire(self, copy: HostCopy) -> None:
        """Free everything that ``copy``, which is dying, still holds; takes no lock, see Note [Transfers]."""
        if copy.source is not None and copy.down is not None:
            self._free_source(copy)
        if copy.target is not None:
            self._free_target(copy)
        if copy.is_counted:
            self.host.give(copy.buffer)

    def _siblings(self, copy: HostCopy, task: int) -> list[HostCopy]:
        """Return ``copy`` and, in a backward, those others of its region call that have to come up too."""
        found = [copy]
        if copy.call is not None and task != NO_TASK:  # so they are freed again
            for reference in copy.call.copies:
                one = reference()
                if one is not None and one is not copy and self._is_away(one):
                    found.append(one)
        return found

    def _is_away(self, copy: HostCopy) -> bool:
        """Return whether the bytes of ``copy`` are in host memory alone, and these transfers bring them up."""
        return copy.source is None and copy.target is None and copy.transfers is self

    def _bring_up(self, copies: Sequence[HostCopy], task: int) -> None:
        if not copies:
            return
        home, targets = self.current(), [self.new_target(copy) for copy in copies]
        done = self._run(self._up, self.copy_up, copies, targets)
        for copy, target in zip(copies, targets, strict=True):
            copy.target, copy.target_home, copy.up = target, home, done
        if task != NO_TASK:
            when_backward_ends(partial(_free_targets, [weakref.ref(copy) for copy in copies]))

    def _free_source(self, copy: HostCopy) -> None:
        if copy.source is not None:
            self._release(copy, copy.home, copy.down)
            copy.source = None

    def _free_target(self, copy: HostCopy) -> None:
        if copy.target is not None:
            self._release(copy, copy.target_home, copy.up)
            copy.target = None

    def _release(self, copy: HostCopy, home: Any, done: Done | None) -> None:
        """Let the stream ``home``, whose memory is about to be freed, wait for a copy and for other streams' reads."""
        self._wait(home, done)
        for reader in copy.readers:
            if reader != home:
                home.wait_stream(reader)
        if copy.tally is not None:
            copy.tally.leave(copy)

    def _wait(self, stream: Any, done: Done | None) -> None:
        """Let ``stream`` wait for a copy, unless it knows that it is ``done``."""
        if done is None or stream in done.known:
            return
        stream.wait_event(done.event)
        done.known.append(stream)

    def current(self) -> Any:
        """Return the device's current stream."""
        return self._module.current_stream(self._device)

    def is_idle(self) -> bool:
        """Return whether nothing is held: on the device, on its way, or in host memory."""
        return not self._in_flight.bytes and not self.host.used_bytes


def _free_targets(copies: Iterable[weakref.ref[HostCopy]]) -> None:
    """A backward has ended: another one would bring them up again."""
    for reference in copies:
        copy = reference()
        if copy is not None:
            copy.transfers._free_target(copy)


def _last_uses(copies: Iterable[HostCopy]) -> list[Any]:
    """Return the events after the last copies that used the buffers of ``copies``. Those of a batch have the same."""
    last: tuple[Any, ...] = ()
    found: list[Any] = []
    for copy in copies:
        used = copy.buffer.used
        if used is not last:
            found += used
            last = used
    return _distinct(found)


def _distinct(events: Iterable[Any]) -> list[Any]:
    return [*{id(event): event for event in events}.values()]


class TransfersByDevice:
    """The transfers of each device, made for its first tensor. A copy, or what is unpickled, starts anew.

    ``host`` and ``strict`` take the place of those of ``LIMITS``.
    """

    def __init__(self, host: int | None = None, *, strict: bool = False) -> None:
        self.host, self.strict = host, strict
        self._of: dict[torch.device, Transfers | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TransfersByDevice, strict=self.strict), (self.host,)  # streams belong to this process

    @property
    def limits(self) -> TransferLimits:
        """The limits of each device."""
        return replace(LIMITS, host=LIMITS.host if self.host is None else self.host, strict=self.strict)

    def of(self, device: torch.device) -> Transfers | None:
        """Return the transfers between ``device`` and the host; None if ``device`` uses host memory."""
        if device not in self._of:
            made = None
            if has_own_memory(device):
                made = Transfers(device, streams_of(device), self.limits)
            self._of.setdefault(device, made)
        return self._of[device]
