"""Stores for region inputs between forward and backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sac.outer_hooks import OuterPacked, PackHooks, fetch, pack_with_outer_hooks
from sac.stores.backward_order import CallNode
from sac.stores.layout import Layout

# -- Input stores

# Note [Kept inputs]
#
# A region holds its inputs until its recomputation. By default it holds the caller's data and checks that nothing wrote
# to it. With an `InputStoring` it copies the chosen inputs before the forward, so that the caller may free or overwrite
# them. The tensor is laid flat in memory order (`Layout`) and put into one or more stores, outermost first:
#
#   scattered      this rank's share of a tensor that every rank of a group holds (`scatter.Scattered`)
#   contiguous     a slot of one preallocated buffer (`contiguous.ContiguousBuffer`)
#   host           a copy in host memory (`host.OnHost`)
#
# Each store's `put` returns a `StoredTensor`, whose `fetch` returns the flat tensor; recomputation restores its layout.
# A chosen input is never also held by handles or by the recorder.
#
# Example. The store is `Scattered(group, OnHost())` over 4 GPU ranks, and x is a transposed bfloat16[4096, 8192] of
# 64 MiB. `Layout.of` returns a flat view of 2^25 elements. `Scattered.put` takes this rank's 2^23 of them, and
# `OnHost.put` copies these 16 MiB to pinned memory. For the recomputation, `fetch` copies the share back to the device
# and gathers the 4 shares, and `Layout.restore` returns the transposed tensor.


class StoredTensor:
    """One flat tensor between forward and backward. Abstract.

    ``value``: the tensor, or what hooks around the region hold in its place. ``fresh``: whether each ``fetch``
    returns new memory, which may be written to. ``drop`` may be called more than once.
    """

    __slots__ = ("value",)
    fresh = True

    def __init__(self, value: torch.Tensor | None = None) -> None:
        self.value: torch.Tensor | OuterPacked | None = value

    def fetch(self) -> torch.Tensor:
        """Return the flat tensor."""
        assert self.value is not None, "a stored tensor was used after it was dropped"
        return fetch(self.value)

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Hand the tensor to the saved-tensor hooks around the region."""
        if isinstance(self.value, torch.Tensor):
            self.value = pack_with_outer_hooks(self.value, hooks)

    def drop(self) -> None:
        """Release the tensor."""
        self.value = None

    def settle(self) -> None:
        """The source of the copy is about to be written to or freed: make sure that the copy is done by then."""

    def prefetch(self) -> None:
        """Start to fetch what backward needs next, if that saves time."""

    @property
    def local(self) -> torch.Tensor | None:
        """The flat data held on the device, if any; valid before ``pack_with_outer_hooks``."""
        return self.value if isinstance(self.value, torch.Tensor) else None

    @property
    def host_bytes(self) -> int:
        """The bytes held in host memory on behalf of a device; valid before ``pack_with_outer_hooks``."""
        return 0


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
    name: Callable[[], str]

    def __call__(self) -> str:
        """Return how the call writes the argument: ``args[0]``."""
        return self.name()


class InputStore(ABC):
    """A way to keep flat tensors."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether this store can keep the input; if not, the region holds the caller's data."""
        return True

    @abstractmethod
    def put(self, flat: torch.Tensor, name: Any, /) -> StoredTensor:
        """Copy ``flat`` into the store; ``name``, an ``ArgumentInfo``, is not held, and called in errors only."""

    @abstractmethod
    def describe(self) -> str:
        """Say where inputs are kept, for reports: ``in host memory``."""


class OnDevice(InputStore):
    """Keeps a copy on the tensor's device."""

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> StoredTensor:
        """Copy ``flat``."""
        return StoredOnDevice(flat.clone())

    def describe(self) -> str:
        """Say where inputs are kept."""
        return "on the device"


class StoredOnDevice(StoredTensor):
    """A flat tensor on the device it came from."""

    __slots__ = ()
    fresh = False


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
        tensors = [
            (position, leaf)
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)
        ]
        if callable(self.which):
            chosen = [(position, leaf) for position, leaf in tensors if self.which(position, leaf)]
        else:
            chosen = [(position, leaf) for position, leaf in tensors if leaf.is_floating_point() or leaf.is_complex()]
            chosen = chosen[:1] if self.which == "first" else chosen
        return [position for position, leaf in chosen if Layout.fits(leaf) and self.store.accepts(leaf)]


class StoredInput:
    """One input in a store: its layout and its stored tensor."""

    __slots__ = ("layout", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        store: InputStore,
        call: CallNode,
        position: tuple[str, int],
        name: Callable[[], str],
    ) -> None:
        with torch.no_grad():
            self.layout, flat = Layout.of(tensor.detach())
            self.tensor = store.put(flat, ArgumentInfo(tensor, self.layout, call, position, name))

    def close(self, hooks: PackHooks | None) -> None:
        """The forward is over."""
        self.tensor.settle()
        if hooks is not None:
            self.tensor.pack_with_outer_hooks(hooks)

    def fetch(self) -> torch.Tensor:
        """Return the input with its original layout."""
        with torch.no_grad():
            return self.layout.restore(self.tensor.fetch())

    def drop(self) -> None:
        """Release the data."""
        self.tensor.drop()

    def bytes(self) -> tuple[int, int]:
        """Return the bytes held on the device and on the host."""
        local = self.tensor.local
        return 0 if local is None else local.numel() * local.element_size(), self.tensor.host_bytes
