"""Graphs of ``torch.compile`` inside a region: each is one piece there, of which rules see nothing."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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
