"""Kept inputs in host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sac.region.placements import Placed


class Host:
    """Keeps a copy in host memory: pinned and on a stream of its own where the input lies on a GPU."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Any tensor will do."""
        return True

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> Placed:
        """Copy ``flat`` to the host."""
        raise NotImplementedError
