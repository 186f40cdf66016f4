"""Input store: host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sac.stores.store import ArgumentInfo, InputStore, OnDevice, StoredTensor
from sac.stores.transfers import HostCopy, Transfers, TransfersByDevice


class OnHost(InputStore):
    """Keeps a copy in pinned host memory, copied on other streams.

    The copy down runs while the region runs; the copy up starts before backward needs it (Note [Transfers]). An input
    that is already in host memory is copied there; its copy counts as memory of the input's device.
    """

    def __init__(self, transfers: TransfersByDevice | None = None) -> None:
        self._transfers = transfers if transfers is not None else TransfersByDevice()

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> StoredTensor:
        """Start to copy ``flat`` to the host; ``flat`` must not be written to or freed before ``settle``."""
        transfers = self._transfers.of(flat.device)
        stored = StoredOnHost.put(transfers, flat, name) if transfers is not None else None
        return stored if stored is not None else OnDevice().put(flat, name)

    def describe(self) -> str:
        """Say where inputs are kept."""
        return "in host memory"


class StoredOnHost(StoredTensor):
    """A copy of a flat tensor in host memory; see Note [Transfers]."""

    __slots__ = ("_copy", "_dtype")

    def __init__(self, copy: HostCopy, dtype: torch.dtype) -> None:
        self._copy, self._dtype = copy, dtype

    @classmethod
    def put(
        cls, transfers: Transfers, flat: torch.Tensor, name: Callable[[], str], slot: torch.Tensor | None = None
    ) -> StoredOnHost | None:
        """Start to copy ``flat`` into ``slot`` or memory of its own; None if there is no room.

        The caller holds ``flat`` as well and may write to it after the region, so it waits for the copy at its end.
        """
        # Plain contiguous memory: for lazy bits or strides, torch would run more than a copy.
        source = flat.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
        call = None
        if isinstance(name, ArgumentInfo):
            call = name.call
            call.follow(name.tensor)
        copy = transfers.put_one(source, call, slot)
        return cls(copy, flat.dtype) if copy is not None else None

    def fetch(self) -> torch.Tensor:
        """Return a copy on the device."""
        return self._copy.transfers.take(self._copy).view(self._dtype)

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of the copy: all of it is on the host."""
        return 0, self._copy.size

    def settle(self) -> None:
        """Make the current stream wait for the copy to the host, and release the source."""
        self._copy.transfers.settle(self._copy)

    def prefetch(self) -> None:
        """Start to copy back what backward needs next."""
        self._copy.transfers.look_ahead(self._copy.call)
