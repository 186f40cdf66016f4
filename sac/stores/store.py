"""Stores for region inputs between forward and backward: the protocol, and copies on the device and in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sac.stores.backward_order import CallNode
from sac.stores.layout import Layout
from sac.stores.transfers import HostCopy, TransfersByDevice

# Note [Kept inputs]
#
# A region holds its inputs until its recomputation. By default it holds the caller's data and checks that nothing wrote
# to it. With an `InputStoring` it copies the chosen inputs before the forward, so that the caller may free or overwrite
# them. The tensor is laid flat in memory order (`Layout`) and put into one or more stores, outermost first:
#
#   scattered      this rank's share of a tensor that every rank of a group holds (`scatter.Scattered`)
#   contiguous     a slot of one preallocated buffer (`contiguous.ContiguousBuffer`)
#   host           a copy in host memory (`OnHost`)
#
# Each store's `put` returns a `StoredTensor`, whose `fetch` returns the flat tensor; recomputation restores its layout.
# A chosen input is never also held by handles or by the recorder. What is stored is freed with its `StoredTensor`.


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor between forward and backward.

    ``fetch`` returns it, in memory that is the caller's to write to. ``bytes``: those held on the device, and in host
    memory on behalf of a device. ``copy``: the copy in host memory, which may still be on the way.
    """

    fetch: Callable[[], torch.Tensor]
    bytes: tuple[int, int]
    copy: HostCopy | None = None

    def settle(self) -> None:
        """The source of the copy is about to be written to or freed: make sure that the copy is done by then."""
        if self.copy is not None:
            self.copy.transfers.settle(self.copy)


@dataclass(frozen=True, slots=True)
class ArgumentInfo:
    """The argument that a flat tensor comes from, used while the tensor is put into a store; calling it returns a name.

    ``layout`` is that of ``tensor``, the argument; ``call`` is the region call, the same for all its inputs.
    ``position``: the region's path, and the position of the argument among the leaves of the call.
    """

    tensor: torch.Tensor
    layout: Layout
    call: CallNode
    position: tuple[str, int]

    def __call__(self) -> str:
        """Return the name of the argument in messages."""
        return f"argument {self.position[1]}"


class InputStore(ABC):
    """A way to keep flat tensors. ``place``: where, for reports."""

    place: str

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether this store can keep the input; if not, the region holds the caller's data."""
        return True

    @abstractmethod
    def put(self, flat: torch.Tensor, name: Any, /) -> StoredTensor:
        """Copy ``flat`` into the store; ``name``, an ``ArgumentInfo``, is not held, and called in errors only."""


class OnDevice(InputStore):
    """Keeps a copy on the tensor's device."""

    place = "on the device"

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> StoredTensor:
        """Copy ``flat``."""
        value = flat.clone()
        return StoredTensor(value.clone, (value.nbytes, 0))


class OnHost(InputStore):
    """Keeps a copy in pinned host memory, copied on other streams.

    The copy down runs while the region runs; the copy up starts before backward needs it (Note [Transfers]). An input
    that is already in host memory is copied there; its copy counts as memory of the input's device.
    """

    place = "in host memory"

    def __init__(self, transfers: TransfersByDevice | None = None) -> None:
        self._transfers = transfers if transfers is not None else TransfersByDevice()

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> StoredTensor:
        """Start to copy ``flat`` to the host; ``flat`` must not be written to or freed before ``settle``."""
        transfers, call = self._transfers.of(flat.device), None
        if transfers is None:
            return OnDevice().put(flat, name)
        # Plain contiguous memory: for lazy bits or strides, torch would run more than a copy.
        source = flat.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
        if isinstance(name, ArgumentInfo):
            call = name.call
            call.follow(name.tensor)
        [copy] = transfers.start([source], call)
        if copy is None:
            return OnDevice().put(flat, name)
        dtype = flat.dtype
        return StoredTensor(lambda: transfers.take(copy).view(dtype), (0, copy.size), copy)


@dataclass(frozen=True, slots=True)
class InputStoring:
    """Which inputs of a region are kept in ``store``; the others stay where the caller holds them.

    ``which``: ``first`` (the first floating-point tensor), ``all`` (every floating-point tensor), or a predicate of the
    input's position among the leaves of ``(args, kwargs)`` and the tensor.
    """

    store: InputStore
    which: str | Callable[[int, torch.Tensor], bool] = "first"

    def choose(self, leaves: Sequence[Any]) -> list[int]:
        """Return the positions of the leaves to put into the store."""
        which = self.which if callable(self.which) else _is_floating
        chosen = [
            (position, leaf)
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter) and which(position, leaf)
        ]
        chosen = chosen[:1] if self.which == "first" else chosen
        return [position for position, leaf in chosen if Layout.fits(leaf) and self.store.accepts(leaf)]


def _is_floating(position: int, tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@torch.no_grad()
def stored_input(tensor: torch.Tensor, store: InputStore, call: CallNode, position: tuple[str, int]) -> StoredTensor:
    """Put one input into a store; fetching it returns it with its original layout."""
    layout, flat = Layout.of(tensor.detach())
    stored = store.put(flat, ArgumentInfo(tensor, layout, call, position))
    return replace(stored, fetch=partial(_restored, layout, stored.fetch))


@torch.no_grad()
def _restored(layout: Layout, fetch: Callable[[], torch.Tensor]) -> torch.Tensor:
    return layout.restore(fetch())
