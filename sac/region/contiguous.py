"""Kept inputs in the slots of one preallocated buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sac.region.placements import Placed


class ContiguousBuffer:
    """One buffer of ``num_checkpoints`` equal slots, made when the first input comes."""

    def __init__(self, num_checkpoints: int, *, on_host: bool = False) -> None:
        self.num_checkpoints = num_checkpoints
        self.on_host = on_host

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Any tensor will do."""
        return True

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> Placed:
        """Copy ``flat`` into a free slot."""
        raise NotImplementedError

    def reset(self) -> None:
        """Take every slot back."""
