"""Saved-tensor hooks around a region, and what graphs hold without hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sac.tensors import is_plain, storage_address, version_of, version_watch
from sac.torch_private import top_hooks

# -- Saved-tensor hooks around a region

PackHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class OuterPacked:
    """A tensor that the saved-tensor hooks around the region have packed: they decide where it is stored.

    ``watch`` shares the version counter of a plain tensor, which had this ``version`` and storage ``address``.
    """

    packed: Any
    unpack: Callable[[Any], torch.Tensor]
    watch: torch.Tensor | None = None
    version: int = 0
    address: int = 0

    def fetch(self) -> torch.Tensor:
        """Unpack and return the tensor."""
        return self.unpack(self.packed)


def pack_with_outer_hooks(tensor: torch.Tensor, hooks: PackHooks | None) -> torch.Tensor | OuterPacked:
    """Return ``tensor`` packed by the surrounding saved-tensor hooks, or itself if ``hooks`` is None."""
    if hooks is None:
        return tensor
    packed = hooks[0](tensor)
    if not is_plain(tensor) or tensor.is_inference():
        return OuterPacked(packed, hooks[1])
    return OuterPacked(packed, hooks[1], version_watch(tensor), version_of(tensor), storage_address(tensor))


def fetch(kept: Any) -> torch.Tensor:
    """Return the tensor behind ``kept``: itself, or what its method of this name returns."""
    return kept if isinstance(kept, torch.Tensor) else kept.fetch()


def is_written(held: Any, version: int) -> bool:
    """Return whether a held tensor, which had this version, was written to since.

    Of one that hooks have packed, whether that was where they hold it: they may have made a copy.
    """
    if isinstance(held, OuterPacked):
        is_moved = held.watch is not None and version_of(held.watch) != held.version
        return is_moved and storage_address(held.fetch()) == held.address
    return isinstance(held, torch.Tensor) and version_of(held) != version


def active_hooks() -> PackHooks | None:
    """Return the innermost active saved-tensor hooks (``save_on_cpu``, an outer region).

    None if there are none.
    """
    found: PackHooks | None = top_hooks(False)
    return found
