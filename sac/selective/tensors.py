"""Tensors inside arguments and results, and the storages they lie in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sac.region.parking import Parked
from sac.region.storages import inner_tensors


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``, through tuples and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_of(part)]
    return []


def map_tensors(value: Any, function: Any) -> Any:
    """Return ``value`` with ``function`` applied to its tensors, through tuples and lists."""
    if isinstance(value, (torch.Tensor, Parked)):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(part, function) for part in value)
    return value


def tensor_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold the data of ``tensor``: itself, or those inside a wrapper subclass."""
    kind = type(tensor)
    if kind is Tensor or kind is Parameter or not hasattr(kind, "__tensor_flatten__"):
        return [tensor]
    return wrapped_parts(tensor)


def written_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return those of ``tensor_parts`` that an op in place on ``tensor`` writes to: not where jagged rows begin."""
    parts = tensor_parts(tensor)
    return parts[:1] if len(parts) > 1 and tensor.layout is torch.jagged else parts


def wrapped_parts(tensor: Any) -> list[torch.Tensor]:
    """Return the plain tensors inside a wrapper subclass such as DTensor."""
    parts: list[torch.Tensor] = []
    for part in inner_tensors(tensor):
        parts.extend(wrapped_parts(part) if hasattr(type(part), "__tensor_flatten__") else [part])
    return parts


def layout_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return shape, stride, offset and dtype of a tensor, in a form that can be hashed."""
    if type(tensor) is not Tensor and hasattr(type(tensor), "__tensor_flatten__"):
        return str(tensor.shape), tensor.dtype  # sizes of a jagged tensor are symbols, which have no hash
    if tensor.layout is not torch.strided:
        return tensor.shape, tensor.dtype, tensor.layout
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage object, or of the tensor where it has none (sparse layouts)."""
    try:
        address: int = tensor.untyped_storage()._cdata
        return address
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether the tensor lies in a storage at all; sparse ones do not."""
    return tensor.layout is torch.strided


def offset_in_storage(tensor: torch.Tensor) -> int:
    """Return where in its storage the tensor begins, in elements; 0 where it has none."""
    return int(tensor.storage_offset()) if has_storage(tensor) else 0


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that keeping ``tensor`` keeps: those of its whole storage."""
    if type(tensor) is not Tensor and hasattr(type(tensor), "__tensor_flatten__"):
        return sum(storage_bytes(part) for part in wrapped_parts(tensor))
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return tensor.numel() * tensor.element_size()


class WeakStorages:
    """Weak references to storages: as long as they are held, the address of none is given to another storage."""

    __slots__ = ("references",)

    def __init__(self) -> None:
        self.references: list[Any] = []

    def add(self, storage: Any) -> None:
        """Hold a weak reference to ``storage``."""
        self.references.append(storage._weak_ref())

    def watch(self, tensor: torch.Tensor) -> None:
        """Hold a weak reference to the tensor's storage, if it has one."""
        if has_storage(tensor):
            self.add(tensor.untyped_storage())

    def __del__(self) -> None:
        for reference in self.references:
            torch.UntypedStorage._free_weak_ref(reference)
