"""Input store: inputs scattered over a process group, of which each rank holds its share until backward."""

from __future__ import annotations

import copy
import hashlib
import sys
import weakref
from contextlib import suppress
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from sac.checksums import checksum
from sac.errors import ConfigError, Problem, RegionError
from sac.policy.syntax import shown
from sac.stores.layout import is_dtensor
from sac.stores.store import ArgumentInfo, InputStore, OnDevice, StoredInside, StoredTensor
from sac.torch_private import gather_into, named_process_group

# -- The process group

LEGAL = "a process group that holds this rank, or a mesh of one dimension"


def group_problem(group: Any, where: str) -> list[Problem]:
    """Return what is wrong with ``group`` as the tensor-parallel group of this rank; ``where`` names the call."""
    found, fix = _fault_of(group)
    return [Problem(f"{where}.tp_group", found, LEGAL, fix=fix)] if found else []


def _fault_of(group: Any) -> tuple[str, str]:
    """Return what is wrong with a group, and the fix; nothing if it can be used."""
    if group is None:
        found = "inputs are to be scattered, but there is no group to scatter them over"
        return found, "pass tp_group=, the group whose ranks all have this input"
    if not (dist.is_available() and dist.is_initialized()):
        return "torch.distributed is not initialised", "call torch.distributed.init_process_group first"
    if _is_mesh(group):
        if group.ndim != 1:
            found, names = f"the mesh has {group.ndim} dimensions", group.mesh_dim_names
            if not names:
                return found, "name its dimensions and pass one of them"
            return f"{found} ({', '.join(names)})", f'pass one of them: mesh["{names[-1]}"]'
        group = group.get_group() if group.get_coordinate() is not None else dist.GroupMember.NON_GROUP_MEMBER
    elif not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        return f"{shown(repr(group))} is not a group", ""
    try:
        is_member = dist.get_rank(group) >= 0
    except ValueError:  # torch does not know the group, or has destroyed it
        return "the group has been destroyed", ""
    found = f"rank {dist.get_rank()} is not in the group"
    return ("", "") if is_member else (found, "pass each rank the tensor-parallel group that it is in")


def _is_mesh(group: Any) -> bool:
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(group, module.DeviceMesh)


def process_group(group: Any) -> Any:
    """Return the process group of ``group``, for which ``group_problem`` has found no problem."""
    return group.get_group() if _is_mesh(group) else group


def _named_group(name: str | None) -> Any:
    """Return the process group that was pickled as ``name``, None: the default group.

    Raises ``ConfigError`` if this process lacks it.
    """
    missing = "torch.distributed is not initialised here"
    if dist.is_available() and dist.is_initialized():
        missing = "there is no such group here"
        with suppress(RuntimeError, ValueError, KeyError):
            group = dist.group.WORLD if name is None else named_process_group(name)
            if group is not None:
                return group
    group = "the default group" if name is None else f'the process group "{name}"'
    fix = "make the same groups in the same order before loading, or pickle the model without sac (sac.remove)"
    raise ConfigError(Problem("tp_group", f"what is loaded scatters its inputs over {group}, and {missing}", fix=fix))


def reaches(group: Any, device: torch.device) -> bool:
    """Return whether ``group`` has a backend for tensors on ``device``: a group for NCCL alone has none for the CPU."""
    types = getattr(group, "_device_types", None)  # without it the collective itself raises
    return types is None or any(one.type == device.type for one in types)


def is_replicated(tensor: torch.Tensor, group: Any) -> bool:
    """Return whether the ranks of ``group`` have the same local tensor, judging by the tensor's type.

    For a plain tensor this is assumed. For a DTensor it is true if all of them have the same coordinate along each mesh
    dimension that is sharded or partial.
    """
    if not is_dtensor(tensor):
        return True
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    divided = [dimension for dimension, store in enumerate(placements) if not store.is_replicate()]
    if not divided:
        return True
    ranks_along = set()
    for rank in dist.get_process_group_ranks(group):
        position = (mesh.mesh == rank).nonzero()
        if len(position):  # other ranks have their own mesh, where the same holds for them
            ranks_along.add(tuple(position[0, divided].tolist()))
    return len(ranks_along) <= 1


