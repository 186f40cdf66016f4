"""Kept inputs scattered over a tensor-parallel group: each rank holds one share of what all of them have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sac.errors import Problem
from sac.region.placements import Placed, Placement


class Scattered:
    """Keeps this rank's share of each tensor, and gathers the shares of the group in recomputation."""

    @classmethod
    def over(cls, group: Any, inner: Placement, *, verify: bool, prefetch: int) -> Placement | None:
        """Return the placement over ``group``, its shares kept by ``inner``; None for a group of one rank."""
        raise NotImplementedError

    def accepts(self, tensor: torch.Tensor) -> bool:
        """A DTensor that is sharded over the group already has nothing to scatter."""
        return True

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> Placed:
        """Keep this rank's share of ``flat``, which all ranks of the group have."""
        raise NotImplementedError


def group_problem(group: Any, where: str) -> list[Problem]:
    """Return what is wrong with ``group`` as the tensor-parallel group of this rank."""
    raise NotImplementedError
