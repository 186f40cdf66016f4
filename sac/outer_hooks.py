"""Saved-tensor hooks that are active around a region."""

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
    """A tensor that the saved-tensor hooks around the region have packed: they decide where it is stored."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]

    def fetch(self) -> torch.Tensor:
        """Unpack and return the tensor."""
        return self.unpack(self.packed)


def pack_with_outer_hooks(tensor: torch.Tensor, hooks: PackHooks | None) -> torch.Tensor | OuterPacked:
    """Return ``tensor`` packed by the surrounding saved-tensor hooks, or itself if ``hooks`` is None."""
    return tensor if hooks is None else OuterPacked(hooks[0](tensor), hooks[1])


def fetch(kept: Any) -> torch.Tensor:
    """Return the tensor behind ``kept``: itself, or what its method of this name returns."""
    return kept if isinstance(kept, torch.Tensor) else kept.fetch()


class Watched:
    """A plain tensor that the hooks around the region have packed, at the end of the forward."""

    __slots__ = ("_address", "_version", "_watch")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._watch, self._version, self._address = version_watch(tensor), version_of(tensor), storage_address(tensor)

    def is_written(self, held: Any) -> bool:
        """Return whether it was written to since where the hooks hold it: they may have made a copy."""
        return version_of(self._watch) != self._version and storage_address(fetch(held)) == self._address


def watched(tensor: torch.Tensor, held: Any) -> Watched | None:
    """Return what tells whether ``tensor`` is written to later, if hooks have packed it as ``held``."""
    is_seen = held is not tensor and is_plain(tensor) and tensor.layout is torch.strided and not tensor.is_inference()
    return Watched(tensor) if is_seen else None


def active_hooks() -> PackHooks | None:
    """Return the innermost active saved-tensor hooks (``save_on_cpu``, an outer region).

    None if there are none, or if this torch cannot return them: the hooks around a region then do not see the tensors
    that it keeps, as in ``torch.utils.checkpoint``.
    """
    return top_hooks(False) if top_hooks is not None else None
