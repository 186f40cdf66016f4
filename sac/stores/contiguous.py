"""Input store: contiguous buffers with a slot for each input."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from sac.errors import Problem, RegionError
from sac.outer_hooks import active_hooks
from sac.stores.store import InputStore, OnDevice, StoredTensor
from sac.stores.transfers import streams_of

# Note [Slots]
#
# A slot is taken when an input is put into it, and free again when its holder dies. That can happen anywhere, even in a
# garbage collection while another slot is being taken: so giving back takes no lock.
#
# `fetch` copies the data out of the slot, because the slot's next holder writes to it. Tensors that a recomputation
# derives from its input may outlive the slot: a tensor saved for backward is a view of the input, and a later backward
# reads it.


class _Slots:
    """``count`` slots of the size, dtype and device of ``flat``. ``free``: their numbers, each with its last use."""

    def __init__(self, count: int, flat: torch.Tensor) -> None:
        self.kind = _kind(flat)
        self.memory = flat.new_empty((count, flat.numel()))
        self.free: deque[tuple[int, Any]] = deque((index, None) for index in range(count))
        self.lock = threading.Lock()
        self.streams = streams_of(flat.device)


class _Slot:
    """The right to a free slot; see Note [Slots]."""

    __slots__ = ("_index", "_last_use", "_slots")

    def __init__(self, slots: _Slots) -> None:
        self._slots = slots
        self._index, self._last_use = slots.free.popleft()

    def use(self, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Call ``function`` with the memory, after the slot's last use, maybe on another stream."""
        memory, streams = self._slots.memory, self._slots.streams
        if streams is None:
            return function(memory[self._index])
        with self._slots.lock:
            stream = streams.current_stream(memory.device)
            memory.record_stream(stream)
            if self._last_use is not None:
                stream.wait_event(self._last_use)
            result = function(memory[self._index])
            self._last_use = stream.record_event()
            return result

    def fetch(self) -> torch.Tensor:
        """Return a copy of the data in the slot."""
        return self.use(torch.Tensor.clone)

    def __del__(self) -> None:
        self._slots.free.append((self._index, self._last_use))


class ContiguousBuffer(InputStore):
    """A buffer of ``num_checkpoints`` equal slots for each argument of regions, allocated for the first such input.

    A buffer is reallocated if an input of another size, dtype or device comes while every slot is free. Under
    saved-tensor hooks around a region (``save_on_cpu``, an outer region) no slot is taken. (A reentrant region has no
    hooks, so regions inside it do take slots while it is recomputed.) A copy or an unpickled buffer is empty.
    """

    def __init__(self, num_checkpoints: int) -> None:
        self.num_checkpoints, self.place = num_checkpoints, f"in buffers of {num_checkpoints} slots"
        self._slots: dict[str, _Slots] = {}  # by the name of the argument
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ContiguousBuffer, (self.num_checkpoints,)

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> StoredTensor:
        """Copy ``flat`` into a free slot.

        Raises ``RegionError`` if no slot is free, or if ``flat`` does not have the slots' size, dtype and device while
        some of them are taken.
        """
        if active_hooks() is not None:
            return OnDevice().put(flat, name)
        with self._lock:
            slot = _Slot(self._slots_for(flat, name))
        slot.use(lambda memory: memory.copy_(flat))
        return StoredTensor(slot.fetch, (flat.nbytes, 0))

    def reset(self) -> None:
        """Begin anew with every slot free, for example after forwards whose backward will never run.

        The memory of before lives on for inputs that are still in it, and is freed with the last of them.
        """
        self._slots.clear()

    def _slots_for(self, flat: torch.Tensor, name: Callable[[], str]) -> _Slots:
        """Return slots that fit ``flat``, at least one of them free."""
        slots = self._slots.get(name())
        if slots is None or (slots.kind != _kind(flat) and len(slots.free) == self.num_checkpoints):
            self._slots.pop(name(), None)
            del slots  # frees its memory
            slots = self._slots[name()] = _Slots(self.num_checkpoints, flat)
        if slots.kind != _kind(flat):
            found = (
                f"it has {_kind(flat)}, but the slots of the contiguous buffer have {slots.kind} and cannot be "
                "replaced while some are in use"
            )
            fix = "choose inputs of one size by `keep`, or another `store`; without a pending backward it may change"
            raise RegionError(Problem(name(), found, fix=fix))
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
