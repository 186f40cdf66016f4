"""What the nodes of an autograd graph have saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch

# Private to torch: what Python sees of a saved tensor. That hooks hold it is told from 2.13 on, if not earlier.
_tells_hooks = hasattr(getattr(torch._C._autograd, "SavedTensor", None), "unpack_hook")


def shows_saved_tensors() -> bool:
    """Return whether this version of torch shows what nodes have saved, and what is in the hands of hooks."""
    return _tells_hooks


def nodes_between(ends: Iterable[torch.Tensor], starts: Iterable[Any]) -> Iterator[Any]:
    """Yield the graph nodes that ``ends`` depend on, as far as they were not made before the first of ``starts``.

    Nodes are numbered in the order in which a thread makes them. Private name ``_sequence_nr`` (torch 2.1 to 2.13);
    without it the whole graph is walked.
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

    Nothing where ``shows_saved_tensors`` is false.
    """
    if not shows_saved_tensors():
        return
    for name in _names_of_saved(type(node)):  # type: ignore[arg-type]  # a class is hashable
        found = getattr(node, name)
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            if saved is not None and saved.unpack_hook is None:
                yield saved


@lru_cache(maxsize=256)
def _names_of_saved(kind: type) -> tuple[str, ...]:
    """Return under which names nodes of one class have what they saved."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
