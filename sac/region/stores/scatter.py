"""Kept inputs scattered over a tensor-parallel group: each rank holds one share of what all of them have."""

from __future__ import annotations

import copy
import weakref
from typing import Any, Protocol

import torch

from sac.region.parking import PackHooks
from sac.region.stores.gathering import NO_TASK, Call, Gather, current_task
from sac.region.stores.groups import is_replicated, named_group, process_group, reaches, reference_to
from sac.region.stores.placements import Here, Origin, Placed, Placement
from sac.region.stores.replicas import check_same_on_all_ranks

# Note [Shares]
#
# Of a flat tensor of n elements over w ranks each rank keeps ceil(n / w); those of the last ranks are filled up with
# zeros, which nobody reads. Any number of elements will do, and the sum over the ranks is less than w elements more
# than n. A gather gives new memory each time.

# Note [Compared once]
#
# A tensor that is split between the ranks, as in sequence parallelism, looks like one that all of them have; its gather
# would mix their parts, and gradients would be wrong without a word. So tensors are compared over the group by a
# checksum before they are scattered: under `sac.apply` the first one from each place (region, argument); where
# functions are run as regions, which cannot be told apart on every rank in the same way (objects are made anew, and
# collected at other times), the first so many over each group. All ranks have to compare in the same calls.

Place = tuple[Any, str, int]  # process group, path of the region, position of the argument
COMPARED_CALLS = 256


class Seen(Protocol):
    """The places whose tensors need not be compared any more."""

    def __contains__(self, place: Place, /) -> bool:
        """Return whether that is so of ``place``."""

    def add(self, place: Place, /) -> None:
        """A tensor from ``place`` has been compared, or would have been."""


