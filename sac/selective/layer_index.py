"""The layer that a lone block says it is, for ``sac.context_fn``."""

from __future__ import annotations

from torch import nn

NAMES = ("layer_idx", "layer_id", "layer_number", "layer_index")


def layer_index(module: nn.Module) -> int | None:
    """Return the index that a block, or one of its children, holds under one of ``NAMES``; None if none does."""
    for owner in (module, *module.children()):
        for name in NAMES:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
