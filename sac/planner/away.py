"""Transfers of a plan's steps: values leave the device and come back as on a device with streams, without any data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sac.policy.model import OffloadSection
from sac.stores.prefetch import CallNode
from sac.stores.transfers import HostBuffer, HostCopy, HostPool, TransferLimits, Transfers, TransfersByDevice

# Note [Transfers without data]
#
# What is on the device at each moment depends on the order of calls and on sizes, never on time (Note [Transfers]). So
# a step on tensors without data, with the same limits, measures it to the byte: the very code that starts copies and
# frees memory runs. Only the bytes themselves are missing, and the host memory that would hold them.


class _NoHostMemory(HostPool):
    """Gives out buffers without memory, within the limit."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(lambda size: torch.empty(0), limit)
        self.most = 0  # of the bytes that were in use

    def take(self, size: int) -> HostBuffer | None:
        """Return a buffer; None if the limit does not allow for it."""
        if self.limit is not None and self.slab_bytes + size > self.limit:
            return None
        self.slab_bytes += size
        self.most = max(self.most, self.slab_bytes)
        return _Sized(size)

    def give(self, buffer: HostBuffer) -> None:
        """Take the buffer back."""
        self.slab_bytes -= buffer.size if isinstance(buffer, _Sized) else 0


class _Sized(HostBuffer):
    """A buffer that knows its size only."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        super().__init__(torch.empty(0, device="meta"))
        self.size = size


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

    def copy_down(self, copy: HostCopy) -> None:
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
    def host_bytes(self) -> int:
        """The most bytes that have waited on the host at once."""
        return sum(one.pool.most for one in self._of.values() if one and isinstance(one.pool, _NoHostMemory))