class FirstCalls:
    """The first tensors over each group are compared, wherever they come from."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __contains__(self, place: Place) -> bool:
        """See ``Seen``."""
        return self._counts.get(place[0], 0) >= COMPARED_CALLS

    def add(self, place: Place) -> None:
        """See ``Seen``."""
        self._counts[place[0]] = self._counts.get(place[0], 0) + 1


Verify = bool | Seen


class Scattered:
    """Keeps this rank's share of each tensor, and gathers the shares of the group in recomputation.

    ``inner`` keeps the share. ``verify``: whether tensors are compared over the group before; or which need not be
    (Note [Compared once]). ``prefetch``: of how many regions ahead the gathers are started.
    """

    def __init__(self, group: Any, inner: Placement, *, verify: Verify = False, prefetch: int = 0) -> None:
        self.group = group
        self.inner = inner
        self.verify = verify
        self.prefetch = prefetch
        self.size: int = group.size()
        self.rank: int = group.rank()

    @classmethod
    def over(cls, group: Any, inner: Placement, *, verify: Verify, prefetch: int) -> Placement | None:
        """Return the placement over ``group``, its shares kept by ``inner``; None for a group of one rank.

        ``group`` is a process group or a mesh of one dimension in which ``group_problem`` finds nothing wrong.
        """
        over = process_group(group)
        return None if over.size() == 1 else cls(over, inner, verify=verify, prefetch=prefetch)

    def __deepcopy__(self, memo: dict[int, Any]) -> Scattered:
        inner = copy.deepcopy(self.inner, memo)
        return Scattered(self.group, inner, verify=_anew(self.verify), prefetch=self.prefetch)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (reference_to(self.group), self.inner, _anew(self.verify), self.prefetch)

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether the group can gather the tensor, and all ranks have the same.

        That is so of any plain tensor, and of a DTensor that is replicated over the group.
        """
        possible = reaches(self.group, tensor.device) and is_replicated(tensor, self.group)
        return possible and self.inner.accepts(tensor)

    def put(self, flat: torch.Tensor, origin: Origin) -> Placed:
        """Keep this rank's share of ``flat``, which all ranks of the group have.

        Raises ``RegionError`` on all ranks if it is verified and they have not.
        """
        self._compare(flat, origin)
        elements = -(-flat.numel() // self.size)
        share = flat[self.rank * elements : (self.rank + 1) * elements]
        if share.numel() < elements:
            padded = flat.new_zeros(elements)
            padded[: share.numel()] = share
            share = padded
        return PlacedShare(self, self.inner.put(share, origin), flat.numel(), origin)

    def _compare(self, flat: torch.Tensor, origin: Origin) -> None:
        """Raise if the ranks do not have the same, where that is to be looked at."""
        if isinstance(self.verify, bool):
            if self.verify:
                check_same_on_all_ranks(flat, origin, self.group)
            return
        place = (self.group, *origin.place)
        if place not in self.verify:
            check_same_on_all_ranks(flat, origin, self.group)
            self.verify.add(place)

    def describe(self) -> str:
        """Say where inputs are kept."""
        inner = "" if isinstance(self.inner, Here) else f", each share {self.inner.describe()}"
        return f"scattered over {self.size} ranks{inner}"


def _anew(verify: Verify) -> Verify:
    return verify if isinstance(verify, bool) else set()


def _unpickled(reference: str | None, inner: Placement, verify: Verify, prefetch: int) -> Scattered:
    return Scattered(named_group(reference), inner, verify=verify, prefetch=prefetch)


class PlacedShare:
    """This rank's share of a flat tensor; see Note [Shares]."""

    __slots__ = (
        "__weakref__",
        "_call",
        "_elements",
        "_gather",
        "_group",
        "_inner",
        "_parked",
        "_prefetch",
        "fetched_in",
    )
    fresh = True

    def __init__(self, scattered: Scattered, inner: Placed, elements: int, origin: Origin) -> None:
        self._group = scattered.group
        self._inner: Placed | None = inner
        self._elements = elements
        self._gather: Gather | None = None
        self._parked = False
        self._prefetch = scattered.prefetch
        self._call: Call | None = None
        self.fetched_in = NO_TASK
        if self._prefetch:
            self._call = origin.call
            self._call.add(self, origin.tensor)

    def fetch(self) -> torch.Tensor:
        """Return the whole, gathered anew or by a gather that was started before."""
        assert self._inner is not None, "fetched after it was dropped"
        gather, self._gather = self._gather or Gather(self._inner.fetch(), self._group), None
        self.fetched_in = current_task()
        return gather.wait()[: self._elements]

    def start(self) -> bool:
        """Start the gather, if it can be and is not under way; return whether it was started now.

        A share that hooks around the region hold may have to be computed first, by a region around this one.
        """
        if self._inner is None or self._parked or self._gather is not None:
            return False
        self._gather = Gather(self._inner.fetch(), self._group)
        return True

    def let_go(self) -> None:
        """Let a gather that nobody has fetched go, when it is over: its memory is being written to until then."""
        gather, self._gather = self._gather, None
        if gather is not None:
            gather.wait()

    def settle(self) -> None:
        """See that copying is done."""
        if self._inner is not None:
            self._inner.settle()

    def park(self, hooks: PackHooks) -> None:
        """Hand the share to the hooks."""
        if self._inner is not None:
            self._parked = True
            self._inner.park(hooks)

    def prefetch(self) -> None:
        """Start the gathers of the regions that backward comes to next."""
        if self._call is not None:
            self._call.start_before(self._prefetch)

    def drop(self) -> None:
        """Let the share go."""
        self.let_go()
        if self._call is not None:
            self._call.forget()
        if self._inner is not None:
            self._inner.drop()
            self._inner = None

    @property
    def local(self) -> torch.Tensor | None:
        """The share, if it lies on the device."""
        return self._inner.local if self._inner is not None else None

    @property
    def host_bytes(self) -> int:
        """The bytes of the share, if it lies in host memory for a device."""
        return self._inner.host_bytes if self._inner is not None else 0
