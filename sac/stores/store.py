"""Stores for region inputs between forward and backward: protocol, and release of callers' tensors."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from sac.errors import Problem, RegionError
from sac.outer_hooks import PackHooks
from sac.stores.layout import Layout, local_of
from sac.stores.prefetch import CallNode
from sac.stores.saved_tensor import SavedTensor
from sac.tensors import shares_storage, version_of
from sac.torch_private import set_version_counters, storage_use_count

# -- Release of a caller's tensor until backward

# Note [Released inputs]
#
# Megatron and TransformerEngine free a region's input by replacing the `.data` of the caller's tensor by this rank's
# share. sac does this only on request, and with these guards:
#
#  - A tensor is released when the forward is over and a recomputation will come, but not if the region has written to
#    it or returns it.
#  - It is not released if something else holds its memory: a view, or an op that saved it as its result. Nothing would
#    be freed, and autograd rebuilds the history of a view from the tensor's shape when the version differs.
#  - Other ops for which autograd saved the tensor would compute with the share. So the tensor's version is incremented,
#    and autograd raises an error instead. The version is restored with the data; then the other ops are right again.
#  - A gradient may arrive at the tensor before its data is fetched, if that takes no recomputation: then a hook fetches
#    the data. (Accumulation into a leaf reads its shape.)
#  - A write to the share also shows in the version; the share is all that is left of the input.
#  - It is an error to pass a released tensor to a region that also releases its inputs.
#
# The price: other code that reads the tensor before backward sees the share.

_FIX = "pass a tensor that has its memory to itself (a clone), or leave release_input off"

_released = WeakTensorKeyDictionary()  # released tensor -> an alias of its replacement data


class Released:
    """One caller's tensor, held weakly; see Note [Released inputs].

    ``left`` is the flat data that it keeps; None for nothing. ``fetch`` is called if a gradient arrives at the tensor
    before its data is fetched.
    """

    __slots__ = ("_caller", "_given", "_hook", "_own_version", "_version")

    def __init__(self, tensor: torch.Tensor, left: torch.Tensor | None, fetch: Callable[[torch.Tensor], None]) -> None:
        local = local_of(tensor)
        self._caller = TensorWeakRef(tensor)
        self._own_version = version_of(tensor)
        local.data = local.new_empty(0) if left is None else left
        torch.autograd.graph.increment_version(tensor)
        self._given = local.detach()
        self._version = version_of(self._given)
        _released[tensor] = self._given
        self._hook = tensor.register_hook(fetch) if tensor.requires_grad else None

    def give_back(self, data: torch.Tensor, path: str) -> None:
        """Give ``data`` to the caller's tensor if it is still alive; raises ``RegionError`` if it was written to."""
        self.forget()
        if version_of(self._given) != self._version:
            found = (
                "its input was changed in place after it had been released, which changed the data that is kept of it"
            )
            fix = "do not write to a released tensor, or leave release_input off"
            raise RegionError(Problem(path or "region", found, fix=fix))
        tensor = self._caller()
        if tensor is None or not is_released(tensor):
            return
        del _released[tensor]
        local_of(tensor).data = local_of(data)
        _set_version(tensor, self._own_version)

    def forget(self) -> None:
        """Remove the hook: the data will not be fetched for the tensor any more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def is_released(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has been released, and has not been given other data since."""
    given = _released.get(tensor)
    return given is not None and local_of(tensor).is_set_to(given)


def is_worth_it(tensor: torch.Tensor) -> bool:
    """Return whether releasing ``tensor`` frees its memory: nothing else holds the storage."""
    count = storage_use_count
    if count is None:
        return False
    mine, fresh = local_of(tensor), torch.empty(0)
    return bool(count(mine.untyped_storage()._cdata) == count(fresh.untyped_storage()._cdata))


def check_releasable(tensor: torch.Tensor, leaves: Iterable[object], name: Callable[[], str]) -> None:
    """Raise ``RegionError`` if ``tensor``, one of the ``leaves`` of a call, could not be released after the call."""
    if is_released(tensor):
        found = "the region that it was passed to before has released it: only a share of its data is left"
        raise RegionError(Problem(name(), found, fix="leave release_input off where an input is used more than once"))
    others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf is not tensor]
    if tensor._base is not None:
        found = "it is a view, and releasing it would not free the memory of its base"
    elif shares_storage(tensor, others):
        found = "it shares its memory with another tensor of this call, and releasing it would not free that"
    elif tensor.is_inference():
        found = "it is an inference tensor, whose data cannot be exchanged"
    else:
        return
    raise RegionError(Problem(name(), found, fix=_FIX))


def _set_version(tensor: torch.Tensor, version: int) -> None:
    if set_version_counters is not None:  # without it, another op that saved the tensor always raises
        set_version_counters((tensor,), (version,))


# -- Input stores

# Note [Kept inputs]
#
# A region holds its inputs until its recomputation. By default it holds the caller's data and checks that nothing wrote
# to it. With an `InputStoring` it copies the chosen inputs before the forward, so that the caller may free or overwrite
# them. The tensor is laid flat in memory order (`Layout`) and put into one or more stores, outermost first:
#
#   scattered      this rank's share of a tensor that every rank of a group holds (`scatter.Scattered`)
#   contiguous     a slot of one preallocated buffer (`contiguous.ContiguousBuffer`)
#   host           a copy in host memory (`host.OnHost`)
#
# Each store's `put` returns a `StoredTensor`, whose `fetch` returns the flat tensor; recomputation restores its layout.
# A chosen input is never also held by handles or by the recorder.
#
# Example. The store is `Scattered(group, OnHost())` over 4 GPU ranks, and x is a transposed bfloat16[4096, 8192] of
# 64 MiB. `Layout.of` returns a flat view of 2^25 elements. `Scattered.put` takes this rank's 2^23 of them, and
# `OnHost.put` copies these 16 MiB to pinned memory. For the recomputation, `fetch` copies the share back to the device
# and gathers the 4 shares, and `Layout.restore` returns the transposed tensor.


