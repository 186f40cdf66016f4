"""One tensor input of a region, kept from forward to backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sac.errors import Problem, RegionError
from sac.region.detach import copy_of, placed_on, version_watch
from sac.region.parking import PackHooks, Parked, fetch, park
from sac.region.states.bindings import UnseenWriteError, other_bytes, spare_copy
from sac.region.storages import describe, shares_storage, version_of
from sac.region.stores.placements import Stored

Start = Callable[[torch.Tensor, int], torch.Tensor]


class Alias(torch.autograd.Function):
    """The same tensor as a non-leaf, which a region may write to in place as it did in the forward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same data."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Pass the gradient on."""
        return grads[0]


class KeptTensor:
    """One tensor input: the data, whether it needs a gradient, and its version when the forward had ended.

    ``data`` is the caller's, or a copy if the region writes to it, or what hooks around the region made of it. Where a
    copy was ``stored`` before the forward, ``data`` goes when the forward is over. Of a small one without a gradient,
    as a mask or a counter is, there is a ``spare`` copy: another region may write to it before backward.
    """

    __slots__ = ("alias", "data", "needs_grad", "position", "spare", "stored", "version", "written")

    def __init__(self, tensor: torch.Tensor, position: int) -> None:
        self.position = position
        self.needs_grad = tensor.requires_grad
        self.alias: torch.Tensor | None = tensor.detach() if tensor.requires_grad else tensor
        self.data: torch.Tensor | Parked | None = self.alias
        self.version = version_of(tensor)
        self.written = False
        self.stored: Stored | None = None
        self.spare = None if self.needs_grad else spare_copy(tensor)

    @property
    def was_changed(self) -> bool:
        """Whether the caller's data was written to since the region began, unseen by the recorder."""
        return self.alias is not None and version_of(self.alias) != self.version

    def copy_onto(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Keep a copy of the data from here on; ``storages`` holds the copies made so far."""
        assert isinstance(self.data, torch.Tensor)
        if self.stored is not None:
            self.stored.drop()
            self.stored = None
        self.data, self.alias, self.written = copied(self.data, storages), None, True
        self.spare = None

    def check_writes(self, others: Sequence[KeptTensor], path: str) -> None:
        """Raise if the region has written to this input unseen and there is no sound copy; ``others``: its other ones.

        A copy to the host is made while the region runs: the write may have come first. And what is written through one
        of two inputs that lie in one storage is seen through the other, which copies of them would not show.
        """
        if self.written or not self.was_changed:
            return
        assert self.alias is not None
        aliases = [other.alias for other in others if other is not self and other.alias is not None]
        if self.stored is not None and not self.stored.bytes()[1] and not shares_storage(self.alias, aliases):
            return
        raise UnseenWriteError(
            Problem(
                where=path or "region",
                found=f"the region wrote to its input {self.position} ({describe(self.alias)}) in place, unseen by the "
                "recorder",
                fix="clone the input inside the region before writing to it",
            )
        )

    def close(self, hooks: PackHooks | None) -> None:
        """The forward is over, and its writes are checked: let go of the caller's data where a copy is stored."""
        if self.stored is not None:
            self.written = self.written or self.was_changed
            self.alias = self.data = None
            self.stored.close(hooks)
        elif hooks is not None and isinstance(self.data, torch.Tensor):
            self.data = park(self.data, hooks)
            self.alias = version_watch(self.alias) if self.alias is not None else None  # what holds data is the hooks'

    def rebuild(
        self,
        storages: dict[int, torch.UntypedStorage],
        fetched: dict[Stored, torch.Tensor],
        path: str,
        start: Start | None,
    ) -> torch.Tensor:
        """Return the input for one recomputation; ``storages`` holds the copies made for it so far."""
        data = fetched[self.stored] if self.stored is not None else self._checked(path)
        if self.written and (self.stored is None or not self.stored.placed.fresh):
            data = copied(data, storages)  # the recomputation will write to it too, and may not be the last
        if not self.needs_grad:
            return data.detach() if data.requires_grad else data  # the caller may have asked for a gradient since
        leaf = data.detach().requires_grad_()
        if start is not None:
            return start(leaf, self.position)
        return Alias.apply(leaf) if self.written else leaf  # type: ignore[no-untyped-call]

    def _checked(self, path: str) -> torch.Tensor:
        assert self.data is not None
        data = fetch(self.data)
        if self.spare is not None and (self.was_changed or other_bytes(self.spare, data.untyped_storage())):
            return placed_on(self.spare, data)
        if self.was_changed:
            assert self.alias is not None
            raise RegionError(
                Problem(
                    where=path or "region",
                    found=f"input {self.position} ({describe(data)}) was changed in place after the forward: it is at "
                    f"version {version_of(self.alias)}, backward expects version {self.version}",
                    fix="do not write to the input of a checkpointed region before backward, or pass a clone",
                )
            )
        return data


def copied(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return ``tensor`` on a copy of its storage, the same copy for all tensors that share one."""
    if type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    storage = tensor.untyped_storage()
    copy = storages.setdefault(storage._cdata, copy_of(storage))
    return placed_on(copy, tensor)
