"""Storages, versions and parts of tensors, and copies that dispatch modes do not see."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from ctypes import CDLL, CFUNCTYPE, c_int, c_size_t, c_void_p
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from sac.torch_private import UnseenByModes, neg_view

_STRIDED = torch.strided
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS_OF_SPARSE = {torch.sparse_coo: ("_indices", "_values"), torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS}
_PARTS_OF_SPARSE |= {torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS}
_compared = CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)(
    ("memcmp", CDLL("msvcrt" if sys.platform == "win32" else None))
)

# -- Storages, version and metadata of a tensor


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a wrapper subclass, which holds its data in inner tensors."""
    return hasattr(type(tensor), "__tensor_flatten__")


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Return whether ``value`` is a strided tensor, plain or fake; a plan thus counts the same copies as a real run."""
    return (type(value) is Tensor or type(value).__name__ == "FakeTensor") and value.layout is _STRIDED


def plain_address(value: Any) -> int | None:
    """Return the address of a plain strided tensor's storage; None for other tensors and for empty storages.

    A lazily conjugated or negated tensor is not plain: its elements differ from the contents of its storage.
    """
    if not is_plain(value) or value.is_conj() or value.is_neg():
        return None
    storage = value.untyped_storage()
    address: int = storage._cdata
    return address if storage.nbytes() > 0 else None


def inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors inside a wrapper subclass; a DTensor names its mesh among them (torch 2.13)."""
    names, _ = tensor.__tensor_flatten__()
    return [part for part in (getattr(tensor, name) for name in names) if isinstance(part, torch.Tensor)]


def version_of(tensor: torch.Tensor) -> int:
    """Return the tensor's version counter; 0 for an inference tensor, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        if tensor.is_inference():
            return 0
        raise


def metadata(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Return the properties of a tensor that recomputation must reproduce, except values: shape, dtype and device."""
    return tensor.shape, tensor.dtype, tensor.device


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and shape in the form that errors print: ``float32[2, 8]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# -- Detaching and copying tensors unseen by dispatch modes


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.detach()``: the same data, the same version counter, no graph."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        return tensor.detach()
    with UnseenByModes():
        return tensor.detach()


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.clone()`` of a plain tensor, unseen by any mode: bookkeeping, not an op of the model."""
    if type(tensor) is not Tensor:
        return tensor.clone()
    with UnseenByModes():
        return tensor.clone()


def version_watch(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor that shares the version counter of a plain tensor, but not its data.

    Other tensors, whose data cannot be exchanged, are returned unchanged.
    """
    if not is_plain(tensor) or tensor.is_inference():
        return tensor
    watch = detached(tensor)
    with UnseenByModes() if type(tensor) is Tensor else nullcontext():
        watch.data = tensor.new_empty(0)
    return watch


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two generator states are equal, unseen by any mode; ``torch.equal`` compares byte by byte."""
    return left.nbytes == right.nbytes and not _compared(left.data_ptr(), right.data_ptr(), left.nbytes)


def overwrite(storage: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
    """Copy the bytes of ``source`` into ``storage``, unseen by modes and version counters."""
    with UnseenByModes():
        storage.copy_(source)


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of ``storage``, made unseen by any mode."""
    with UnseenByModes():
        copy: torch.UntypedStorage = storage.clone()
        return copy


Place = tuple[int, torch.Size, tuple[int, ...]]  # offset in the storage, shape and strides


def place_of(tensor: torch.Tensor) -> Place:
    """Return where a plain tensor lies in its storage."""
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def placed_on(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``tensor`` in ``storage``; plain ones unseen by any mode."""
    with UnseenByModes() if type(tensor) in (Tensor, Parameter) else nullcontext():
        return with_lazy_bits(tensor.new_empty(0).set_(storage, *place_of(tensor)), lazy_bits(tensor))


# -- Tensors inside arguments and results, and their storages


def tensors_of(value: Any, kind: type = torch.Tensor) -> list[Any]:
    """Return the tensors in ``value``, or what else is of this ``kind``, including those in nested tuples and lists."""
    if isinstance(value, kind):
        return [value]
    found: list[Any] = []
    if isinstance(value, (tuple, list)):
        for part in value:
            if isinstance(part, kind):
                found.append(part)
            elif isinstance(part, (tuple, list)):
                found += tensors_of(part, kind)
    return found


def tensor_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold the data of ``tensor``: itself, or those inside a wrapper subclass."""
    cls = type(tensor)
    if cls is Tensor or cls is Parameter or not is_wrapper(tensor):
        return [tensor]
    return [part for inner in inner_tensors(tensor) for part in tensor_parts(inner)]


def layout_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return shape, stride, offset, dtype and lazy bits of a tensor in hashable form."""
    cls, dtype = type(tensor), tensor.dtype
    if cls is not Tensor and cls is not Parameter and is_wrapper(tensor):
        return str(tensor.shape), dtype  # sizes of a jagged tensor are symbols, which have no hash
    if tensor.layout is not _STRIDED:
        return tensor.shape, dtype, tensor.layout
    bits = lazy_bits(tensor) if dtype.is_complex or tensor.is_neg() else 0
    return tensor.shape, tensor.stride(), tensor.storage_offset(), dtype, bits


def lazy_bits(tensor: torch.Tensor) -> int:
    """Return 1 if the tensor's elements are still to be conjugated, plus 2 if they are still to be negated."""
    return (1 if tensor.is_conj() else 0) + (2 if tensor.is_neg() else 0)


def with_lazy_bits(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a view of ``tensor`` that has these lazy bits if ``tensor`` has none, and none if it has these."""
    if bits & 1:
        tensor = tensor.conj()
    return neg_view(tensor) if bits & 2 else tensor


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage object, or of the tensor if it has none (sparse layouts)."""
    try:
        address: int = tensor.untyped_storage()._cdata
        return address
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that stay allocated if ``tensor`` is kept: those of its whole storage."""
    if type(tensor) is not Tensor and is_wrapper(tensor):
        return sum(storage_bytes(part) for part in tensor_parts(tensor))
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        names = _PARTS_OF_SPARSE.get(tensor.layout)
    if names is None:
        return tensor.numel() * tensor.element_size()
    sparse = detached(tensor)
    with UnseenByModes():
        return sum(getattr(sparse, name)().untyped_storage().nbytes() for name in names)


def landed(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` when the functional collectives that fill its memory have ended; modes do not see it."""
    with UnseenByModes():
        for part in tensor_parts(tensor):
            if type(part) is Tensor:
                torch.ops._c10d_functional.wait_tensor.default(part)
        return tensor
