"""Input store: one contiguous buffer with a slot for each input."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sac.errors import Problem, RegionError
from sac.outer_hooks import active_hooks
from sac.stores.host import OnHost, StoredOnHost
from sac.stores.store import InputStore, OnDevice, StoredInside, StoredOnDevice, StoredTensor
from sac.stores.transfers import Transfers, TransfersByDevice, pinned_memory, streams_of

# Note [Slots]
#
# A slot is taken when an input is put into it, and free again when its holder dies. That can happen anywhere, even in a
# garbage collection while another slot is being taken: so giving back takes no lock.
#
# `fetch` copies the data out of the slot, because the slot's next holder writes to it. Tensors that a recomputation
# derives from its input may outlive the slot: a tensor saved for backward is a view of the input, and a later backward
# reads it.


class Slots:
    """``count`` slots of the size, dtype and device of ``flat``; see Note [Slots].

    They are on that device, or in host memory if ``transfers`` is given.
    """

    def __init__(self, count: int, flat: torch.Tensor, transfers: Transfers | None) -> None:
        self.kind = _kind(flat)
        self.transfers = transfers
        if transfers is None:
            self.memory = flat.new_empty((count, flat.numel()))
        else:
            self.memory = pinned_memory(count * flat.nbytes).view(count, flat.nbytes)
        self.free = deque(range(count))
        self.lock = threading.Lock()  # of uses of slots in other threads than the holder's
        self._used: list[Any] = [None] * count  # the event after the last use of each slot, on a device with streams
        self._streams = streams_of(flat.device) if transfers is None else None

    def begin_use(self, index: int) -> torch.Tensor:
        """Make the current stream wait for the last use of a slot, maybe on another stream; return its memory."""
        if self._streams is not None:
            stream = self._streams.current_stream(self.memory.device)
            self.memory.record_stream(stream)
            if self._used[index] is not None:
                stream.wait_event(self._used[index])
        return self.memory[index]

    def end_use(self, index: int) -> None:
        """Record the end of this use, for which the next use waits."""
        if self._streams is not None:
            self._used[index] = self._streams.current_stream(self.memory.device).record_event()


class StoredInSlot(StoredInside):
    """A flat tensor in a slot, and the right to that slot; see Note [Slots]."""

    __slots__ = ("_index", "_slots")

    def __init__(self, slots: Slots, flat: torch.Tensor, name: Callable[[], str]) -> None:
        self._index = index = slots.free.popleft()
        self._slots = slots
        slot = slots.begin_use(index)
        if slots.transfers is None:
            self.inner = StoredOnDevice(slot.copy_(flat))
            slots.end_use(index)
        else:
            inner = StoredOnHost.put(slots.transfers, flat, name, slot)
            assert inner is not None, "there is always room in a slot"
            self.inner = inner

    def fetch(self) -> torch.Tensor:
        """Return a copy of the data in the slot."""
        if self._slots.transfers is not None:
            return self.inner.fetch()
        with self._slots.lock:
            flat = self._slots.begin_use(self._index).clone()
            self._slots.end_use(self._index)
            return flat

    def __del__(self) -> None:
        self._slots.free.append(self._index)


class ContiguousBuffer(InputStore):
    """One buffer of ``num_checkpoints`` equal slots, allocated for the first input with its size, dtype and device.

    ``on_host``: the buffer is in host memory, pinned if the device has streams; ``transfers`` copy into it. The
    buffer is reallocated if an input of another size, dtype or device comes while every slot is free. Under
    saved-tensor hooks around a region (``save_on_cpu``, an outer region) no slot is taken. (A reentrant region has no
    hooks, so regions inside it do take slots while it is recomputed.) Copying or unpickling a buffer gives an empty one
    with the same settings.
    """

    def __init__(
        self, num_checkpoints: int, *, on_host: bool = False, transfers: TransfersByDevice | None = None
    ) -> None:
        self.num_checkpoints = num_checkpoints
        self.on_host = on_host
        self._transfers = transfers if transfers is not None else TransfersByDevice()
        self._under_hooks = OnHost(self._transfers) if on_host else OnDevice()
        self._slots: Slots | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(ContiguousBuffer, on_host=self.on_host, transfers=self._transfers)
        return again, (self.num_checkpoints,)

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> StoredTensor:
        """Copy ``flat`` into a free slot.

        Raises ``RegionError`` if no slot is free, or if ``flat`` does not have the slots' size, dtype and device while
        some of them are taken.
        """
        if active_hooks() is not None:
            return self._under_hooks.put(flat, name)
        with self._lock:
            return StoredInSlot(self._slots_for(flat, name), flat, name)

    def describe(self) -> str:
        """Say where inputs are kept."""
        return f"in one buffer of {self.num_checkpoints} slots{' in host memory' if self.on_host else ''}"

    def reset(self) -> None:
        """Begin anew with every slot free, for example after forwards whose backward will never run.

        The memory of before lives on for inputs that are still in it, and is freed with the last of them.
        """
        self._slots = None

    def _slots_for(self, flat: torch.Tensor, name: Callable[[], str]) -> Slots:
        """Return slots that fit ``flat``, at least one of them free."""
        slots = self._slots
        if slots is not None and slots.kind != _kind(flat):
            if len(slots.free) < self.num_checkpoints:
                found = (
                    f"it has {_kind(flat)}, but the slots of the contiguous buffer have {slots.kind} and cannot be "
                    "replaced while some are in use"
                )
                fix = (
                    "choose inputs of one size by `keep`, or another `store`; the size may change while no backward is "
                    "pending"
                )
                raise RegionError(Problem(name(), found, fix=fix))
            slots = self._slots = None  # frees its memory
        if slots is None:
            transfers = self._transfers.of(flat.device) if self.on_host else None
            slots = self._slots = Slots(self.num_checkpoints, flat, transfers)
        if not slots.free:
            found = (
                f"no slot of the contiguous buffer is free: each of its {self.num_checkpoints} (num_checkpoints) holds "
                "the input of a region whose backward has not run"
            )
            fix = (
                "let num_checkpoints be the number of regions whose backward is pending at once; of forwards whose "
                "backward will never run, drop the outputs or call reset()"
            )
            raise RegionError(Problem(name(), found, fix=fix))
        return slots


def _kind(flat: torch.Tensor) -> str:
    return f"{flat.numel()} elements of {str(flat.dtype).removeprefix('torch.')} on {flat.device}"
