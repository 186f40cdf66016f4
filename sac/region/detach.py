"""Detaching and copying a tensor without asking the dispatch modes that are on."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Private to torch (2.11 to 2.13): a guard object; while it lives, neither modes nor subclasses see an op. Without it
# these are `Tensor.detach` and `Tensor.clone`, which cost a trip through every mode. See
# test_detached_is_seen_by_no_mode.
_Unseen = getattr(torch._C, "_DisableTorchDispatch", None)

STORAGE_WATCHERS: list[Callable[[torch.UntypedStorage], None]] = []  # told of what is made here: no mode sees it


def tell_of(tensor: torch.Tensor) -> torch.Tensor:
    """Tell the watchers of a tensor that was made unseen by any mode, and return it."""
    for watcher in STORAGE_WATCHERS:
        watcher(tensor.untyped_storage())
    return tensor


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.detach()``: the same data, the same version counter, no graph."""
    kind = type(tensor)
    if _Unseen is None or (kind is not torch.Tensor and kind is not torch.nn.Parameter):
        return tensor.detach()
    guard = _Unseen()
    try:
        return tensor.detach()
    finally:
        del guard


def has_graph(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the result of something that autograd has noted."""
    if not tensor.requires_grad:
        return False
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view that an in-place write has made unusable
        return True


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.clone()`` of a plain tensor, seen by no mode: bookkeeping, not an op of the model."""
    if _Unseen is None or type(tensor) is not torch.Tensor:
        return tensor.clone()
    guard = _Unseen()
    try:
        return tell_of(tensor.clone())
    finally:
        del guard


def version_watch(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor that shares the version counter of a plain tensor, and holds none of its data.

    Other tensors, whose data cannot be exchanged, are returned as they are.
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_inference():
        return tensor
    watch = detached(tensor)
    guard = _Unseen() if _Unseen is not None else None
    try:
        watch.data = tensor.new_empty(0)
    finally:
        del guard
    return watch


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return ``torch.equal`` of two states of generators, which no mode is asked for, fake tensors included."""
    guard = _Unseen() if _Unseen is not None else None
    try:
        return torch.equal(left, right)
    finally:
        del guard


def overwrite(storage: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
    """Copy the bytes of ``source`` into ``storage``, seen by no mode and no version counter."""
    guard = _Unseen() if _Unseen is not None else None
    try:
        storage.copy_(source)
    finally:
        del guard


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of ``storage``, made unseen by any mode."""
    guard = _Unseen() if _Unseen is not None else None
    try:
        copy: torch.UntypedStorage = storage.clone()
        for watcher in STORAGE_WATCHERS:
            watcher(copy)
        return copy
    finally:
        del guard


def placed_on(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor that lies in ``storage`` as ``tensor`` lies in its own, made unseen by any mode."""
    guard = _Unseen() if _Unseen is not None else None
    try:
        return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    finally:
        del guard


def laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the values of a plain tensor, laid out as ``like`` lies in memory, made unseen by any mode.

    ``like``, a tensor on the meta device say, has no two elements at one place.
    """
    guard = _Unseen() if _Unseen is not None else None
    try:
        fresh = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=tensor.device)
        found = fresh.conj() if like.is_conj() else fresh
        found = torch._neg_view(found) if like.is_neg() else found
        found.copy_(tensor)
        tell_of(fresh)
        return found.detach()
    finally:
        del guard


def layout_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor without data that says how ``tensor``, a plain one, lies in memory: see ``laid_out``.

    None if several of its elements may share a place.
    """
    end = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= end:
            return None
        end += (size - 1) * stride
    guard = _Unseen() if _Unseen is not None else None
    try:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        empty = empty.conj() if tensor.is_conj() else empty
        return torch._neg_view(empty) if tensor.is_neg() else empty
    finally:
        del guard


def write_onto(target: torch.Tensor, value: torch.Tensor) -> None:
    """Write ``value`` to ``target`` without a graph; of plain tensors unseen by any mode."""
    plain = type(target) in (torch.Tensor, torch.nn.Parameter) and type(value) is torch.Tensor
    guard = _Unseen() if _Unseen is not None and plain else None
    try:
        with torch.no_grad():
            target.detach().copy_(value)
    finally:
        del guard
