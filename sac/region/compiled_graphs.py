"""Compiled functions inside of regions, and what autograd saves of their graphs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# -- Graphs of ``torch.compile`` inside a region: each is one piece there, of which rules see nothing

_NODE = "CompiledFunctionBackward"  # the class of AOTAutograd's nodes (torch 2.1 to 2.13, whatever the backend)


def count_compiled(output: Any, given: Any) -> int:
    """Return how many compiled graphs lie between ``given`` and ``output``, both of any structure.

    One whose result needs no gradient is not seen.
    """
    if "torch._dynamo" not in sys.modules:
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


# -- Which compiled graph a call gets where several fit it: recomputation has to get the one that forward got

# Note [Graphs that both fit]
#
# Where `torch.compile` is used inside a region, Dynamo holds the graphs of one code object in a list and takes the
# first whose guards hold. As it comes, the list is in the order of last use, and a new graph is put in front. A second
# micro-batch of another length makes a dynamic graph, which fits the first micro-batch too: recomputation of that one
# then gets the dynamic graph, and forward had the static one. The two need not save the same tensors for their
# backward: an error at best, and wrong gradients if they only save them in another order.
#
# So from the first region on that runs in a process with Dynamo, the list is in the order of making, for the whole
# process. What fits first then stays what fits first. No result hangs on the order but ours; looking a graph up may
# take a few guards more. It is not turned on again: whether the user had turned it off cannot be asked, and a graph
# that is used outside regions as well would be moved there.

# Private name (torch 2.10 to 2.13), the one that torch's own message on this gives. Without it the error remains.
_set_by_last_use = getattr(getattr(torch._C._dynamo, "eval_frame", None), "_set_lru_cache", None)


def keep_order_of_graphs() -> None:
    """Let what Dynamo has compiled stay in the order in which it was compiled; see Note [Graphs that both fit]."""
    if _set_by_last_use is not None and "torch._dynamo" in sys.modules:
        _set_by_last_use(False)
