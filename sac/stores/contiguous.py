"""Input store: one contiguous buffer with a slot for each input."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sac.errors import Problem, RegionError
from sac.outer_hooks import PackHooks, active_hooks
from sac.stores.host import OnHost, StoredOnHost
from sac.stores.store import InputStore, OnDevice, StoredOnDevice, StoredTensor
from sac.stores.transfers import HostBuffer, Transfers, TransfersByDevice, streams_of

# -- Slots of one buffer

# Note [Slots]
#
# A slot is taken when an input is put into it. It is given back by `drop`, or when its holder dies because a graph was
# dropped without backward. That can happen anywhere, even in a garbage collection while another slot is being taken. So
# giving back takes no lock: a ticket is popped from a dictionary, which succeeds only once, and the slot is appended to
# a deque.
#
# `fetch` copies the data out of the slot, because the slot's next holder writes to it. Tensors that a recomputation
# derives from its input may outlive the slot: a tensor saved for backward is a view of the input, and a later backward
# reads it.
#
# All slots can be given back while their holders are alive (`ContiguousBuffer.reset`). Each slot records the ticket
# that was last written into it. If that is not the holder's ticket, the holder's data is gone, and `fetch` raises.


class Slots:
    """``count`` slots of the size, dtype and device of ``flat``; see Note [Slots].

    They are on that device, or in host memory if ``transfers`` is given.
    """

    def __init__(self, count: int, flat: torch.Tensor, transfers: Transfers | None) -> None:
        self.size, self.dtype, self.device = flat.numel(), flat.dtype, flat.device
        elements = count * self.size
        self.transfers = transfers
        if transfers is None:
            self.memory, self.buffers = flat.new_empty(elements), []
        else:
            self.memory = transfers.host_memory(elements * flat.element_size())
            self.buffers = [HostBuffer(part) for part in self.memory.view(count, -1)]
        self.lock = threading.RLock()  # of the data, not of the right to a slot
        self.free = deque(range(count))
        self.held: dict[int, int] = {}  # ticket -> slot
        self.written = [-1] * count  # the ticket whose data each slot holds
        self._used: list[Any] = [None] * count  # the event after the last use of each slot, on a device with streams
        self._streams = streams_of(flat.device) if transfers is None else None

    def fit(self, flat: torch.Tensor) -> bool:
        """Return whether ``flat`` has the size, dtype and device of these slots."""
        return (self.size, self.dtype, self.device) == (flat.numel(), flat.dtype, flat.device)

    def view(self, index: int) -> torch.Tensor:
        """Return the memory of one slot."""
        return self.memory.narrow(0, index * self.size, self.size)

    def give_back(self, ticket: int) -> None:
        """Free the slot that ``ticket`` holds, if it holds one."""
        index = self.held.pop(ticket, None)
        if index is not None:
            self.free.append(index)

    def give_all_back(self) -> None:
        """Free every slot."""
        for ticket in tuple(self.held):
            self.give_back(ticket)

    def begin_use(self, index: int) -> None:
        """Make the current stream wait for the last use of a slot, which may have been on another stream."""
        if self._streams is not None:
            stream = self._streams.current_stream(self.device)
            self.memory.record_stream(stream)
            if self._used[index] is not None:
                stream.wait_event(self._used[index])

    def end_use(self, index: int) -> None:
        """Record the end of this use, for which the next use waits."""
        if self._streams is not None:
            self._used[index] = self._streams.current_stream(self.device).record_event()


class StoredInSlot(StoredTensor):
    """A flat tensor in a slot, and the right to that slot; see Note [Slots]."""

    __slots__ = ("_index", "_inner", "_slots", "_ticket")

    def __init__(self, slots: Slots, ticket: int, flat: torch.Tensor, name: Callable[[], str]) -> None:
        super().__init__()
        self._slots = slots
        self._ticket = ticket
        self._inner: Any
        self._index = index = slots.free.popleft()
        slots.held[ticket] = index
        with slots.lock:
            slots.written[index] = ticket
            if slots.transfers is None:
                slots.begin_use(index)
                self._inner = StoredOnDevice(slots.view(index).copy_(flat))
                slots.end_use(index)
            else:
                self._inner = StoredOnHost.put(slots.transfers, flat, name, slots.buffers[index])

    def fetch(self) -> torch.Tensor:
        """Return a copy of the data in the slot; raises ``RegionError`` if another region has the slot now."""
        if self.value is not None:
            return super().fetch().clone()
        slots = self._slots
        with slots.lock:
            if slots.written[self._index] != self._ticket:
                raise RegionError(_TAKEN)
            flat: torch.Tensor = self._inner.fetch()
            if not self._inner.fresh:
                slots.begin_use(self._index)
                flat = flat.clone()
                slots.end_use(self._index)
            return flat

    def settle(self) -> None:
        """Make sure that the copy into the slot is done before the source is written to or freed."""
        self._inner.settle()

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Hand a copy to the hooks, and give the slot back."""
        self.value = self.fetch()
        super().pack_with_outer_hooks(hooks)
        self._let_go()

    def prefetch(self) -> None:
        """Start to copy back what backward needs next."""
        if self.value is None:
            self._inner.prefetch()

    def drop(self) -> None:
        """Give the slot back."""
        super().drop()
        self._let_go()

    def _let_go(self) -> None:
        self._inner.drop()
        self._slots.give_back(self._ticket)

    def __del__(self) -> None:
        self._slots.give_back(self._ticket)

    @property
    def local(self) -> torch.Tensor | None:
        """The slot, if it is on the device."""
        return self._inner.local  # type: ignore[no-any-return]

    @property
    def host_bytes(self) -> int:
        """The bytes of the slot, if it is in host memory on behalf of a device."""
        return self._inner.host_bytes  # type: ignore[no-any-return]


