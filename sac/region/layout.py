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
# depend on strides to the last bit, so they come back as they were:
#
#   dense, dimensions in any order (contiguous, transposed, channels_last)   flat is a view, and so is what is restored
#   repeated along a dimension (expand: stride 0)                            what is repeated is kept once
#   with gaps (a slice)                                                      kept without the gaps, restored with them
#   overlapping in another way (unfold, as_strided)                          every element kept, restored contiguous
#
# The bits of lazy conjugation and negation are taken off before and put on after. Of a DTensor it is the local tensor.


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and strides of a tensor whose elements now lie flat; see Note [Laid flat].

    ``once`` is the shape without repetition. ``order``: its dimensions of more than one element, the outermost first.
    ``distributed``: what makes a DTensor of a local tensor.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    once: tuple[int, ...]
    order: tuple[int, ...]
    spread: str
    conjugate: bool
    negative: bool
    distributed: tuple[Any, Any, torch.Size, tuple[int, ...]] | None = None

    @staticmethod
    def fits(tensor: torch.Tensor) -> bool:
        """Return whether the tensor can be laid flat: a plain strided one, or a DTensor whose local tensor is one."""
        local = local_of(tensor)
        return type(local) is torch.Tensor and local.layout is torch.strided and not local.is_quantized

    @staticmethod
    def of(tensor: torch.Tensor) -> tuple[Layout, torch.Tensor]:
        """Return the layout of ``tensor``, which has to fit, and its elements, flat; they may share its memory."""
        local = local_of(tensor)
        distributed = None
        if local is not tensor:
            distributed = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
        shape, stride = local.shape, local.stride()
        once = tuple(1 if step == 0 and size > 1 else size for size, step in zip(shape, stride, strict=True))
        order = tuple(sorted((i for i, size in enumerate(once) if size > 1), key=lambda i: stride[i], reverse=True))
        conjugate, negative = local.is_conj(), local.is_neg()
        layout = Layout(shape, stride, once, order, _spread(once, stride, order), conjugate, negative, distributed)
        return layout, layout._flatten(local)

    def _flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.conjugate:
            tensor = tensor.conj()
        if self.negative:
            tensor = torch._neg_view(tensor)
        if self.spread != "dense":
            tensor = tensor.as_strided(self.once, self.stride)
            tensor = (self._ordered(tensor) if self.spread == "gaps" else tensor).contiguous()
        return tensor.as_strided((prod(self.once),), (1,))

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor again; it may share the memory of ``flat``."""
        if self.spread == "dense":
            tensor = flat.as_strided(self.shape, self.stride)
        elif self.spread == "gaps":
            tensor = flat.new_empty_strided(self.once, self.stride)
            ordered = self._ordered(tensor)
            ordered.copy_(flat.view(ordered.shape))
            tensor = tensor.as_strided(self.shape, self.stride)
        else:
            tensor = flat.view(self.once).expand(self.shape)
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

    def _ordered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, of shape ``once``, with the dimensions as they lie in memory, the outermost first."""
        single = tuple(i for i in range(len(self.once)) if i not in self.order)
        return tensor.permute(single + self.order)


def _spread(shape: tuple[int, ...], stride: tuple[int, ...], order: tuple[int, ...]) -> str:
    """Return ``dense``, ``gaps`` or ``overlapping``: how the elements of a strided tensor lie in memory."""
    if 0 in shape:
        return "dense"
    extent, gaps = 1, False
    for i in reversed(order):
        if stride[i] < extent:
            return "overlapping"
        gaps = gaps or stride[i] > extent
        extent += (shape[i] - 1) * stride[i]
    return "gaps" if gaps else "dense"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor as it is."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, without importing what makes them."""
    if type(tensor) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
