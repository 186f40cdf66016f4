"""The memory layout of a tensor: its elements laid flat, and the tensor restored from them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from sac.tensors import detached, is_plain, lazy_bits, storage_address, with_lazy_bits
from sac.torch_private import FakeTensor, UnseenByModes

# Note [Laid flat]
#
# A tensor's elements are kept as one flat tensor, in memory order. The last bits of a kernel's result may depend on the
# strides, and on the address modulo 64 (matrix products of MKL do). So both are restored:
#
#   dense, dimensions in any order (contiguous, transposed, channels_last)   flat and restored tensor are views
#   repeated along a dimension (expand: stride 0)                            repeated elements are kept once
#   with gaps (a slice)                                                      kept without the gaps, restored with them
#
# Tensors that overlap in another way (unfold, as_strided) cannot be laid flat. The bits for lazy conjugation and
# negation are removed before and set again after. For a DTensor, the local tensor is laid flat.

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and strides of a tensor that was laid flat; see Note [Laid flat].

    ``once``: the shape without repetition. ``order``: its dimensions with more than one element, outermost first.
    ``extent``: the number of elements from the first to the last, gaps included. ``misalignment``: the address modulo
    64. ``bits``: the bits for lazy conjugation and negation. ``distributed`` turns the local tensor into a DTensor.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    once: tuple[int, ...]
    order: tuple[int, ...]
    extent: int
    misalignment: int
    bits: int
    distributed: Callable[[torch.Tensor], torch.Tensor] | None = None

    @staticmethod
    def fits(tensor: torch.Tensor) -> bool:
        """Return whether the tensor can be laid flat: a plain strided one, or a DTensor whose local tensor is one."""
        local = local_of(tensor)
        return is_plain(local) and not local.is_quantized and _packing(local)[2] > 0

    @staticmethod
    def of(tensor: torch.Tensor) -> tuple[Layout, torch.Tensor]:
        """Return the layout of ``tensor``, which has to fit, and its elements as a flat tensor or view."""
        local = local_of(tensor)
        bits, shared = lazy_bits(local), distribution_of(tensor)
        layout = Layout(local.shape, local.stride(), *_packing(local), _misalignment(local), bits, shared)
        flat = with_lazy_bits(local, bits)  # the second time takes them off
        if layout.has_gaps:
            flat = layout._ordered(flat.as_strided(layout.once, layout.stride)).contiguous()
        return layout, flat.as_strided((prod(layout.once),), (1,))

    @property
    def has_gaps(self) -> bool:
        """Whether the elements have others between them."""
        return 0 < prod(self.once) < self.extent

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the restored tensor; it may share the memory of ``flat``."""
        tensor = flat
        if flat.numel() and (self.has_gaps or _misalignment(flat) != self.misalignment):
            memory = flat.new_empty(self.extent + _ALIGNMENT // flat.element_size())
            skipped = (self.misalignment - _misalignment(memory)) % _ALIGNMENT // flat.element_size()
            tensor = memory[skipped : skipped + self.extent]
            ordered = self._ordered(tensor.as_strided(self.once, self.stride))
            ordered.copy_(flat.view(ordered.shape))
        tensor = with_lazy_bits(tensor.as_strided(self.shape, self.stride), self.bits)
        return tensor if self.distributed is None else self.distributed(tensor)

    def _ordered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, of shape ``once``, with its dimensions in memory order, outermost first."""
        single = tuple(i for i in range(len(self.once)) if i not in self.order)
        return tensor.permute(single + self.order)


def _misalignment(tensor: torch.Tensor) -> int:
    """Return by how many bytes a tensor misses the alignment of memory; a storage without data begins aligned."""
    if type(tensor) is FakeTensor:
        return int(tensor.storage_offset()) * tensor.element_size() % _ALIGNMENT
    return tensor.data_ptr() % _ALIGNMENT


def _packing(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return ``once``, ``order`` and ``extent`` of the layout of a tensor; the extent is 0 if elements overlap."""
    shape, stride = tensor.shape, tensor.stride()
    once = tuple(1 if step == 0 and size > 1 else size for size, step in zip(shape, stride, strict=True))
    order = tuple(sorted((i for i, size in enumerate(once) if size > 1), key=lambda i: stride[i], reverse=True))
    extent = 1
    for i in reversed(order) if 0 not in once else ():
        if stride[i] < extent:
            return once, order, 0
        extent += (once[i] - 1) * stride[i]
    return once, order, extent


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, or any other tensor unchanged."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def distribution_of(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what makes this DTensor of its local tensor again; None if it is none."""
    if not is_dtensor(tensor):
        return None
    whole: Any = tensor
    placed = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return partial(type(whole).from_local, device_mesh=whole.device_mesh, placements=whole.placements, **placed)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, without importing ``torch.distributed.tensor``."""
    if type(tensor) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


# -- Small parts of storages, copied so that they do not hold the rest of it


@torch.no_grad()
def compacted(tensor: torch.Tensor) -> tuple[torch.Tensor, Layout | None]:
    """Return a copy of a tensor that does not hold the rest of its storage.

    With a layout, the copy is flat, without the gaps between its elements; see ``restored``.
    """
    if Layout.fits(tensor):
        layout, flat = Layout.of(detached(tensor))
        if storage_address(flat) == storage_address(local_of(tensor)):
            flat = flat.clone()
        return (flat, layout) if layout.has_gaps else (layout.restore(flat), None)
    if not is_plain(tensor) or tensor.is_quantized:
        return tensor.clone(memory_format=torch.preserve_format), None  # a subclass has a layout of its own
    # Its elements overlap: copy all from the first to the last.
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    whole = detached(tensor).as_strided((1 + last,), (1,))
    return compacted(whole)[0].as_strided(tensor.shape, tensor.stride()), None


def restored(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the tensor in its layout, in memory of its own; if it is plain, unseen by any mode."""
    # A fake tensor needs its mode, and a DTensor its class.
    is_unseen = type(flat) is torch.Tensor and layout.distributed is None
    with UnseenByModes() if is_unseen else nullcontext(), torch.no_grad():
        return layout.restore(flat)
