"""A tensor that is held until backward: what is held of it, whether it was written to since, and copies of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from sac.outer_hooks import OuterPacked, PackHooks, fetch, pack_with_outer_hooks
from sac.stores.layout import Layout
from sac.tensors import (
    copy_of,
    detached,
    is_plain,
    last_offset,
    placed_on,
    shares_storage,
    storage_sizes,
    tell_of,
    version_of,
    version_watch,
)
from sac.torch_private import UnseenByModes

# Note [Saved tensors]
#
# Each tensor that a region holds until backward is a `SavedTensor`: what autograd has saved (`Handle`), an input
# (`SavedInput`), a result of a module that is saved as a whole (`SavedLeaf`). It is held without its graph, and has
# these verbs:
#
#   copy                   the region is about to write to it: hold a copy, and give out copies
#   compact                hold a copy if it is a small part of its storage, which it would pin; ``fetch`` restores
#                          its layout, by which kernels choose their order of summation (Note [Laid flat])
#   pack, exchange         let something else hold it: the saved-tensor hooks around the region, or the host
#   fetch                  return it
#   drop                   release it
#
# The tensors of one structure (the arguments of a region, what a module returned) are `SavedLeaves`. During a forward
# the tape holds plain tensors instead: an op that reads one needs nothing else.
#
# What others can write to is watched: `watched` shares its version counter, and `version` is what the counter was.
# A copy is not watched, because only the region holds it.


@dataclass(frozen=True, slots=True)
class Compacted:
    """A copy of the elements of a small part of a storage. ``fetch`` restores the part in memory of its own."""

    flat: torch.Tensor | OuterPacked
    layout: Layout

    def fetch(self) -> torch.Tensor:
        """Return the tensor in its layout; if it is plain, unseen by any mode."""
        flat = fetch(self.flat)
        # A fake tensor needs its mode, and a DTensor its class.
        is_unseen = type(flat) is torch.Tensor and self.layout.distributed is None
        guard = UnseenByModes() if UnseenByModes is not None and is_unseen else None
        try:
            with torch.no_grad():
                restored = self.layout.restore(flat)
                return tell_of(restored) if guard is not None else restored
        finally:
            del guard


class SavedTensor:
    """One tensor that is held until backward; see Note [Saved tensors]. Abstract.

    ``value``: the tensor, or what others hold in its place, or None. ``is_external``: the region does not own it. It is
    an input or a parameter, or another leaf. ``written``: the region writes to it, so each recomputation gets a copy.
    """

    __slots__ = tuple[str, ...]()  # those of subclasses
    # The defaults are class attributes: there is one handle per tensor that autograd saves, and few need them all.
    value: torch.Tensor | OuterPacked | Compacted | None = None
    watched: torch.Tensor | None = None
    version = 0
    is_external = False
    needs_grad = False
    written = False
    watches_packed = True  # whether writes count if the hooks around the region hold it; they may hold the same memory

    @property
    def was_changed(self) -> bool:
        """Whether it was written to without being copied first."""
        return self.watched is not None and version_of(self.watched) != self.version

    @property
    def on_device(self) -> torch.Tensor | None:
        """The tensor that it holds on the device, if any: the saved one, or its elements."""
        value = self.value
        value = value.flat if type(value) is Compacted else value
        return value if isinstance(value, torch.Tensor) else None

    def exchange(self, held: torch.Tensor | OuterPacked) -> None:
        """Hold ``held`` instead of ``on_device``."""
        value = self.value
        self.value = Compacted(held, value.layout) if type(value) is Compacted else held

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each storage that it holds on the device, by address."""
        held = self.on_device
        return {} if held is None else storage_sizes(held)

    def copy(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Hold a copy from now on; ``storages`` holds the copies made so far."""
        if isinstance(self.value, torch.Tensor) and not (self.is_external or self.written):
            self.value, self.watched, self.written = copied(self.value, storages), None, True

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Hand the tensor to the saved-tensor hooks around the region."""
        if (held := self.on_device) is not None:
            self.exchange(pack_with_outer_hooks(held, hooks))
            self.watched = version_watch(self.watched) if self.watched is not None and self.watches_packed else None

    def fetch(self, at_hand: AtHand | None = None) -> torch.Tensor:
        """Return the tensor; ``at_hand`` is the result of ``fetch_recomputed``, which gives it away."""
        if at_hand and id(self) in at_hand:
            return at_hand.pop(id(self))
        assert self.value is not None, "a saved tensor was used after it was dropped"
        return fetch(self.value)

    def own(self, data: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """Return ``data``, which is this tensor, for one recomputation: a copy if that writes to it.

        ``storages`` holds the copies made for that recomputation so far.
        """
        return copied(data, storages) if self.written else data

    def leaf(self, data: torch.Tensor) -> torch.Tensor:
        """Return ``data`` for one recomputation: a leaf, or an alias of one, if this tensor needed a gradient."""
        if not self.needs_grad:
            return data.detach() if data.requires_grad else data  # the caller may have set requires_grad since
        leaf = data.detach().requires_grad_()
        return Alias.apply(leaf) if self.written else leaf  # type: ignore[no-untyped-call]

    def drop(self) -> None:
        """Release the tensor."""
        self.value = self.watched = None


Held = Iterable[tuple[SavedTensor, int | None]]  # with the index of the rule that saved it
AtHand = dict[int, torch.Tensor]  # by id of a saved tensor


class Alias(torch.autograd.Function):
    """Returns the same tensor as a non-leaf, which a region may write to in place as it did in the forward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same data."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Pass the gradient on."""
        return grads[0]


def copied(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return ``tensor`` on a copy of its storage; tensors that share a storage get the same copy."""
    if not is_plain(tensor):
        return tensor.clone()
    storage = tensor.untyped_storage()
    copy = storages.setdefault(storage._cdata, copy_of(storage))
    return placed_on(copy, tensor)


@torch.no_grad()
def compacted(tensor: torch.Tensor) -> Any:
    """Return a copy of a tensor that does not hold the rest of its storage: ``Compacted``, or a tensor."""
    if Layout.fits(tensor):
        layout, flat = Layout.of(detached(tensor))
        if shares_storage(flat, [tensor]):
            flat = flat.clone()
        return Compacted(flat, layout) if layout.has_gaps else layout.restore(flat)
    if not is_plain(tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.clone(memory_format=torch.preserve_format)  # a subclass has a layout of its own
    # Its elements overlap: copy all from the first to the last.
    whole = detached(tensor).as_strided((1 + last_offset(tensor.shape, tensor.stride()),), (1,))
    return compacted(whole).as_strided(tensor.shape, tensor.stride())
