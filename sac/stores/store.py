"""Stores for region inputs between forward and backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
# What is stored is freed with its `StoredTensor`.
#
# Example. The store is `Scattered(group, OnHost())` over 4 GPU ranks, and x is a transposed bfloat16[4096, 8192] of
# 64 MiB. `Layout.of` returns a flat view of 2^25 elements. `Scattered.put` takes this rank's 2^23 of them, and
# `OnHost.put` copies these 16 MiB to pinned memory. For the recomputation, `fetch` copies the share back to the device
# and gathers the 4 shares, and `Layout.restore` returns the transposed tensor.


class StoredTensor:
    """One flat tensor between forward and backward. Abstract."""

    __slots__ = ()

    def fetch(self) -> torch.Tensor:
        """Return the flat tensor."""
        raise NotImplementedError

    def bytes(self) -> tuple[int, int]:
        """Return the bytes held on the device, and in host memory on behalf of a device."""
        raise NotImplementedError

    def settle(self) -> None:
        """The source of the copy is about to be written to or freed: make sure that the copy is done by then."""

    def prefetch(self) -> None:
        """Start to fetch what backward needs next, if that saves time."""


class StoredInside(StoredTensor):
    """A tensor made of another one that is stored, ``inner``."""

    __slots__ = ("inner",)
    inner: StoredTensor

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of ``inner``."""
        return self.inner.bytes()

    def settle(self) -> None:
        """See ``StoredTensor``."""
        self.inner.settle()

    def prefetch(self) -> None:
        """See ``StoredTensor``."""
        self.inner.prefetch()


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

    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def fetch(self) -> torch.Tensor:
        """Return the tensor itself."""
        return self.value

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of the tensor."""
        return self.value.nbytes, 0


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


class StoredInput(StoredInside):
    """One input in a store, and its layout."""

    __slots__ = ("layout",)

    def __init__(self, tensor: torch.Tensor, store: InputStore, call: CallNode, position: tuple[str, int]) -> None:
        with torch.no_grad():
            self.layout, flat = Layout.of(tensor.detach())
            self.inner = store.put(flat, ArgumentInfo(tensor, self.layout, call, position))

    def fetch(self) -> torch.Tensor:
        """Return the input with its original layout."""
        with torch.no_grad():
            return self.layout.restore(self.inner.fetch())
