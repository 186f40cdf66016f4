"""Transforms of ``torch.func`` around a region."""

from __future__ import annotations

from typing import Any

import torch

from sac.errors import Problem, RegionError

# Private to torch (2.0 to 2.13), as is every way to see whether a transform is on. Without it torch's own errors speak,
# of saved-tensor hooks or of storages.
_innermost: Any = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)


def refuse_transforms(path: str) -> None:
    """Raise ``RegionError`` if the region ``path`` is called inside ``vmap``, ``grad`` or another transform.

    Their tensors have no storage and their graph takes no hooks: torch's own checkpoint fails there too. A region that
    runs in a recomputation is not theirs, though backward may be batched (``is_grads_batched``).
    """
    if _innermost is not None and _innermost() is not None and torch._C._current_graph_task_id() == -1:
        raise RegionError(
            Problem(
                path or "region",
                "this region is called inside a transform of torch.func (grad, vjp, vmap, jvp, ...), whose tensors "
                "cannot be kept",
                fix="call sac.remove(model) before the transform, or torch.autograd instead of torch.func; "
                "torch.func.functional_call by itself is fine",
            )
        )
