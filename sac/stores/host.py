"""Input store: host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sac.outer_hooks import PackHooks, active_hooks
from sac.stores.store import ArgumentInfo, InputStore, OnDevice, StoredTensor
from sac.stores.transfers import HostBuffer, HostCopy, Transfers, TransfersByDevice


class OnHost(InputStore):
    """Keeps a copy in host memory; if the device has streams, pinned and copied on other streams.

    The copy down runs while the region runs; the copy up starts before backward needs it (Note [Transfers]). An input
    that is already in host memory is copied there; its copy counts as memory of the input's device.
    """

    def __init__(self, transfers: TransfersByDevice | None = None) -> None:
        self._transfers = transfers if transfers is not None else TransfersByDevice()

    def __reduce__(self) -> tuple[Any, ...]:
        return OnHost, (self._transfers,)

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> StoredTensor:
        """Start to copy ``flat`` to the host; ``flat`` must not be written to or freed before ``settle``."""
        transfers = self._transfers.of(flat.device)
        if transfers is None:
            return OnDevice().put(flat, name)
        # Hooks around the region may hold the memory that they are given for longer than the region does.
        own = HostBuffer(transfers.host_memory(flat.nbytes)) if active_hooks() is not None else None
        return StoredOnHost.put(transfers, flat, name, own) or OnDevice().put(flat, name)

    def describe(self) -> str:
        """Say where inputs are kept."""
        return "in host memory"


class StoredOnHost(StoredTensor):
    """A copy of a flat tensor in host memory; see Note [Transfers]."""

    __slots__ = ("_copy", "_dtype")

    def __init__(self, copy: HostCopy, dtype: torch.dtype) -> None:
        super().__init__()
        self._copy: HostCopy | None = copy
        self._dtype = dtype

    @classmethod
    def put(
        cls, transfers: Transfers, flat: torch.Tensor, name: Callable[[], str], buffer: HostBuffer | None = None
    ) -> StoredOnHost | None:
        """Start to copy ``flat`` into ``buffer`` or the pool's memory; None if that has no room.

        The caller holds ``flat`` as well and may write to it after the region, so it waits for the copy at its end.
        """
        # Plain contiguous memory: for lazy bits or strides, torch would run more than a copy.
        source = flat.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
        copy = transfers.put_one(source, buffer)
        if copy is None:
            return None
        if isinstance(name, ArgumentInfo):
            copy.call = name.call
            name.call.add_copy(copy)
            name.call.follow(name.tensor)
        return cls(copy, flat.dtype)

    def fetch(self) -> torch.Tensor:
        """Return a copy on the device."""
        assert self._copy is not None, "fetched after it was dropped"
        if self.value is None:
            return self._copy.take().view(self._dtype)
        return self._copy.transfers.upload(super().fetch())

    def settle(self) -> None:
        """Make the current stream wait for the copy to the host, and release the source."""
        if self._copy is not None:
            self._copy.settle()

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Wait for the copy in host memory, then hand it to the hooks, which may read it at once."""
        if self._copy is not None and self.value is None:
            self.value = self._copy.finish().view(self._dtype)
            super().pack_with_outer_hooks(hooks)

    def prefetch(self) -> None:
        """Start to copy back what backward needs next."""
        if self._copy is not None and self._copy.call is not None:
            self._copy.transfers.look_ahead(self._copy.call)

    def drop(self) -> None:
        """Release the copy."""
        self._copy = None
        super().drop()

    @property
    def host_bytes(self) -> int:
        """The bytes of the copy: all of it is on the host."""
        return self._copy.size if self._copy is not None and self.value is None else 0
