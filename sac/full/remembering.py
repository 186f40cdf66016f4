"""What a region's forward leaves behind, so that its outputs can be computed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from sac.region.storages import plain_address


@dataclass
class Note:
    """What one forward leaves for discarding: its outputs with memory of their own, and the node that saved them.

    A plain dataclass, and empty when the region begins: calls of one function are of one sort (Note [Evidence]).
    """

    chosen: tuple[int, ...] | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    remembered: torch.Tensor | None = None

    def take(self, output: Any, inputs: Any) -> None:
        """Save the tensors of ``output`` for backward, in recomputation the same ones again."""
        leaves = tree_leaves(output)
        is_first = self.chosen is None
        if self.chosen is None:
            taken = {None, *map(plain_address, tree_leaves(inputs))}
            self.chosen = tuple(place for place, leaf in enumerate(leaves) if plain_address(leaf) not in taken)
        if not self.chosen or not torch.is_grad_enabled():
            return
        tensors = tuple(leaves[place] for place in self.chosen if isinstance(leaves[place], torch.Tensor))
        anchor = torch.empty(0, requires_grad=True)
        remembered = _Remembered.apply(anchor, *(tensor.detach() for tensor in tensors))  # type: ignore[no-untyped-call]
        if is_first:
            self.tensors, self.remembered = tensors, remembered


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does as ``function``, and lets the ``note`` that it is given take what it returns."""
    noting = partial(_call, function)
    noting.__qualname__ = getattr(function, "__qualname__", type(function).__name__)  # type: ignore[attr-defined]
    return noting  # not a closure: calls of one function are told to be so by its parts


def _call(function: Callable[..., Any], *args: Any, note: Note) -> Any:
    output = function(*args)
    note.take(output, args)
    return output


class _Remembered(torch.autograd.Function):
    """Saves tensors, and is part of no other graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on this node")
