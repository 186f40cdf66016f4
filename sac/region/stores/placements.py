"""Where a kept input lies between forward and backward, when not where the caller holds it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from sac.region.parking import PackHooks, Parked, fetch, park
from sac.region.stores.gathering import Call
from sac.region.stores.layout import Layout
from sac.region.stores.release import Released

# Note [Kept inputs]
#
# A region's inputs wait for its recomputation. By default the region holds on to the caller's data and checks that
# nobody wrote to it. With a `Keeping` it copies the chosen inputs before the forward, so that the caller may free or
# overwrite them: tensor -> flat, in the order of its storage (`Layout`) -> one or more placements, the outermost first:
#
#   scattered      this rank's share of a tensor that every rank of a group holds (`scatter.Scattered`)
#   contiguous     a slot of one preallocated buffer (`contiguous.ContiguousBuffer`)
#   host           a copy in host memory (`host.Host`)
#
# Each placement's `put` gives a `Placed`, whose `fetch` gives the flat tensor back; recomputation lays it out as it
# was. A chosen input is never held in another way too: not by handles, not by the recorder.


class Placed(Protocol):
    """One flat tensor between forward and backward.

    ``fresh``: whether each ``fetch`` returns memory of its own, which may be written to.
    """

    @property
    def fresh(self) -> bool:
        """See above."""

    def fetch(self) -> torch.Tensor:
        """Return the flat tensor on the device it came from."""

    def settle(self) -> None:
        """What the data was copied from is about to be written to or freed: see that copying is done by then."""

    def park(self, hooks: PackHooks) -> None:
        """Hand what is held to the saved-tensor hooks around the region."""

    def prefetch(self) -> None:
        """Start to bring back what a neighbouring region will want next, if there is anything to gain."""

    def drop(self) -> None:
        """Let the data go: nobody will fetch it. May be called more than once."""

    @property
    def local(self) -> torch.Tensor | None:
        """What is held on the device, flat, if anything; before ``park``."""

    @property
    def host_bytes(self) -> int:
        """The bytes held in host memory on behalf of a device; before ``park``."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Which argument a flat tensor is made of, for as long as it is being put somewhere; called, it tells its name.

    ``layout`` is that of ``tensor``, the argument; ``call`` is the region call, the same for all its inputs. ``place``:
    the region's path, and the position of the argument among its leaves.
    """

    tensor: torch.Tensor
    layout: Layout
    call: Call
    place: tuple[str, int]
    name: Callable[[], str]

    def __call__(self) -> str:
        """Return how the call writes the argument: ``args[0]``."""
        return self.name()


class Placement(Protocol):
    """A way to keep flat tensors."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether this input can be kept so at all; if not, it is kept whole."""

    def put(self, flat: torch.Tensor, name: Origin, /) -> Placed:
        """Copy ``flat`` to where it is kept; ``name`` is called for the argument's name, and not held."""

    def describe(self) -> str:
        """Say where inputs are kept, for reports: ``in host memory``."""


class Here:
    """Keeps a copy on the device where the tensor is."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Any tensor will do."""
        return True

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> Placed:
        """Copy ``flat``."""
        return PlacedHere(flat.clone())

    def describe(self) -> str:
        """Say where inputs are kept."""
        return "on the device"


class PlacedHere:
    """A flat tensor on the device it came from."""

    __slots__ = ("_kept",)
    fresh = False

    def __init__(self, flat: torch.Tensor) -> None:
        self._kept: torch.Tensor | Parked | None = flat

    def fetch(self) -> torch.Tensor:
        """Return the tensor itself."""
        assert self._kept is not None, "fetched after it was dropped"
        return fetch(self._kept)

    def settle(self) -> None:
        """The copy is ordered before whatever comes next on the stream."""

    def park(self, hooks: PackHooks) -> None:
        """Hand the copy to the hooks."""
        if isinstance(self._kept, torch.Tensor):
            self._kept = park(self._kept, hooks)

    def prefetch(self) -> None:
        """It is here."""

    def drop(self) -> None:
        """Let the copy go."""
        self._kept = None

    @property
    def local(self) -> torch.Tensor | None:
        """The copy."""
        return self._kept if isinstance(self._kept, torch.Tensor) else None

    @property
    def host_bytes(self) -> int:
        """None of it is on the host."""
        return 0


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which inputs of a region are kept by ``placement``; the others are kept whole.

    ``which``: ``first`` (the first floating-point tensor), ``all`` (every floating-point tensor), or a predicate of the
    input's position among the leaves of ``(args, kwargs)`` and the tensor. ``release``: after the forward the caller's
    tensor is given what this rank keeps in place of its data, until backward.
    """

    placement: Placement
    which: str | Callable[[int, torch.Tensor], bool] = "first"
    release: bool = False

    def choose(self, leaves: Sequence[Any]) -> list[int]:
        """Return the positions of the leaves to be kept elsewhere."""
        tensors = [
            (position, leaf)
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)
        ]
        if callable(self.which):
            chosen = [(position, leaf) for position, leaf in tensors if self.which(position, leaf)]
        else:
            chosen = [(position, leaf) for position, leaf in tensors if leaf.is_floating_point() or leaf.is_complex()]
            chosen = chosen[:1] if self.which == "first" else chosen
        return [position for position, leaf in chosen if Layout.fits(leaf) and self.placement.accepts(leaf)]


class Stored:
    """One kept input: how it is laid out, and where it lies."""

    __slots__ = ("__weakref__", "_released", "layout", "placed")

    def __init__(
        self,
        tensor: torch.Tensor,
        placement: Placement,
        call: Call,
        place: tuple[str, int],
        name: Callable[[], str],
    ) -> None:
        self._released: Released | None = None
        with torch.no_grad():
            self.layout, flat = Layout.of(tensor.detach())
            self.placed = placement.put(flat, Origin(tensor, self.layout, call, place, name))

    def close(self, hooks: PackHooks | None) -> None:
        """The forward is over."""
        self.placed.settle()
        if hooks is not None:
            self.placed.park(hooks)

    def release(self, tensor: torch.Tensor) -> None:
        """Leave the caller's ``tensor`` nothing but what is kept of it on the device, until it is fetched."""
        self._released = Released(tensor, self.placed.local, partial(_fetch_released, weakref.ref(self)))

    @property
    def is_released(self) -> bool:
        """Whether a caller's tensor waits for its data."""
        return self._released is not None

    def fetch(self, path: str) -> torch.Tensor:
        """Return the input, laid out as it was; ``path`` names the region in messages."""
        with torch.no_grad():
            flat = self.placed.fetch()
            data = self.layout.restore(flat)
            if self._released is not None:
                own = data if self.placed.fresh else self.layout.restore(flat.clone())
                released, self._released = self._released, None
                released.give_back(own, path)
            return data

    def drop(self) -> None:
        """Let the data go."""
        if self._released is not None:
            self._released.forget()
            self._released = None
        self.placed.drop()

    def bytes(self) -> tuple[int, int]:
        """Return the bytes held on the device and on the host."""
        local = self.placed.local
        return 0 if local is None else local.numel() * local.element_size(), self.placed.host_bytes


def _fetch_released(reference: weakref.ref[Stored], grad: torch.Tensor) -> None:
    """A hook on a released tensor: ``grad`` is about to be accumulated into it, or passed on."""
    stored = reference()
    if stored is not None and stored.is_released:
        stored.fetch("")
