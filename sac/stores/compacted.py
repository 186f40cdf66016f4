"""Small parts of storages, copied so that they do not hold the rest of it; see Note [Laid flat]."""

from __future__ import annotations

import torch

from sac.stores.layout import Layout
from sac.tensors import detached, is_plain, last_offset, shares_storage, tell_of
from sac.torch_private import UnseenByModes


@torch.no_grad()
def compacted(tensor: torch.Tensor) -> tuple[torch.Tensor, Layout | None]:
    """Return a copy of a tensor that does not hold the rest of its storage.

    With a layout, the copy is flat, without the gaps between its elements; see ``restored``.
    """
    if Layout.fits(tensor):
        layout, flat = Layout.of(detached(tensor))
        if shares_storage(flat, [tensor]):
            flat = flat.clone()
        return (flat, layout) if layout.has_gaps else (layout.restore(flat), None)
    if not is_plain(tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.clone(memory_format=torch.preserve_format), None  # a subclass has a layout of its own
    # Its elements overlap: copy all from the first to the last.
    whole = detached(tensor).as_strided((1 + last_offset(tensor.shape, tensor.stride()),), (1,))
    return compacted(whole)[0].as_strided(tensor.shape, tensor.stride()), None


def restored(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the tensor in its layout, in memory of its own; if it is plain, unseen by any mode."""
    # A fake tensor needs its mode, and a DTensor its class.
    is_unseen = type(flat) is torch.Tensor and layout.distributed is None
    guard = UnseenByModes() if UnseenByModes is not None and is_unseen else None
    try:
        with torch.no_grad():
            tensor = layout.restore(flat)
            return tell_of(tensor) if guard is not None else tensor
    finally:
        del guard