class StoredTensor(SavedTensor):
    """One flat tensor between forward and backward. Abstract.

    ``fresh``: whether each ``fetch`` returns new memory, which may be written to. ``drop`` may be called more than
    once.
    """

    __slots__ = ("value", "watched")
    fresh = True

    def __init__(self, value: torch.Tensor | None = None) -> None:
        self.value = value
        self.watched = None

    def settle(self) -> None:
        """The source of the copy is about to be written to or freed: make sure that the copy is done by then."""

    def prefetch(self) -> None:
        """Start to fetch what backward needs next, if that saves time."""

    @property
    def local(self) -> torch.Tensor | None:
        """The flat data held on the device, if any; valid before ``pack_with_outer_hooks``."""
        return self.value if isinstance(self.value, torch.Tensor) else None

    @property
    def host_bytes(self) -> int:
        """The bytes held in host memory on behalf of a device; valid before ``pack_with_outer_hooks``."""
        return 0


@dataclass(frozen=True, slots=True)
class ArgumentInfo:
    """The argument that a flat tensor comes from, used while the tensor is put into a store; calling it returns a name.

    ``layout`` is that of ``tensor``, the argument; ``call`` is the region call, the same for all its inputs.
    ``position``: the region's path, and the position of the argument among the leaves of the call.
    """

    tensor: torch.Tensor
    layout: Layout
    call: CallNode
    position: tuple[str, int]
    name: Callable[[], str]

    def __call__(self) -> str:
        """Return how the call writes the argument: ``args[0]``."""
        return self.name()


class InputStore(ABC):
    """A way to keep flat tensors."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether this store can keep the input; if not, the region holds the caller's data."""
        return True

    @abstractmethod
    def put(self, flat: torch.Tensor, name: Any, /) -> StoredTensor:
        """Copy ``flat`` into the store; ``name``, an ``ArgumentInfo``, is not held, and called in errors only."""

    @abstractmethod
    def describe(self) -> str:
        """Say where inputs are kept, for reports: ``in host memory``."""


class OnDevice(InputStore):
    """Keeps a copy on the tensor's device."""

    def put(self, flat: torch.Tensor, name: Callable[[], str]) -> StoredTensor:
        """Copy ``flat``."""
        return StoredOnDevice(flat.clone())

    def describe(self) -> str:
        """Say where inputs are kept."""
        return "on the device"


class StoredOnDevice(StoredTensor):
    """A flat tensor on the device it came from."""

    __slots__ = ()
    fresh = False


@dataclass(frozen=True, slots=True)
class InputStoring:
    """Which inputs of a region are kept in ``store``; the others stay where the caller holds them.

    ``which``: ``first`` (the first floating-point tensor), ``all`` (every floating-point tensor), or a predicate of the
    input's position among the leaves of ``(args, kwargs)`` and the tensor. ``release``: after the forward and until
    backward, the caller's tensor holds only the data that this rank keeps on the device.
    """

    store: InputStore
    which: str | Callable[[int, torch.Tensor], bool] = "first"
    release: bool = False

    def choose(self, leaves: Sequence[Any]) -> list[int]:
        """Return the positions of the leaves to put into the store."""
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
        return [position for position, leaf in chosen if Layout.fits(leaf) and self.store.accepts(leaf)]


class StoredInput:
    """One input in a store: its layout and its stored tensor."""

    __slots__ = ("__weakref__", "_released", "layout", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        store: InputStore,
        call: CallNode,
        position: tuple[str, int],
        name: Callable[[], str],
    ) -> None:
        self._released: Released | None = None
        with torch.no_grad():
            self.layout, flat = Layout.of(tensor.detach())
            self.tensor = store.put(flat, ArgumentInfo(tensor, self.layout, call, position, name))

    def close(self, hooks: PackHooks | None) -> None:
        """The forward is over."""
        self.tensor.settle()
        if hooks is not None:
            self.tensor.pack_with_outer_hooks(hooks)

    def release(self, tensor: torch.Tensor) -> None:
        """Leave the caller's ``tensor`` only the data that is kept on the device, until it is fetched."""
        self._released = Released(tensor, self.tensor.local, partial(_fetch_released, weakref.ref(self)))

    @property
    def is_released(self) -> bool:
        """Whether a caller's tensor waits for its data."""
        return self._released is not None

    def fetch(self, path: str) -> torch.Tensor:
        """Return the input with its original layout; ``path`` names the region in messages."""
        with torch.no_grad():
            flat = self.tensor.fetch()
            data = self.layout.restore(flat)
            if self._released is not None:
                own = data if self.tensor.fresh else self.layout.restore(flat.clone())
                released, self._released = self._released, None
                released.give_back(own, path)
            return data

    def drop(self) -> None:
        """Release the data."""
        if self._released is not None:
            self._released.forget()
            self._released = None
        self.tensor.drop()

    def bytes(self) -> tuple[int, int]:
        """Return the bytes held on the device and on the host."""
        local = self.tensor.local
        return 0 if local is None else local.numel() * local.element_size(), self.tensor.host_bytes


def _fetch_released(reference: weakref.ref[StoredInput], grad: torch.Tensor) -> None:
    """Hook of a released tensor: ``grad`` is about to be accumulated into it or passed on."""
    stored = reference()
    if stored is not None and stored.is_released:
        stored.fetch("")
