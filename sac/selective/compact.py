"""Kept views that are small against what they would pin."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from sac.region.handles import Handle
from sac.selective.tensors import storage_bytes


def compact_views(handles: list[Handle]) -> None:
    """Replace views that are small against their storage by copies, so that they do not pin it."""
    groups: dict[int, list[Handle]] = defaultdict(list)
    for handle in handles:
        groups[handle.storage].append(handle)
    for group in groups.values():
        tensors = {_view_of(h.value): h.value for h in group if isinstance(h.value, torch.Tensor)}
        whole = max(storage_bytes(t) for t in tensors.values())
        if sum(t.numel() * t.element_size() for t in tensors.values()) < whole:
            copies = {view: _dense_copy(tensor) for view, tensor in tensors.items()}
            for handle in group:
                if isinstance(handle.value, torch.Tensor):
                    handle.value, handle.watched = copies[_view_of(handle.value)], None


def _view_of(tensor: Any) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same order of dimensions in memory and none of the gaps."""
    return tensor.clone(memory_format=torch.preserve_format)
