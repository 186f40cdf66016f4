"""A tensor as a flat one and back, with the strides it had."""

from __future__ import annotations

import torch


class Layout:
    """Shape and strides of a tensor whose elements now lie flat."""

    __slots__ = ("shape", "stride")

    def __init__(self, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self.shape = shape
        self.stride = stride

    @staticmethod
    def fits(tensor: torch.Tensor) -> bool:
        """Return whether the tensor can be laid flat: a plain strided one."""
        return type(tensor) is torch.Tensor and tensor.layout is torch.strided

    @staticmethod
    def of(tensor: torch.Tensor) -> tuple[Layout, torch.Tensor]:
        """Return the layout of ``tensor`` and its elements, flat; they may share its memory."""
        return Layout(tensor.shape, tensor.stride()), tensor.reshape(-1)

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor again; it may share the memory of ``flat``."""
        return flat.view(self.shape)
