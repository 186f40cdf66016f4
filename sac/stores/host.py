"""Input store: host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from sac.outer_hooks import OuterPacked, PackHooks, fetch, pack_with_outer_hooks
from sac.stores.store import OnDevice, StoredTensor

# -- Copies between a device and host memory

# Note [Copies on a side stream]
#
# All copies between one device and the host run on one side stream, so they are ordered among themselves: the next copy
# to host memory may overwrite it without checking that the last copy from it is done. Each copy starts after the work
# that the caller's stream had queued when the copy was requested. Nothing waits for a copy automatically: code that
# writes to or frees its source or its target calls `order` first, and code that reads the target on the host calls
# `finish`. So the caching allocators need no record of the side stream: memory returns to its original stream, which
# has waited. (torch guards pinned memory too: it is not reused before the copies that used it are done.)
#
# tests/unit/stores/test_host_streams.py checks this: it runs regions on simulated streams and finds every access that
# is not ordered. So do the tests marked gpu in tests/unit/stores/test_host.py.


class Copying(Protocol):
    """One copy under way."""

    def order(self) -> None:
        """Make all later work on the current stream and on the stream of the copy's caller wait for the copy."""

    def finish(self) -> None:
        """Block the host until the copy is done."""


class Copies(Protocol):
    """Copies between one device and the host."""

    def host_memory(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory of the kind that is fast to copy."""

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Copying:
        """Copy ``source`` to ``target``, one of them on the device and one on the host, both contiguous."""


class SideStream:
    """See Note [Copies on a side stream]. ``module`` is torch's module for the device's type: ``torch.cuda``."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module
        self._stream = module.Stream(device)

    def host_memory(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=True)

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Copying:
        """Queue the copy on the side stream."""
        caller = self.current()
        self._stream.wait_stream(caller)
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        return _Queued(self.current, caller, event)

    def current(self) -> Any:
        """Return the device's current stream."""
        return self._module.current_stream(self._device)


class _Queued:
    """A copy on the side stream."""

    __slots__ = ("_caller", "_current", "_event")

    def __init__(self, current: Callable[[], Any], caller: Any, event: Any) -> None:
        self._current = current
        self._caller = caller
        self._event = event

    def order(self) -> None:
        """Make both streams wait for the event."""
        self._caller.wait_event(self._event)
        current = self._current()
        if current != self._caller:
            current.wait_event(self._event)

    def finish(self) -> None:
        """Make the host wait for the event."""
        self._event.synchronize()


class DirectCopies:
    """Synchronous copies to and from a device without streams."""

    def host_memory(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return plain memory."""
        return torch.empty(elements, dtype=dtype, device="cpu")

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Copying:
        """Copy at once."""
        target.copy_(source)
        return _Done()


class _Done:
    """A copy that is done."""

    __slots__ = ()

    def order(self) -> None:
        """Nothing to do."""

    def finish(self) -> None:
        """Nothing to do."""


def has_own_memory(device: torch.device) -> bool:
    """Return whether ``device`` has memory other than host memory."""
    return device.type not in ("cpu", "meta")


def streams_of(device: torch.device) -> Any:
    """Return torch's module for the streams of ``device``, such as ``torch.cuda``; None if it has none, as on MPS."""
    module = getattr(torch, device.type, None) if has_own_memory(device) else None
    return module if all(hasattr(module, name) for name in ("Stream", "stream", "current_stream")) else None


class CopiesByDevice:
    """The side streams of one input store, each created for the first tensor on its device."""

    def __init__(self) -> None:
        self._of: dict[torch.device, Copies | None] = {}

    def of(self, device: torch.device) -> Copies | None:
        """Return the copies between ``device`` and the host; None if ``device`` uses host memory."""
        if device not in self._of:
            made: Copies | None = None
            if has_own_memory(device):
                streams = streams_of(device)
                made = DirectCopies() if streams is None else SideStream(device, streams)
            self._of.setdefault(device, made)
        return self._of[device]


# -- The store


class OnHost:
    """Keeps a copy in host memory; if the device has streams, pinned and copied on a side stream.

    An input that is already in host memory is copied there; its copy counts as memory of the input's device.
    """

    def __init__(self) -> None:
        self._copies = CopiesByDevice()

    def __reduce__(self) -> tuple[type[OnHost], tuple[()]]:
        return OnHost, ()  # streams belong to this process

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return True: any tensor is accepted."""
        return True

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> StoredTensor:
        """Start to copy ``flat`` to the host; ``flat`` must not be written to or freed before ``settle``."""
        copies = self._copies.of(flat.device)
        if copies is None:
            return OnDevice().put(flat, name)
        return StoredOnHost(copies, flat, copies.host_memory(flat.numel(), flat.dtype))

    def describe(self) -> str:
        """Say where inputs are kept."""
        return "in host memory"


class StoredOnHost:
    """A copy of ``flat`` in host memory; see Note [Copies on a side stream]."""

    __slots__ = ("_copies", "_copying", "_device", "_host", "_source")
    fresh = True

    def __init__(self, copies: Copies, flat: torch.Tensor, host: torch.Tensor) -> None:
        self._copies = copies
        self._device = flat.device
        self._host: torch.Tensor | OuterPacked | None = host
        # Plain contiguous memory: for lazy bits or strides, torch would run more than a copy.
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
        """Make the current stream wait for the copy to the host, and release the source."""
        if self._source is not None:
            self._copying.order()
            self._source = None

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Wait for the copy in host memory, then hand it to the hooks, which may read it at once."""
        if isinstance(self._host, torch.Tensor):
            self._copying.finish()
            self._host = pack_with_outer_hooks(self._host, hooks)

    def prefetch(self) -> None:
        """Nothing to do."""

    def drop(self) -> None:
        """Release the copy; torch does not reuse pinned memory while a copy uses it."""
        self._host = self._source = None

    @property
    def local(self) -> torch.Tensor | None:
        """None: nothing is held on the device."""
        return None

    @property
    def host_bytes(self) -> int:
        """The bytes of the copy: all of it is on the host."""
        return self._host.nbytes if isinstance(self._host, torch.Tensor) else 0
