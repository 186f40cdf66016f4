"""Kept inputs in host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sac.region.parking import PackHooks, Parked, fetch, park
from sac.region.stores.host_copies import Copies, CopiesByDevice, Copying
from sac.region.stores.placements import Here, Placed


class Host:
    """Keeps a copy in host memory: pinned, and copied on a stream of its own, where the device has streams.

    An input that lies in host memory already is copied there; its copy counts as one on the input's device.
    """

    def __init__(self) -> None:
        self._copies = CopiesByDevice()

    def __reduce__(self) -> tuple[type[Host], tuple[()]]:
        return Host, ()  # streams belong to this process

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Any tensor will do."""
        return True

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> Placed:
        """Start to copy ``flat`` to the host; it must not be written to or freed before ``settle``."""
        copies = self._copies.of(flat.device)
        if copies is None:
            return Here().put(flat, name)
        return PlacedOnHost(copies, flat, copies.host_memory(flat.numel(), flat.dtype))

    def describe(self) -> str:
        """Say where inputs are kept."""
        return "in host memory"


class PlacedOnHost:
    """A copy of ``flat`` in host memory; see Note [Copies on a side stream]."""

    __slots__ = ("_copies", "_copying", "_device", "_host", "_source")
    fresh = True

    def __init__(self, copies: Copies, flat: torch.Tensor, host: torch.Tensor) -> None:
        self._copies = copies
        self._device = flat.device
        self._host: torch.Tensor | Parked | None = host
        # As it lies: torch applies lazy bits and strides after or around a copy, which then is no longer one.
        self._source: torch.Tensor | None = flat.resolve_conj().resolve_neg().contiguous()
        self._copying: Copying = copies.start(self._source, host)

    def fetch(self) -> torch.Tensor:
        """Return a copy on the device."""
        assert self._host is not None, "fetched after it was dropped"
        host = fetch(self._host)
        flat = torch.empty(host.numel(), dtype=host.dtype, device=self._device)
        self._copies.start(host, flat).order()
        return flat

    def settle(self) -> None:
        """Let the current stream wait for the copy to the host, and let go of what it was made from."""
        if self._source is not None:
            self._copying.order()
            self._source = None

    def park(self, hooks: PackHooks) -> None:
        """Hand the copy in host memory to the hooks, which may read it at once: wait until it is whole."""
        if isinstance(self._host, torch.Tensor):
            self._copying.finish()
            self._host = park(self._host, hooks)

    def prefetch(self) -> None:
        """Nothing."""

    def drop(self) -> None:
        """Let the copy go; torch gives pinned memory to nobody else while a copy uses it."""
        self._host = self._source = None

    @property
    def local(self) -> torch.Tensor | None:
        """Nothing is held on the device."""
        return None

    @property
    def host_bytes(self) -> int:
        """All of it is on the host."""
        return self._host.nbytes if isinstance(self._host, torch.Tensor) else 0
