"""The order in which backward comes to region calls, and gathers of scattered inputs started ahead of it."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch

from sac.stores.stalls import Stalls
from sac.torch_private import NO_TASK, ending_task, gather_into, when_backward_ends, will_execute_node

# Note [Prefetched gathers]
#
# When backward has fetched the input of a region, it can start the gathers for the regions that it reaches next, so
# that they run while this region is recomputed. All ranks have to start the same gathers in the same order; otherwise
# shares of different tensors are combined. So the order must not depend on which objects happen to be alive: if a graph
# was dropped in a reference cycle, its shares live until garbage collection, which runs at another time on each rank.
# Only the autograd graph itself shows what will be needed, and holds it:
#
#   forward    A region call leaves a mark (a weak reference) on the nodes that made its results. The next call searches
#              for marks, a limited distance back from the nodes that made its inputs: these are the calls before it.
#   backward   The gathers of an earlier call are started if the node from which its mark was found is going to run in
#              this same backward. Then everything in between is alive, on every rank.
#
# A call holds the nodes that made its inputs, which the region's own graph references anyway. A gather that was started
# but not fetched when that backward ends is released.
#
# Copies of values in host memory (`HostCopy`) are brought back in the same order. They need not be the same on every
# rank; a limit in bytes says how far ahead (Note [Transfers] in sac/stores/transfers.py).

_MARK = "sac.stores.prefetch"
_FAR = 64  # nodes searched for marks; a region's input is mostly the result of another region, or a few ops away


class Gather:
    """A running gather of one rank's ``share`` with those of its group."""

    __slots__ = ("_full", "_share", "_work")

    def __init__(self, share: torch.Tensor, group: Any) -> None:
        assert gather_into is not None, "torch has no torch.distributed"
        self._share = share
        self._full = share.new_empty(group.size() * share.numel())
        # As bytes: backends know few dtypes.
        source, target = share.view(torch.uint8), self._full.view(torch.uint8)
        self._work = gather_into(target, source, group=group, async_op=True) if share.numel() else None

    def wait(self) -> torch.Tensor:
        """Return the shares of all ranks, flat."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return self._full

    def __del__(self) -> None:
        if getattr(self, "_work", None) is not None:
            with contextlib.suppress(Exception):  # a group that has failed writes nothing any more
                self.wait()


class Gatherable(Protocol):
    """The part of a share that its region call uses."""

    fetched_in: int  # the backward that fetched it last

    def start(self) -> bool:
        """Start the gather if possible and not already running; return whether this call started it."""

    def let_go(self) -> None:
        """Release a gather that was not fetched."""


class CallNode:
    """One region call and the calls before it; see Note [Prefetched gathers].

    ``copies``: the values in host memory that its backward reads, in the order of the forward. ``stalls``: how long
    streams have waited for these. ``looked_ahead_in``: the transfers and the backward that have last brought up what
    comes after this call.
    """

    __slots__ = ("__weakref__", "_before", "_shares", "copies", "looked_ahead_in", "stalls")

    def __init__(self) -> None:
        self.copies: list[weakref.ref[Any]] = []
        self.stalls = Stalls()
        self.looked_ahead_in: tuple[Any, int] = None, NO_TASK
        self._shares: list[weakref.ref[Gatherable]] = []
        self._before: list[tuple[Any, list[weakref.ref[CallNode]]]] = []  # node of an input, calls found from it

    def add_share(self, share: Gatherable, tensor: torch.Tensor) -> None:
        """Add the share of one input; ``tensor`` is that input."""
        self._shares.append(weakref.ref(share))
        self.follow(tensor)

    def add_copy(self, copy: Any) -> None:
        """Add a value in host memory."""
        self.copies.append(weakref.ref(copy))

    def follow(self, tensor: torch.Tensor) -> None:
        """Search for the calls before this one from ``tensor``, one of its inputs."""
        node = tensor.grad_fn
        if node is not None and all(node is not known for known, _ in self._before):
            self._before.append((node, _marks_from(node)))

    def mark(self, results: Iterable[Any]) -> None:
        """Mark ``results``, the leaves of the region's result, so that later calls find this one from them."""
        for result in results if self._shares or self.copies else ():
            node: Any = result.grad_fn if isinstance(result, torch.Tensor) else None
            if node is not None:
                node.metadata[_MARK] = weakref.ref(self)

    def forget(self) -> None:
        """Release the nodes: this call's shares will not be fetched again."""
        self._before = []

    def upcoming(self) -> Iterator[CallNode]:
        """Yield the calls that the running backward reaches next, nearest first; none outside of a backward."""
        if ending_task() == NO_TASK or will_execute_node is None:
            return
        waiting: deque[CallNode] = deque([self])
        seen = {id(self)}
        while waiting:
            for call in waiting.popleft()._needed_before():
                if id(call) not in seen:
                    seen.add(id(call))
                    waiting.append(call)
                    yield call

    def start_before(self, count: int) -> None:
        """Start the gathers of up to ``count`` calls that backward reaches next."""
        for call in islice(self.upcoming(), count):
            call._start(ending_task())

    def _needed_before(self) -> list[CallNode]:
        assert will_execute_node is not None
        needed = (reference() for node, found in self._before if will_execute_node(node) for reference in found)
        return [call for call in needed if call is not None]

    def _start(self, task: int) -> None:
        for reference in self._shares:
            share = reference()
            if share is not None and share.fetched_in != task and share.start():
                when_backward_ends(partial(_let_go, reference, task))


def _let_go(reference: weakref.ref[Gatherable], task: int) -> None:
    share = reference()
    if share is not None and share.fetched_in != task:
        share.let_go()


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
