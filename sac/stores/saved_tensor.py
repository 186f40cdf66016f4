"""A tensor that is held until backward: what is held of it, whether it was written to since, and copies of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from sac.outer_hooks import OuterPacked, PackHooks, fetch, pack_with_outer_hooks
from sac.tensors import (
    copy_of,
    detached,
    laid_out,
    layout_of,
    placed_on,
    storage_bytes,
    storage_sizes,
    version_of,
    version_watch,
)

# Note [Saved tensors]
#
# Each tensor that a region holds until backward is a `SavedTensor`: what autograd has saved (`Handle`), an input
# (`SavedInput`), a result of a module that is saved as a whole (`SavedLeaf`). It is held without its graph, and has
# these verbs:
#
#   copy                   the region is about to write to it: hold a copy, and give out copies
#   compact                hold a copy if it is a small part of its storage, which it would pin
#   pack, look_at/offload  let something else hold it: the saved-tensor hooks around the region, or the host
#   fetch                  return it
#   drop                   release it
#
# What others can write to is watched: `watched` shares its version counter, and `version` is what the counter was.
# A copy is not watched, because nobody else has it.


class SavedTensor:
    """One tensor that is held until backward; see Note [Saved tensors]. Abstract.

    ``value``: the tensor, or what others hold in its place, or None. ``is_external``: the region does not own it. It is
    an input or a parameter, or another leaf. ``written``: the region writes to it, so each recomputation gets a copy.
    """

    __slots__ = tuple[str, ...]()  # those of subclasses, or of the C++ library
    # The defaults are class attributes: there is one handle per tensor that autograd saves, and few need them all.
    value: torch.Tensor | OuterPacked | None = None
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

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each storage that it holds on the device, by address."""
        return storage_sizes(self.value) if isinstance(self.value, torch.Tensor) else {}

    def copy(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Hold a copy from now on; ``storages`` holds the copies made so far."""
        if isinstance(self.value, torch.Tensor) and not (self.is_external or self.written):
            self.value, self.watched, self.written = copied(self.value, storages), None, True

    def replace(self, dense: torch.Tensor) -> None:
        """Hold ``dense``, a copy, instead of a part of a larger storage."""
        self.value, self.watched = dense, None

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Hand the tensor to the saved-tensor hooks around the region."""
        if isinstance(self.value, torch.Tensor):
            self.value = pack_with_outer_hooks(self.value, hooks)
            self.watched = version_watch(self.watched) if self.watched is not None and self.watches_packed else None

    def look_at(self, work: Any, rule: int | None) -> None:
        """Show the tensor, which ``rule`` saved, to ``work``, an ``Offloading``."""
        if isinstance(self.value, torch.Tensor) and not self.is_external:
            if self.was_changed:
                work.exclude(self.value)
                return
            if self.watched is self.value:  # a leaf is held itself: who else holds the same tensor could not be counted
                self.value = self.watched = detached(self.value)
            work.look_at(self.value, rule)

    def offload(self, work: Any) -> None:
        """Hold instead of the tensor what ``work``, an ``Offloading``, has made of it."""
        if isinstance(self.value, torch.Tensor) and not self.is_external:
            packed = work.packed(self.value)
            if packed is not self.value:
                self.value, self.watched = packed, None

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


class SavedResult(SavedTensor):
    """A result of an op or a module. Only ops of the region write to an op's result, and recorders see those.

    If it is compacted, ``fetch`` restores its layout: kernels choose their order of summation by it.
    """

    __slots__ = ("_layout", "value", "version", "watched", "written")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.value = detached(tensor)
        self.watched = None
        self.written = False
        self._layout: torch.Tensor | None = None  # without data: the original layout, if `value` has another

    def replace(self, dense: torch.Tensor) -> None:
        """See ``SavedTensor``."""
        if type(self.value) is torch.Tensor and (layout := layout_of(self.value)) is not None:
            self._layout = layout
            super().replace(dense)

    def fetch(self, at_hand: AtHand | None = None) -> torch.Tensor:
        """See ``SavedTensor``."""
        found, layout = super().fetch(at_hand), self._layout
        if layout is None or (found.stride(), found.is_conj(), found.is_neg()) == (
            layout.stride(),
            layout.is_conj(),
            layout.is_neg(),
        ):
            return found
        return laid_out(found, layout)


Held = Iterable[tuple[SavedTensor, int | None]]  # with the index of the rule that saved it
AtHand = dict[int, torch.Tensor]  # by id of a saved tensor


def fetch_recomputed(held: Held) -> AtHand:
    """Fetch those that an outer region recomputes.

    Called before a recomputation activates its own hooks and modes: the ops and modules of the outer region do not
    belong to this one.
    """
    packed = [(one, one.value) for one, _ in held if isinstance(one.value, OuterPacked)]
    return {id(one): value.fetch() for one, value in packed if value.is_recomputed}


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
    if type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    storage = tensor.untyped_storage()
    copy = storages.setdefault(storage._cdata, copy_of(storage))
    return placed_on(copy, tensor)


def compact(saved: Iterable[SavedTensor]) -> None:
    """Let those that are small parts of a storage hold copies, so that they do not pin it.

    Not those that were written to: backward has to see that.
    """
    groups: defaultdict[int, list[SavedTensor]] = defaultdict(list)
    for one in saved:
        if isinstance(one.value, torch.Tensor) and not one.written:
            groups[next(iter(one.sizes()))].append(one)
    for group in groups.values():
        views: dict[Any, Any] = {_view_of(one.value): one.value for one in group}
        size = sum(view.numel() * view.element_size() for view in views.values())
        if size < max(map(storage_bytes, views.values())) and not any(one.was_changed for one in group):
            copies = {view: tensor.clone(memory_format=torch.preserve_format) for view, tensor in views.items()}
            for one in group:
                one.replace(copies[_view_of(one.value)])


def _view_of(tensor: Any) -> Any:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
