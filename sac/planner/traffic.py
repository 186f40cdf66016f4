"""The bytes that a kernel moves at least."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sac.selective.tensors import storage_bytes, tensors_of


def moved_bytes(args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes of the tensors that one call of an op reads and makes, each moved once."""
    read = sum(map(_bytes_read, tensors_of([*args, *kwargs.values()])))
    return read + sum(map(storage_bytes, tensors_of(out)))


def _bytes_read(tensor: Tensor) -> int:
    """Return what an op reads of a tensor: an expanded one has fewer bytes than elements."""
    return min(tensor.numel() * tensor.element_size(), storage_bytes(tensor))
