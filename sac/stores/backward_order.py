"""The order in which backward comes to region calls, for values in host memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sac.torch_private import NO_TASK, will_execute_node

# Note [Order of backward]
#
# Values in host memory (`HostCopy`) are brought back before backward reads them. Only the autograd graph shows what the
# running backward will read, and in which order:
#
#   forward    A region call leaves a mark (a weak reference) on the nodes that made its results. The next call searches
#              for marks, a limited distance back from the nodes that made its inputs: these are the calls before it.
#   backward   The values of an earlier call are needed if the node from which its mark was found is going to run in
#              this same backward.
#
# A call holds the nodes that made its inputs, which the region's own graph references anyway. A limit in bytes says how
# far ahead values are brought back (Note [Transfers] in sac/stores/transfers.py).

_MARK = "sac.stores.backward_order"
_FAR = 64  # nodes searched for marks; a region's input is mostly the result of another region, or a few ops away


class CallNode:
    """One region call and the calls before it; see Note [Order of backward].

    ``copies``: the values in host memory that its backward reads, in the order of the forward.
    ``looked_ahead_in``: the transfers and the backward that have last brought up what comes after this call.
    """

    __slots__ = ("__weakref__", "_before", "copies", "looked_ahead_in")

    def __init__(self) -> None:
        self.copies: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self.looked_ahead_in: tuple[Any, int] = None, NO_TASK
        self._before: list[tuple[Any, list[weakref.ref[CallNode]]]] = []  # node of an input, calls found from it

    def follow(self, tensor: torch.Tensor) -> None:
        """Search for the calls before this one from ``tensor``, one of its inputs."""
        node = tensor.grad_fn
        if node is not None and all(node is not known for known, _ in self._before):
            self._before.append((node, _marks_from(node)))

    def mark(self, results: Iterable[Any]) -> None:
        """Mark ``results``, the leaves of the region's result, so that later calls find this one from them."""
        for result in results if self.copies else ():
            node: Any = result.grad_fn if isinstance(result, torch.Tensor) else None
            if node is not None:
                node.metadata[_MARK] = weakref.ref(self)

    def upcoming(self) -> Iterator[CallNode]:
        """Yield the calls that the running backward reaches next, nearest first."""
        waiting: deque[CallNode] = deque([self])
        seen = {self}
        while waiting:
            for node, found in waiting.popleft()._before:
                for reference in found if will_execute_node(node) else ():
                    call = reference()
                    if call is not None and call not in seen:
                        seen.add(call)
                        waiting.append(call)
                        yield call


def _marks_from(node: Any) -> list[weakref.ref[CallNode]]:
    """Return the marks nearest to ``node`` in its graph."""
    found: list[weakref.ref[CallNode]] = []
    seen, waiting = {node}, deque([node])
    while waiting:
        node = waiting.popleft()
        mark = node.metadata.get(_MARK)
        if mark is not None:
            found.append(mark)
            continue
        for below, _ in node.next_functions:
            if below is not None and below not in seen and len(seen) < _FAR:
                seen.add(below)
                waiting.append(below)
    return found
