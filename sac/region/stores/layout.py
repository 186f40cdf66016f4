"""A tensor as a flat one and back, with the strides it had."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

# Note [Laid flat]
#
# A tensor's elements are kept as one flat tensor, in the order in which they lie in memory. What a kernel computes may
# depend to the last bit on strides, and on how far its address is from a multiple of 64 (matrix products of MKL do). So
# both come back as they were:
#
#   dense, dimensions in any order (contiguous, transposed, channels_last)   flat is a view, and so is what is restored
#   repeated along a dimension (expand: stride 0)                            what is repeated is kept once
#   with gaps (a slice)                                                      kept without the gaps, restored with them
#
# What overlaps in another way (unfold, as_strided) cannot be laid flat. The bits of lazy conjugation and negation are
# taken off before and put on after. Of a DTensor it is the local tensor that is laid flat.

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and strides of a tensor whose elements now lie flat; see Note [Laid flat].

    ``once`` is the shape without repetition. ``order``: its dimensions of more than one element, the outermost first.
    ``extent``: the elements from the first to the last, gaps included. ``misalignment``: the address modulo 64.
    ``distributed``: what makes a DTensor of a local tensor.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    once: tuple[int, ...]
    order: tuple[int, ...]
    extent: int
    misalignment: int
    conjugate: bool
    negative: bool
    distributed: tuple[Any, Any, torch.Size, tuple[int, ...]] | None = None

    @staticmethod
    def fits(tensor: torch.Tensor) -> bool:
        """Return whether the tensor can be laid flat: a plain strided one, or a DTensor whose local tensor is one."""
        local = local_of(tensor)
        if type(local) is not torch.Tensor or local.layout is not torch.strided or local.is_quantized:
            return False
        once, order = _without_repetition(local)
        return _extent(once, local.stride(), order) > 0

    @staticmethod
    def of(tensor: torch.Tensor) -> tuple[Layout, torch.Tensor]:
        """Return the layout of ``tensor``, which has to fit, and its elements, flat; they may share its memory."""
        local = local_of(tensor)
        distributed = None
        if local is not tensor:
            distributed = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
        once, order = _without_repetition(local)
        layout = Layout(
            shape=local.shape,
            stride=local.stride(),
            once=once,
            order=order,
            extent=_extent(once, local.stride(), order),
            misalignment=local.data_ptr() % _ALIGNMENT,
            conjugate=local.is_conj(),
            negative=local.is_neg(),
            distributed=distributed,
        )
        return layout, layout._flatten(local)

    def _flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.conjugate:
            tensor = tensor.conj()
        if self.negative:
            tensor = torch._neg_view(tensor)
        elements = prod(self.once)
        if elements and elements < self.extent:
            tensor = self._ordered(tensor.as_strided(self.once, self.stride)).contiguous()
        return tensor.as_strided((elements,), (1,))

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor again; it may share the memory of ``flat``."""
        tensor = flat
        if flat.numel() and (flat.numel() < self.extent or flat.data_ptr() % _ALIGNMENT != self.misalignment):
            tensor = self._memory(flat)
            ordered = self._ordered(tensor.as_strided(self.once, self.stride))
            ordered.copy_(flat.view(ordered.shape))
        tensor = tensor.as_strided(self.shape, self.stride)
        if self.negative:
            tensor = torch._neg_view(tensor)
        if self.conjugate:
            tensor = tensor.conj()
        if self.distributed is None:
            return tensor
        mesh, placements, shape, stride = self.distributed
        kind = sys.modules["torch.distributed.tensor"].DTensor
        whole: torch.Tensor = kind.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)
        return whole

    def _memory(self, flat: torch.Tensor) -> torch.Tensor:
        """Return memory of this extent and misalignment, where and of what ``flat`` is."""
        memory = flat.new_empty(self.extent + _ALIGNMENT // flat.element_size())
        skipped = (self.misalignment - memory.data_ptr()) % _ALIGNMENT // flat.element_size()
        return memory[skipped : skipped + self.extent]

    def _ordered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, of shape ``once``, with the dimensions as they lie in memory, the outermost first."""
        single = tuple(i for i in range(len(self.once)) if i not in self.order)
        return tensor.permute(single + self.order)


def _without_repetition(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape with repeated dimensions once, and its dimensions of several elements, the outermost first."""
    stride = tensor.stride()
    once = tuple(1 if step == 0 and size > 1 else size for size, step in zip(tensor.shape, stride, strict=True))
    return once, tuple(sorted((i for i, size in enumerate(once) if size > 1), key=lambda i: stride[i], reverse=True))


def _extent(shape: tuple[int, ...], stride: tuple[int, ...], order: tuple[int, ...]) -> int:
    """Return the elements from the first to the last of a strided tensor, 1 if it has none; 0 where they overlap."""
    extent = 1
    for i in reversed(order) if 0 not in shape else ():
        if stride[i] < extent:
            return 0
        extent += (shape[i] - 1) * stride[i]
    return extent


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor as it is."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, without importing what makes them."""
    if type(tensor) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
