"""Compiled functions inside of regions, and what autograd saves of their graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch

from sac.torch_private import SAVED_TENSOR_PREFIX, SHOWS_SAVED_TENSORS, dynamo_is_loaded, tree_leaves

# -- Graphs of ``torch.compile`` inside a region: each is one piece there, of which rules see nothing

_NODE = "CompiledFunctionBackward"  # the class of AOTAutograd's nodes (torch 2.1 to 2.13, whatever the backend)


def count_compiled(output: Any, given: Any) -> int:
    """Return how many compiled graphs lie between ``given`` and ``output``, both of any structure.

    One whose result needs no gradient is not seen.
    """
    if not dynamo_is_loaded():
        return 0
    seen: set[Any] = {leaf.grad_fn for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)} | {None}
    waiting: list[Any] = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    count = 0
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        count += type(node).__name__ == _NODE
        waiting.extend(following for following, _ in node.next_functions)
    return count


# -- What the nodes of an autograd graph have saved


def nodes_between(ends: Iterable[torch.Tensor], starts: Iterable[Any]) -> Iterator[Any]:
    """Yield the graph nodes that ``ends`` depend on, as far as they were not made before the first of ``starts``.

    Nodes are numbered in the order in which a thread makes them; where they are not, the whole graph is walked.
    """
    first = min((node._sequence_nr() for node in starts if hasattr(node, "_sequence_nr")), default=-1)
    seen: set[Any] = set()
    waiting = [end.grad_fn for end in ends]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen or (first >= 0 and node._sequence_nr() < first):
            continue
        seen.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)


def saved_without_hooks(node: Any) -> Iterator[Any]:
    """Yield what a graph node has saved, but for what is in the hands of hooks: asking for that could recompute it.

    Nothing where ``SHOWS_SAVED_TENSORS`` is false.
    """
    if not SHOWS_SAVED_TENSORS:
        return
    for name in _names_of_saved(type(node)):  # type: ignore[arg-type]  # a class is hashable
        found = getattr(node, name)
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            if saved is not None and saved.unpack_hook is None:
                yield saved


@lru_cache(maxsize=256)
def _names_of_saved(kind: type) -> tuple[str, ...]:
    """Return under which names nodes of one class have what they saved."""
    return tuple(name for name in dir(kind) if name.startswith(SAVED_TENSOR_PREFIX))
