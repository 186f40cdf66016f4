"""All-gathers of kept shares: at once, or started while an earlier backward still computes."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Note [Prefetched gathers]
#
# Backward fetches the inputs of regions in the reverse order of forward. When one has been fetched, the gathers of the
# regions before it can be started, so that they run while it is recomputed. All ranks have to start the same gathers in
# the same order, or shares of different tensors are put together. So nothing may depend on what happens to be alive:
# of a graph that has been dropped in a reference cycle the share lives on some ranks and not on others, until the
# collector comes. A gather is started only if the node that made the region's input is going to be run in this very
# backward: then its graph lives, on every rank. A share holds that node, which the region's own graph leads to anyway;
# shares of one group know of each other by weak references only. What was started and not fetched is let go when that
# backward ends.

# Renamed in torch 2.13, where the old name warns.
_gather_into = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
# Private names (torch 2.11 to 2.13); without them nothing is started ahead.
_will_run = getattr(torch._C, "_will_engine_execute_node", None)
_task_id = getattr(torch._C, "_current_graph_task_id", None)
_NO_TASK = -1


class Gather:
    """The gather of one rank's ``share`` with those of its group, under way."""

    __slots__ = ("_full", "_share", "_work")

    def __init__(self, share: torch.Tensor, group: Any) -> None:
        assert _gather_into is not None, "torch has no torch.distributed"
        self._share = share
        self._full = share.new_empty(group.size() * share.numel())
        # As bytes: backends know few dtypes.
        source, target = share.view(torch.uint8), self._full.view(torch.uint8)
        self._work = _gather_into(target, source, group=group, async_op=True) if share.numel() else None

    def wait(self) -> torch.Tensor:
        """Return the shares of all ranks, flat."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return self._full

    def __del__(self) -> None:
        if getattr(self, "_work", None) is not None:
            with contextlib.suppress(Exception):  # a group that has failed has nothing to write any more
                self.wait()


class Gatherable(Protocol):
    """A share, as far as the others of its group are concerned.

    ``call`` is the same object for all inputs of one region call; ``node`` is what made the input; ``fetched_in`` is
    the backward that fetched it last.
    """

    call: object
    node: Any
    fetched_in: int

    @property
    def can_start(self) -> bool:
        """Whether a gather could be started ahead at all."""

    def start(self) -> bool:
        """Start the gather, unless it is under way; return whether it was started now."""

    def let_go(self) -> None:
        """Let a gather that nobody has fetched go."""


class Chain:
    """The shares of one group, in the order in which forward made them; see Note [Prefetched gathers]."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._alive: dict[int, weakref.ref[Gatherable]] = {}

    def add(self, share: Gatherable) -> int:
        """Put a share at the end; return its number."""
        number = next(self._numbers)
        self._alive[number] = weakref.ref(share, partial(_forget, self._alive, number))
        return number

    def remove(self, number: int) -> None:
        """Take the share of this number out, if it is there."""
        self._alive.pop(number, None)

    def start_before(self, number: int, count: int) -> None:
        """Start the gathers of the ``count`` regions that backward comes to after the share of this number."""
        task = current_task()
        if task == _NO_TASK or _will_run is None:
            return
        for shares in self._calls_before(number):
            if count == 0:
                return
            if any(share.fetched_in == task for share in shares):
                continue
            if any(share.node is not None and _will_run(share.node) for share in shares):
                count -= 1
                for share in shares:
                    if share.can_start and share.start():
                        when_over = torch.autograd.Variable._execution_engine.queue_callback
                        when_over(partial(_let_go, weakref.ref(share), task))

    def _calls_before(self, number: int) -> Iterator[list[Gatherable]]:
        """Yield the shares of each region call before that of share ``number``, the latest call first."""
        alive = sorted(self._alive.items(), reverse=True)
        by_call: dict[int, list[Gatherable]] = {}
        own: object = None
        for other, reference in alive:
            share = reference()
            if share is None or other > number:
                continue
            if other == number:
                own = share.call
            elif share.call is not own:
                by_call.setdefault(id(share.call), []).append(share)
        yield from by_call.values()


def _forget(alive: dict[int, Any], number: int, reference: Any) -> None:
    alive.pop(number, None)


def _let_go(reference: weakref.ref[Gatherable], task: int) -> None:
    share = reference()
    if share is not None and share.fetched_in != task:
        share.let_go()


def current_task() -> int:
    """Return the number of the backward that runs on this thread; -1 outside of one."""
    return _NO_TASK if _task_id is None else int(_task_id())


_chains: weakref.WeakKeyDictionary[Any, Chain] = weakref.WeakKeyDictionary()


def chain_of(group: Any) -> Chain:
    """Return the chain of a process group, which is one for all placements over it."""
    return _chains.setdefault(group, Chain())
