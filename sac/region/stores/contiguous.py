"""Kept inputs in the slots of one preallocated buffer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

from sac.errors import Problem, RegionError
from sac.region.parking import surrounding_hooks
from sac.region.stores.host import Host
from sac.region.stores.host_copies import CopiesByDevice
from sac.region.stores.placements import Here, Placed
from sac.region.stores.slots import PlacedInSlot, Slots


class ContiguousBuffer:
    """One buffer of ``num_checkpoints`` equal slots, made when the first input comes, of its size, dtype and device.

    ``on_host``: the buffer lies in host memory, pinned where the device has streams. The buffer is made anew when an
    input of another size comes while every slot is free. Under saved-tensor hooks that stand around a region
    (``save_on_cpu``, a region around it) no slot is taken: the hooks decide where the input lies. (A reentrant region
    has no hooks, so regions inside it do take slots while it is recomputed.) A copy or a pickle of a buffer is an empty
    one with the same settings.
    """

    def __init__(self, num_checkpoints: int, *, on_host: bool = False) -> None:
        self.num_checkpoints = num_checkpoints
        self.on_host = on_host
        self._under_hooks = Host() if on_host else Here()
        self._copies = CopiesByDevice()
        self._slots: Slots | None = None
        self._tickets = itertools.count()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty_buffer, (self.num_checkpoints, self.on_host)

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Any tensor will do."""
        return True

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> Placed:
        """Copy ``flat`` into a free slot.

        Raises ``RegionError`` when no slot is free, or when ``flat`` is not of the slots' size, dtype and device while
        some of them are taken.
        """
        if surrounding_hooks() is not None:
            return self._under_hooks.put(flat, name)
        with self._lock:
            return PlacedInSlot(self._slots_for(flat, name), next(self._tickets), flat)

    def describe(self) -> str:
        """Say where inputs are kept."""
        return f"in one buffer of {self.num_checkpoints} slots{' in host memory' if self.on_host else ''}"

    def reset(self) -> None:
        """Take every slot back, as after forwards whose backward will never run.

        A backward that does run raises ``RegionError`` once its region's slot has been given to another one.
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
            copies = self._copies.of(flat.device) if self.on_host else None
            slots = self._slots = Slots(self.num_checkpoints, flat, copies)
        if not slots.free:
            raise RegionError(_none_free(self.num_checkpoints, name()))
        return slots


def _empty_buffer(num_checkpoints: int, on_host: bool) -> ContiguousBuffer:
    return ContiguousBuffer(num_checkpoints, on_host=on_host)


def _misfit(slots: Slots, flat: torch.Tensor, name: str) -> Problem:
    return Problem(
        name,
        f"it has {_kind(flat.numel(), flat.dtype, flat.device)}; the slots of the contiguous buffer have "
        f"{_kind(slots.size, slots.dtype, slots.device)}, and some are taken",
        fix="choose inputs of one size by `keep`, or another `store`; the size may change while no backward is pending",
    )


def _none_free(count: int, name: str) -> Problem:
    return Problem(
        name,
        f"the contiguous buffer has {count} slots (num_checkpoints), and each holds the input of a region whose "
        "backward has not run",
        fix="let num_checkpoints be the number of regions whose backward is pending at once; of forwards whose "
        "backward will never run, drop the outputs or call reset()",
    )


def _kind(elements: int, dtype: torch.dtype, device: torch.device) -> str:
    return f"{elements} elements of {str(dtype).removeprefix('torch.')} on {device}"
