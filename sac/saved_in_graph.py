"""What the nodes of an autograd graph have saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor

from sac.torch_private import SAVED_TENSOR_PREFIX, SHOWS_SAVED_TENSORS


def nodes_since(ends: Iterable[Tensor], first: int) -> Iterator[Any]:
    """Yield the graph nodes that ``ends`` depend on, except those with a number below ``first``.

    Each thread numbers nodes in the order in which it makes them.
    """
    seen: set[Any] = set()
    waiting: list[Any] = [end.grad_fn for end in ends]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and node._sequence_nr() >= first:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)


def saved_without_hooks(node: Any) -> Iterator[Any]:
    """Yield the saved tensors of a graph node, except those that hooks hold: reading these could recompute them.

    Nothing where this torch does not show which ones hooks hold.
    """
    for name in _names_of_saved(type(node)) if SHOWS_SAVED_TENSORS else ():  # type: ignore[arg-type]  # is hashable
        found = getattr(node, name)
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            if saved is not None and saved.unpack_hook is None and saved.data is not None:
                yield saved


@lru_cache(maxsize=256)
def _names_of_saved(cls: type) -> tuple[str, ...]:
    """Return the attribute names under which nodes of one class have their saved tensors."""
    return tuple(name for name in dir(cls) if name.startswith(SAVED_TENSOR_PREFIX))