def check_replicated(flat: torch.Tensor, argument: ArgumentInfo, group: Any) -> None:
    """Raise ``RegionError`` on every rank of ``group`` if shape, strides, dtype or bits differ between its ranks.

    One all-reduce of the minimum of x and of -x shows whether all ranks have the same number x.
    """
    layout = argument.layout
    values = [one.tolist() if isinstance(one, torch.Tensor) else one for one in checksum(flat)]
    compared = (tuple(layout.shape), layout.stride, layout.bits, str(flat.dtype)), values
    digests = [hashlib.blake2b(repr(one).encode(), digest_size=7).digest() for one in compared]
    own = torch.tensor([int.from_bytes(digest, "big") for digest in digests], device=flat.device)
    both = torch.stack([own, -own])
    dist.all_reduce(both, op=dist.ReduceOp.MIN, group=group)
    smallest, negated = both.tolist()
    differs = [least != -greatest for least, greatest in zip(smallest, negated, strict=True)]
    if any(differs):
        what = "shape, strides or dtype" if differs[0] else "values"
        found = (
            f"its {what} differ between the {group.size()} ranks of the group that it is to be scattered over "
            "(is it split between them, as in sequence parallelism?)"
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
        self.group = group
        self.inner = inner
        self.compared = compared
        self.size: int = group.size()
        self.rank: int = group.rank()

    @classmethod
    def over(cls, group: Any, inner: InputStore, compared: Compared) -> InputStore | None:
        """Return the store over ``group``, whose shares ``inner`` keeps; None for a group of one rank.

        ``group`` is a process group or a mesh of one dimension for which ``group_problem`` has found no problem.
        """
        over = process_group(group)
        return None if over.size() == 1 else cls(over, inner, compared)

    def __deepcopy__(self, memo: dict[int, Any]) -> Scattered:
        return Scattered(self.group, copy.deepcopy(self.inner, memo), set())

    def __reduce__(self) -> tuple[Any, ...]:
        name = None if self.group is dist.group.WORLD else str(self.group.group_name)
        return _unpickled, (name, self.inner)

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether the group can gather the tensor, and all ranks have the same tensor.

        The latter is assumed for plain tensors, and true for a DTensor that is replicated over the group.
        """
        possible = reaches(self.group, tensor.device) and is_replicated(tensor, self.group)
        return possible and self.inner.accepts(tensor)

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
            padded = flat.new_zeros(elements)
            padded[: share.numel()] = share
            share = padded
        return StoredShare(self.group, self.inner.put(share, argument), flat.numel())

    def describe(self) -> str:
        """Say where inputs are kept."""
        inner = "" if isinstance(self.inner, OnDevice) else f", each share {self.inner.describe()}"
        return f"scattered over {self.size} ranks{inner}"


def _unpickled(name: str | None, inner: InputStore) -> Scattered:
    return Scattered(_named_group(name), inner, set())


class StoredShare(StoredInside):
    """This rank's share of a flat tensor; see Note [Shares]."""

    __slots__ = ("_elements", "_group")

    def __init__(self, group: Any, inner: StoredTensor, elements: int) -> None:
        self._group, self.inner, self._elements = group, inner, elements

    def fetch(self) -> torch.Tensor:
        """Return the whole flat tensor."""
        assert gather_into is not None, "torch has no torch.distributed"
        share = self.inner.fetch()
        full = share.new_empty(self._group.size() * share.numel())
        if share.numel():  # as bytes: backends know few dtypes
            gather_into(full.view(torch.uint8), share.view(torch.uint8), group=self._group)
        return full[: self._elements]
