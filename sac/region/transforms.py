"""Transforms of ``torch.func`` around a region."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


# Private to torch (1.8 to 2.13): how deep the `vmap` of `is_grads_batched` is nested, which no function tells. Without
# them what a recomputation draws is torch's error.
_enter_vmap: Any = getattr(torch._C, "_vmapmode_increment_nesting", None)
_leave_vmap: Any = getattr(torch._C, "_vmapmode_decrement_nesting", None)


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Leave the transforms that are on, as those around a batched backward, and enter them again at the end.

    A recomputation reads nothing of theirs: it runs once for all gradients of the batch, on what the forward ran on.
    Inside a ``vmap`` it could draw no random numbers.
    """
    depth = 0
    if _enter_vmap is not None and _leave_vmap is not None:
        depth = _enter_vmap() - 1
        _leave_vmap()
    for _ in range(depth):
        _leave_vmap()
    try:
        if _innermost is None or _innermost() is None:
            yield
        else:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            with temporarily_clear_interpreter_stack():
                yield
    finally:
        for _ in range(depth):
            _enter_vmap()
