"""What the region asks of a tensor: in which storages it lies, its version, its name in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def storage_sizes(tensor: torch.Tensor) -> dict[int, int]:
    """Return the address and the bytes of each storage that holds data of ``tensor``."""
    if type(tensor) is not torch.Tensor and hasattr(type(tensor), "__tensor_flatten__"):
        return {address: size for part in inner_tensors(tensor) for address, size in storage_sizes(part).items()}
    if tensor.layout is not torch.strided:
        return {id(tensor): tensor.numel() * tensor.element_size()}
    storage = tensor.untyped_storage()
    return {storage._cdata: storage.nbytes()}


def plain_address(value: Any) -> int | None:
    """Return the address of a plain strided tensor's storage; None for all else, and where no memory is in it.

    A lazily conjugated or negated tensor is not plain: its elements are not what lies in its storage.
    """
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return None
    storage = value.untyped_storage()
    address: int = storage._cdata
    return address if storage.nbytes() > 0 else None


def inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors inside a wrapper subclass; a DTensor names its mesh among them (torch 2.13)."""
    names, _ = tensor.__tensor_flatten__()
    return [part for part in (getattr(tensor, name) for name in names) if isinstance(part, torch.Tensor)]


def shares_storage(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Return whether ``tensor`` lies in a storage in which one of ``others`` lies."""
    mine = storage_sizes(tensor).keys()
    return any(not mine.isdisjoint(storage_sizes(other)) for other in others)


def version_of(tensor: torch.Tensor) -> int:
    """Return the tensor's version counter; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def metadata(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Return what recomputation has to repeat of a tensor whatever its values: shape, dtype and device."""
    return tensor.shape, tensor.dtype, tensor.device


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and shape as errors print them: ``float32[2, 8]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
