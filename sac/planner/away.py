"""Transfers of a plan's steps: values leave the device and come back as on a device with streams, without any data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sac.policy.model import OffloadSection
from sac.stores.backward_order import CallNode
from sac.stores.transfers import HostBuffer, HostCopy, HostPool, TransferLimits, Transfers, TransfersByDevice

# Note [Transfers without data]
#
# What is on the device at each moment depends on the order of calls and on sizes, never on time (Note [Transfers]). So
# a step on tensors without data, with the same limits, measures it to the byte: the very code that starts copies and
# frees memory, and that cuts pinned memory into buffers, runs. Only the bytes themselves are missing, and the host
# memory that would hold them.


@dataclass(frozen=True, slots=True)
class HostUse:
    """The host memory of a step in bytes: the most that has waited at once, and what the pool has to pin for it.

    If some values found no room within the limit, ``pinned`` is the limit and the bytes of these.
    """

    waiting: int = 0
    pinned: int = 0


class _Sized:
    """Host memory of which only the size is there. It is cut as a flat tensor of bytes is."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size

    def numel(self) -> int:
        """Return the number of bytes."""
        return self.size

    def __getitem__(self, part: slice) -> _Sized:
        return _Sized(len(range(self.size)[part]))


class _NoHostMemory(HostPool):
    """Cuts the slabs of a real pool, without memory, and counts."""

    def __init__(self, limit: int | None) -> None:
        make: Any = _Sized
        super().__init__(make, limit)
        self._waiting = self._most = self._missing = 0

    def take(self, size: int) -> HostBuffer | None:
        """See ``HostPool.take``."""
        found = super().take(size)
        if found is None:
            self._missing += size
        else:
            self._waiting += size
            self._most = max(self._most, self._waiting)
        return found

    def give(self, buffer: HostBuffer) -> None:
        """See ``HostPool.give``."""
        self._waiting -= buffer.asked
        super().give(buffer)

    @property
    def use(self) -> HostUse:
        """What the step has used so far."""
        return HostUse(self._most, (self.limit or 0) + self._missing if self._missing else self.slab_bytes)


class _TransfersWithoutData(Transfers):
    """See Note [Transfers without data]."""

    def __init__(self, device: torch.device, limits: TransferLimits) -> None:
        super().__init__(device, None, limits)
        self.is_async = True
        self.pool = _NoHostMemory(limits.host if isinstance(limits.host, int) else None)
        self._empty: torch.Tensor | None = None  # the targets are made like it

    def put(self, sources: Sequence[torch.Tensor], call: CallNode | None = None) -> list[HostCopy | None]:
        """See ``Transfers.put``."""
        self._empty = sources[0].new_empty(0)
        return super().put(sources, call)

    def put_one(self, source: torch.Tensor, buffer: HostBuffer | None = None) -> HostCopy | None:
        """See ``Transfers.put_one``."""
        self._empty = source.new_empty(0)
        return super().put_one(source, buffer)

    def _tell_full(self, size: int) -> None:
        """Do nothing: the pool counts what finds no room."""

    def copy_down(self, copy: HostCopy, source: torch.Tensor) -> None:
        """Do nothing: there is no data."""

    def copy_up(self, copy: HostCopy, target: torch.Tensor) -> None:
        """Do nothing: there is no data."""

    def new_target(self, copy: HostCopy) -> torch.Tensor:
        """See ``Transfers.new_target``."""
        assert self._empty is not None
        return self._empty.new_empty(copy.size)


MAKES_TARGETS = _TransfersWithoutData.new_target.__code__  # what it makes is for values that come back


class TransfersWithoutData(TransfersByDevice):
    """The transfers of one step of a plan, under the policy's limits; see Note [Transfers without data]."""

    def __init__(self, section: OffloadSection, host: int | None) -> None:
        super().__init__(host, section=section)

    def of(self, device: torch.device) -> Transfers:
        """Return the transfers of ``device``."""
        found = self._of.get(device)
        if found is None:
            found = self._of[device] = _TransfersWithoutData(device, self.limits)
        return found

    @property
    def host_use(self) -> HostUse:
        """The host memory that the step has used."""
        used = [one.pool.use for one in self._of.values() if one and isinstance(one.pool, _NoHostMemory)]
        return HostUse(sum(one.waiting for one in used), sum(one.pinned for one in used))
