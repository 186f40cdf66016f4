"""Arguments that a reentrant region has written to: the history that a write without grad mode did not give them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch

from sac.errors import Problem, RegionError
from sac.region.storages import describe, shares_storage

_CLONE = "clone the input inside the region before writing to it"


def give_history(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Let the history of ``tensor``, whose data is right already, be that of ``source``; its base and views follow."""
    _Rewritten.apply(tensor, source)  # type: ignore[no-untyped-call]


class _Rewritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.is_view = tensor._is_view()
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Nothing of what was there before goes on. Of a view, autograd (torch 2.13) wants to hear that in numbers: with
        # None the whole base would get no gradient. See test_a_view_that_the_region_wrote_to.
        return torch.zeros_like(grads[0]) if ctx.is_view else None, grads[0]


def check_writes(written: Mapping[int, torch.Tensor], path: str) -> None:
    """Raise ``RegionError`` if the arguments that a region wrote to, by position, cannot get the history of that."""
    for position, tensor in written.items():
        if _lies_in_leaf(tensor):
            raise RegionError(
                Problem(
                    where=path or "region",
                    found=f"the region wrote in place to its input {position} ({describe(tensor)}), which lies in a "
                    "leaf that requires grad",
                    fix=_CLONE,
                )
            )
    for (first, one), (second, other) in combinations(written.items(), 2):
        if _overlap(one, other):
            raise RegionError(
                Problem(
                    where=path or "region",
                    found=f"the region wrote in place to memory that its inputs {first} and {second} share",
                    fix=_CLONE,
                )
            )


def _lies_in_leaf(tensor: torch.Tensor) -> bool:
    root = tensor if tensor._base is None else tensor._base
    return root.requires_grad and root.is_leaf


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not shares_storage(one, [other]):
        return False
    if not (type(one) is type(other) is torch.Tensor) or one.dtype != other.dtype:
        return True
    taken = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())