_TAKEN = Problem(
    "contiguous buffer",
    "reset() took back the slot of this region's input, and another region's input lies in it now",
    fix="call reset() only when the forwards before it will have no backward",
)


# -- The store


class ContiguousBuffer(InputStore):
    """One buffer of ``num_checkpoints`` equal slots, allocated for the first input with its size, dtype and device.

    ``on_host``: the buffer is in host memory, pinned if the device has streams; ``transfers`` copy into it. The
    buffer is reallocated if an input of another size, dtype or device comes while every slot is free. Under
    saved-tensor hooks around a region (``save_on_cpu``, an outer region) no slot is taken: the hooks decide where
    the input is stored. (A reentrant region has no hooks, so regions inside it do take slots while it is
    recomputed.) Copying or unpickling a buffer gives an empty one with the same settings.
    """

    def __init__(
        self, num_checkpoints: int, *, on_host: bool = False, transfers: TransfersByDevice | None = None
    ) -> None:
        self.num_checkpoints = num_checkpoints
        self.on_host = on_host
        self._transfers = transfers if transfers is not None else TransfersByDevice()
        self._under_hooks = OnHost(self._transfers) if on_host else OnDevice()
        self._slots: Slots | None = None
        self._tickets = itertools.count()
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
            return StoredInSlot(self._slots_for(flat, name), next(self._tickets), flat, name)

    def describe(self) -> str:
        """Say where inputs are kept."""
        return f"in one buffer of {self.num_checkpoints} slots{' in host memory' if self.on_host else ''}"

    def reset(self) -> None:
        """Take every slot back, for example after forwards whose backward will never run.

        If such a backward does run, it raises ``RegionError`` once its region's slot has been given to another region.
        """
        if self._slots is not None:
            self._slots.give_all_back()

    def _slots_for(self, flat: torch.Tensor, name: Callable[[], str]) -> Slots:
        """Return slots that fit ``flat``, at least one of them free."""
        slots = self._slots
        if slots is not None and not slots.fit(flat):
            if slots.held:
                raise RegionError(_misfit(slots, flat, name()))
            slots = self._slots = None
        if slots is None:
            transfers = self._transfers.of(flat.device) if self.on_host else None
            slots = self._slots = Slots(self.num_checkpoints, flat, transfers)
        if not slots.free:
            raise RegionError(_none_free(self.num_checkpoints, name()))
        return slots


def _misfit(slots: Slots, flat: torch.Tensor, name: str) -> Problem:
    return Problem(
        name,
        f"it has {_kind(flat.numel(), flat.dtype, flat.device)}, but the slots of the contiguous buffer have "
        f"{_kind(slots.size, slots.dtype, slots.device)} and cannot be replaced while some are in use",
        fix="choose inputs of one size by `keep`, or another `store`; the size may change while no backward is pending",
    )


def _none_free(count: int, name: str) -> Problem:
    return Problem(
        name,
        f"no slot of the contiguous buffer is free: each of its {count} (num_checkpoints) holds the input of a region "
        "whose backward has not run",
        fix="let num_checkpoints be the number of regions whose backward is pending at once; of forwards whose "
        "backward will never run, drop the outputs or call reset()",
    )


def _kind(elements: int, dtype: torch.dtype, device: torch.device) -> str:
    return f"{elements} elements of {str(dtype).removeprefix('torch.')} on {device}"
