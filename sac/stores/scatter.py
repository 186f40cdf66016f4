"""Input store: inputs scattered over a process group, of which each rank holds its share until backward."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from sac.checksums import checksum
from sac.errors import ConfigError, Problem, RegionError
from sac.policy.syntax import shown
from sac.stores.layout import is_dtensor
from sac.stores.store import ArgumentInfo, InputStore, OnDevice, StoredTensor
from sac.torch_private import gather_into, named_process_group

# -- The process group


def check_group(group: Any, where: str) -> None:
    """Raise ``ConfigError`` if ``group`` cannot be the tensor-parallel group of this rank; ``where`` names the call."""
    if group is None:
        found = "inputs are to be scattered, but there is no group to scatter them over"
        fix = "pass tp_group=, the group whose ranks all have this input"
    elif not (dist.is_available() and dist.is_initialized()):
        found, fix = "torch.distributed is not initialised", "call torch.distributed.init_process_group first"
    elif _is_mesh(group) and group.ndim != 1:
        names = ", ".join(group.mesh_dim_names or ())
        found, fix = f"the mesh has {group.ndim} dimensions ({names})", 'pass one of them, as in mesh["tp"]'
    elif not (isinstance(group, dist.ProcessGroup) or _is_mesh(group) or group is dist.GroupMember.NON_GROUP_MEMBER):
        found, fix = f"{shown(repr(group))} is not a group", ""
    elif not _is_member(group):
        found = f"rank {dist.get_rank()} is not in the group, or the group has been destroyed"
        fix = "pass each rank the tensor-parallel group that it is in"
    else:
        return
    legal = "a process group that holds this rank, or a mesh of one dimension"
    raise ConfigError(Problem(f"{where}.tp_group", found, legal, fix=fix))


def _is_member(group: Any) -> bool:
    if _is_mesh(group):
        return group.get_coordinate() is not None
    try:
        return dist.get_rank(group) >= 0
    except ValueError:  # torch does not know the group, or has destroyed it
        return False


def _is_mesh(group: Any) -> bool:
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(group, module.DeviceMesh)


def process_group(group: Any) -> Any:
    """Return the process group of ``group``, for which ``check_group`` has found no problem."""
    return group.get_group() if _is_mesh(group) else group


def check_replicated(flat: torch.Tensor, argument: ArgumentInfo, group: Any) -> None:
    """Raise ``RegionError`` on every rank of ``group`` if shape, strides, dtype or bits differ between its ranks.

    One all-reduce of the minimum of x and of -x shows whether all ranks have the same number x.
    """
    layout = argument.layout
    values = [one.tolist() if isinstance(one, torch.Tensor) else one for one in checksum(flat)]
    compared = repr((tuple(layout.shape), layout.stride, layout.bits, flat.dtype, values))
    own = int.from_bytes(hashlib.blake2b(compared.encode(), digest_size=7).digest(), "big")
    both = torch.tensor([own, -own], device=flat.device)
    dist.all_reduce(both, op=dist.ReduceOp.MIN, group=group)
    least, negated = both.tolist()
    if least != -negated:
        found = (
            f"its shape, strides, dtype or values differ between the {group.size()} ranks of the group that it is to "
            "be scattered over (is it split between them, as in sequence parallelism?)"
        )
        fix = "scatter what all ranks have whole: choose by `keep`, or keep the inputs of this region whole"
        raise RegionError(Problem(argument(), found, fix=fix))


# -- The store

# Note [Shares]
#
# Each of w ranks keeps ceil(n / w) elements of a flat tensor of n elements. The shares of the last ranks are padded
# with zeros, which are never read. Any number of elements works, and the total over the ranks exceeds n by less than w
# elements. Each gather returns new memory.

# Note [Compared once]
#
# A tensor that is split between the ranks, as in sequence parallelism, looks like a replicated one. A gather would mix
# the ranks' parts, and gradients would be silently wrong. So tensors are compared over the group by a checksum before
# they are scattered. Under `sac.apply`, the first tensor from each place (region, argument) is compared. Functions that
# run as regions cannot be identified in the same way on every rank (objects are re-created, and collected at different
# times); for them, the first `COMPARED_CALLS` tensors over each group are compared. All ranks have to compare in the
# same calls.

ArgumentKey = tuple[Any, str, int]  # process group, path of the region, position of the argument
COMPARED_CALLS = 256


class FirstCalls:
    """Compares the first ``COMPARED_CALLS`` tensors over each group, wherever they come from; used like a set."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __contains__(self, position: ArgumentKey) -> bool:
        """Return whether tensors from ``position`` need no further comparison."""
        return self._counts.get(position[0], 0) >= COMPARED_CALLS

    def add(self, position: ArgumentKey) -> None:
        """Count a comparison over the group of ``position``."""
        self._counts[position[0]] = self._counts.get(position[0], 0) + 1


Compared: TypeAlias = FirstCalls | set[ArgumentKey]  # the places whose tensors need no further comparison


class Scattered(InputStore):
    """Keeps this rank's share of each tensor, and gathers the shares of the group in recomputation.

    ``inner`` keeps the share. ``compared``: the places whose tensors need no comparison over the group (Note [Compared
    once]).
    """

    def __init__(self, group: Any, inner: InputStore, compared: Compared) -> None:
        self.group, self.inner, self.compared = group, inner, compared
        self.size: int = group.size()
        self.rank: int = group.rank()
        shares = "" if isinstance(inner, OnDevice) else f", each share {inner.place}"
        self.place = f"scattered over {self.size} ranks{shares}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.group.group_name, self.inner)

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether the group can gather the tensor, and all ranks have the same tensor.

        The latter is assumed for plain tensors, and true for a DTensor that is replicated over its mesh.
        """
        placements = getattr(tensor, "placements", ()) if is_dtensor(tensor) else ()
        devices = getattr(self.group, "_device_types", [tensor.device])  # a group for NCCL alone has none for the CPU
        return all(one.is_replicate() for one in placements) and tensor.device.type in {one.type for one in devices}

    def put(self, flat: torch.Tensor, argument: ArgumentInfo) -> StoredTensor:
        """Keep this rank's share of ``flat``, which all ranks of the group have.

        Raises ``RegionError`` on all ranks if verification finds that their tensors differ.
        """
        position = (self.group, *argument.position)
        if position not in self.compared:
            check_replicated(flat, argument, self.group)
            self.compared.add(position)
        elements = -(-flat.numel() // self.size)
        share = flat[self.rank * elements : (self.rank + 1) * elements]
        if share.numel() < elements:
            share = torch.nn.functional.pad(share, (0, elements - share.numel()))
        stored = self.inner.put(share, argument)
        return replace(stored, fetch=partial(_gathered, stored.fetch, self.group, flat.numel()))


def _unpickled(name: str, inner: InputStore) -> Scattered:
    """Return a store over the group of this name, which this process has made in the same order."""
    return Scattered(named_process_group(name), inner, set())


def _gathered(fetch: Callable[[], torch.Tensor], group: Any, elements: int) -> torch.Tensor:
    """Return the whole flat tensor of the shares that ``fetch`` returns; see Note [Shares]."""
    share = fetch()
    full = share.new_empty(group.size() * share.numel())
    if share.numel():  # as bytes: backends know few dtypes
        gather_into(full.view(torch.uint8), share.view(torch.uint8), group=group)
    return full[:elements]
