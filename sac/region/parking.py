"""Handing what a region holds to the saved-tensor hooks that stand around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PackHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_FRAMES = ("sac.region.frame", "sac.selective.replay", "sac.selective.contexts", "torch.utils.checkpoint")


@dataclass(frozen=True, slots=True)
class Parked:
    """A tensor handed to the saved-tensor hooks that stood around the region: they decide where it lies."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]

    def fetch(self) -> torch.Tensor:
        """Return the tensor again."""
        return self.unpack(self.packed)

    @property
    def is_recomputed(self) -> bool:
        """Whether an outer region has it, ours or torch's, and runs again to give it back."""
        unpack = getattr(self.unpack, "func", self.unpack)  # that of ``sac.context_fn`` is a partial
        return getattr(unpack, "__module__", "") in _FRAMES


def park(tensor: torch.Tensor, hooks: PackHooks | None) -> torch.Tensor | Parked:
    """Return ``tensor`` itself, or what the surrounding saved-tensor hooks made of it."""
    return tensor if hooks is None else Parked(hooks[0](tensor), hooks[1])


def fetch(kept: torch.Tensor | Parked) -> torch.Tensor:
    """Return the tensor behind ``kept``."""
    return kept.fetch() if isinstance(kept, Parked) else kept


def surrounding_hooks() -> PackHooks | None:
    """Return the innermost saved-tensor hooks now active (``save_on_cpu``, an outer region), if torch tells them.

    Private name ``_top_saved_tensors_default_hooks`` (torch 2.4 to 2.13): its absence means that the hooks around a
    region do not see what the region keeps, as in ``torch.utils.checkpoint``.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(False) if top is not None else None
