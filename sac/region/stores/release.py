"""A caller's tensor that keeps only what its region keeps of it, until backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from sac.errors import Problem, RegionError
from sac.region.storages import shares_storage, version_of
from sac.region.stores.layout import local_of

# Note [Released inputs]
#
# Megatron and TransformerEngine free a region's input by giving the caller's tensor another `.data`: this rank's share.
# Here that is on request only, and guarded:
#
#  - It is done when the forward is over and a recomputation will come, and not to a tensor that the region has written
#    to or returns.
#  - Nor to one whose memory something else holds: a view, an op that saved it as its result. Nothing would be freed,
#    and autograd makes the history of a view anew, from the tensor's shape, when the version is another.
#  - Whatever else autograd has saved the tensor for would compute with the share. So the tensor's version is raised:
#    autograd then raises instead. It is put back with the data, and from then on the other op is right again.
#  - A gradient may arrive at the tensor before its data is fetched, if that takes no recomputation: then it is fetched
#    for that. (Accumulation into a leaf looks at its shape.)
#  - A write to the share shows in the version too; what lies there is all that is left of the input.
#  - To pass a released tensor to a region is an error, if that region keeps its inputs elsewhere too.
#
# What else reads the tensor meanwhile sees the share: that is the price.

_FIX = "pass a tensor that has its memory to itself (a clone), or leave release_input off"

_released = WeakTensorKeyDictionary()  # released tensor -> an alias of what it was given


class Released:
    """One caller's tensor, held weakly; see Note [Released inputs].

    ``left`` is what it keeps, flat; None for nothing. ``fetch`` is called when a gradient arrives at the tensor first.
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
        """Let the caller's tensor, if it still lives, have ``data``; raises ``RegionError`` if it was written to."""
        self.forget()
        if version_of(self._given) != self._version:
            found = "its input was changed in place after it had been released, and what is kept of it with it"
            fix = "do not write to a released tensor, or leave release_input off"
            raise RegionError(Problem(path or "region", found, fix=fix))
        tensor = self._caller()
        if tensor is None or not is_released(tensor):
            return
        del _released[tensor]
        local_of(tensor).data = local_of(data)
        _set_version(tensor, self._own_version)

    def forget(self) -> None:
        """The data will not be fetched for the tensor any more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def is_released(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has been released, and nobody has given it other data since."""
    given = _released.get(tensor)
    return given is not None and local_of(tensor).is_set_to(given)


def is_worth_it(tensor: torch.Tensor) -> bool:
    """Return whether to release ``tensor`` frees its memory: whether nothing else holds that."""
    # Private name (torch 2.11 to 2.13); without it nothing is released.
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return False
    mine, fresh = local_of(tensor), torch.empty(0)
    return bool(count(mine.untyped_storage()._cdata) == count(fresh.untyped_storage()._cdata))


def check_releasable(tensor: torch.Tensor, leaves: Iterable[object], name: Callable[[], str]) -> None:
    """Raise ``RegionError`` if ``tensor``, one of the ``leaves`` of a call, could not be released after it."""
    if is_released(tensor):
        found = "the region that it was passed to before has released it: of its data a share is left"
        raise RegionError(Problem(name(), found, fix="leave release_input off where an input is used more than once"))
    others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf is not tensor]
    if tensor._base is not None:
        found = "it is a view, and to release it would not free the memory of its base"
    elif shares_storage(tensor, others):
        found = "it shares its memory with another tensor of this call, and to release it would not free that"
    elif tensor.is_inference():
        found = "it is an inference tensor, whose data cannot be exchanged"
    else:
        return
    raise RegionError(Problem(name(), found, fix=_FIX))


def _set_version(tensor: torch.Tensor, version: int) -> None:
    # Private name (torch 2.6 to 2.13); without it another op that saved the tensor raises in any case.
    put_back = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
    if put_back is not None:
        put_back((tensor,), (version,))
