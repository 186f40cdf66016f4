"""Input store: inputs scattered over a process group, of which each rank holds its share until backward."""

from __future__ import annotations

import copy
import hashlib
import sys
import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sac.errors import ConfigError, Problem, RegionError
from sac.outer_hooks import PackHooks
from sac.policy.syntax import shown
from sac.stores.layout import is_dtensor
from sac.stores.store import ArgumentInfo, InputStore, OnDevice, StoredTensor
from sac.torch_private import gather_into, named_process_group

# -- The process group

LEGAL = "a process group that holds this rank, or a mesh of one dimension"


def group_problem(group: Any, where: str) -> list[Problem]:
    """Return what is wrong with ``group`` as the tensor-parallel group of this rank; ``where`` names the call."""
    where = f"{where}.tp_group"
    if group is None:
        fix = "pass tp_group=, the group whose ranks all have this input"
        return [
            Problem(where, "inputs are to be scattered, but there is no group to scatter them over", LEGAL, fix=fix)
        ]
    if not (dist.is_available() and dist.is_initialized()):
        fix = "call torch.distributed.init_process_group first"
        return [Problem(where, "torch.distributed is not initialised", fix=fix)]
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # new_group returns this on ranks outside the group
        return [_without_this_rank(where)]
    if _is_mesh(group):
        return _mesh_problem(group, where)
    if not isinstance(group, dist.ProcessGroup):
        return [Problem(where, f"{_described(group)} is not a group", LEGAL)]
    return _process_group_problem(group, where)


def _mesh_problem(mesh: Any, where: str) -> list[Problem]:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        shown = f" ({', '.join(names)})" if names else ""
        fix = f'pass one of them: mesh["{names[-1]}"]' if names else "name its dimensions and pass one of them"
        return [Problem(where, f"the mesh has {mesh.ndim} dimensions{shown}", LEGAL, fix=fix)]
    if mesh.get_coordinate() is None:
        return [_without_this_rank(where)]
    return _process_group_problem(mesh.get_group(), where)


def _process_group_problem(group: Any, where: str) -> list[Problem]:
    try:
        rank = dist.get_rank(group)
    except ValueError:  # torch does not know the group, or has destroyed it
        return [Problem(where, "the group has been destroyed", LEGAL)]
    return [_without_this_rank(where)] if rank < 0 else []


def _without_this_rank(where: str) -> Problem:
    fix = "pass each rank the tensor-parallel group that it is in"
    return Problem(where, f"rank {dist.get_rank()} is not in the group", LEGAL, fix=fix)


def _described(group: Any) -> str:
    plain = isinstance(group, (str, int, float, list, tuple))
    return shown(repr(group)) if plain else f"an object of type {type(group).__name__}"


def _is_mesh(group: Any) -> bool:
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(group, module.DeviceMesh)


def process_group(group: Any) -> Any:
    """Return the process group of ``group``, for which ``group_problem`` has found no problem."""
    return group.get_group() if _is_mesh(group) else group


def reference_to(group: Any) -> str | None:
    """Return the name by which ``named_group`` finds the group in another process; None for the default group."""
    return None if group is dist.group.WORLD else str(group.group_name)


def named_group(name: str | None) -> Any:
    """Return the process group that was pickled as ``name``; raises ``ConfigError`` if this process lacks it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(_not_unpickled(name, "torch.distributed is not initialised here"))
    if name is None:
        return dist.group.WORLD
    try:
        found = named_process_group(name)
    except (RuntimeError, ValueError, KeyError):
        found = None
    if found is None:
        raise ConfigError(_not_unpickled(name, "there is no such group here"))
    return found


def _not_unpickled(name: str | None, found: str) -> Problem:
    group = "the default group" if name is None else f'the process group "{name}"'
    fix = "make the same groups in the same order before loading, or pickle the model without sac (sac.remove)"
    return Problem("tp_group", f"what is loaded scatters its inputs over {group}, and {found}", fix=fix)


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


# -- Bitwise comparison over a group

# Note [Checksum of bits]
#
# A tensor's bits are read as integers v_i, and each is summed with its own weight: sum of v_i * w_i modulo 2^64, all
# w_i odd. A change of one element always changes the sum; other changes, and swapped elements, change it except with a
# probability of about 2^-60. Integer sums do not depend on the order, so the summation order of a device does not
# matter. One all-reduce of the minimum of x and of -x (which gives the maximum) shows whether all ranks have the same
# number.

_CHUNK = 1 << 20  # elements weighted at once
_FACTOR = 0x5851F42D4C957F2D  # of Knuth's MMIX generator
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def check_replicated(flat: torch.Tensor, argument: ArgumentInfo, group: Any) -> None:
    """Raise ``RegionError`` on every rank of ``group`` if shape, strides, dtype or bits differ between its ranks."""
    layout = argument.layout
    described = repr((tuple(layout.shape), layout.stride, layout.bits, str(flat.dtype)))
    digest = hashlib.blake2b(described.encode(), digest_size=7).digest()
    total = bit_checksum(flat)
    low, high = total & 0xFFFFFFFF, (total >> 32) & 0xFFFFFFFF  # halves, so that negating cannot overflow an int64
    own = torch.stack([total.new_tensor(int.from_bytes(digest, "big")), low, high])
    both = torch.cat([own, -own])
    dist.all_reduce(both, op=dist.ReduceOp.MIN, group=group)
    smallest, largest = both.tolist()[:3], (-both).tolist()[3:]
    if smallest == largest:
        return
    what = "shape, strides or dtype" if smallest[0] != largest[0] else "values"
    raise RegionError(
        Problem(
            argument.name(),
            f"its {what} differ between the {group.size()} ranks of the group that it is to be scattered over "
            "(is it split between them, as in sequence parallelism?)",
            fix="scatter what all ranks have whole: choose by `keep`, or keep the inputs of this region whole",
        )
    )


def bit_checksum(flat: torch.Tensor) -> torch.Tensor:
    """Return an order-dependent sum over the bits of a flat tensor, one int64; see Note [Checksum of bits]."""
    words = flat.view(_WORDS[flat.element_size()]) if flat.numel() else flat.new_empty(0, dtype=torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + chunk.numel(), device=flat.device)
        weights.mul_(_FACTOR)
        weights.bitwise_xor_(weights >> 29).mul_(_FACTOR).bitwise_or_(1)
        total += (chunk * weights).sum()
    return total


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


class VerifiedOnce(Protocol):
    """The places whose tensors need no further comparison."""

    def __contains__(self, position: ArgumentKey, /) -> bool:
        """Return whether tensors from ``position`` need no further comparison."""

    def add(self, position: ArgumentKey, /) -> None:
        """Record that a tensor from ``position`` has been compared, or would have been."""


class FirstCalls:
    """Compares the first ``COMPARED_CALLS`` tensors over each group, wherever they come from."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __contains__(self, position: ArgumentKey) -> bool:
        """See ``VerifiedOnce``."""
        return self._counts.get(position[0], 0) >= COMPARED_CALLS

    def add(self, position: ArgumentKey) -> None:
        """See ``VerifiedOnce``."""
        self._counts[position[0]] = self._counts.get(position[0], 0) + 1


class Scattered(InputStore):
    """Keeps this rank's share of each tensor, and gathers the shares of the group in recomputation.

    ``inner`` keeps the share. ``compared``: the places whose tensors need no comparison over the group (Note [Compared
    once]).
    """

    def __init__(self, group: Any, inner: InputStore, compared: VerifiedOnce) -> None:
        self.group = group
        self.inner = inner
        self.compared = compared
        self.size: int = group.size()
        self.rank: int = group.rank()

    @classmethod
    def over(cls, group: Any, inner: InputStore, compared: VerifiedOnce) -> InputStore | None:
        """Return the store over ``group``, whose shares ``inner`` keeps; None for a group of one rank.

        ``group`` is a process group or a mesh of one dimension for which ``group_problem`` has found no problem.
        """
        over = process_group(group)
        return None if over.size() == 1 else cls(over, inner, compared)

    def __deepcopy__(self, memo: dict[int, Any]) -> Scattered:
        return Scattered(self.group, copy.deepcopy(self.inner, memo), set())

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (reference_to(self.group), self.inner)

    def with_inner(self, inner: InputStore) -> Scattered:
        """Return a store over the same group, whose shares ``inner`` keeps."""
        return Scattered(self.group, inner, self.compared)

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
        self._compare(flat, argument)
        elements = -(-flat.numel() // self.size)
        share = flat[self.rank * elements : (self.rank + 1) * elements]
        if share.numel() < elements:
            padded = flat.new_zeros(elements)
            padded[: share.numel()] = share
            share = padded
        return StoredShare(self, self.inner.put(share, argument), flat.numel())

    def _compare(self, flat: torch.Tensor, argument: ArgumentInfo) -> None:
        """Raise if verification is due and the ranks do not have the same tensor."""
        position = (self.group, *argument.position)
        if position not in self.compared:
            check_replicated(flat, argument, self.group)
            self.compared.add(position)

    def describe(self) -> str:
        """Say where inputs are kept."""
        inner = "" if isinstance(self.inner, OnDevice) else f", each share {self.inner.describe()}"
        return f"scattered over {self.size} ranks{inner}"


def _unpickled(reference: str | None, inner: InputStore) -> Scattered:
    return Scattered(named_group(reference), inner, set())


def gathered(share: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the flat shares of all ranks of ``group``, one after another."""
    assert gather_into is not None, "torch has no torch.distributed"
    full = share.new_empty(group.size() * share.numel())
    if share.numel():
        gather_into(full.view(torch.uint8), share.view(torch.uint8), group=group)  # as bytes: backends know few dtypes
    return full


class StoredShare(StoredTensor):
    """This rank's share of a flat tensor; see Note [Shares]."""

    __slots__ = ("_elements", "_group", "_inner")

    def __init__(self, scattered: Scattered, inner: StoredTensor, elements: int) -> None:
        super().__init__()
        self._group = scattered.group
        self._inner: StoredTensor | None = inner
        self._elements = elements

    def fetch(self) -> torch.Tensor:
        """Return the whole flat tensor."""
        assert self._inner is not None, "fetched after it was dropped"
        return gathered(self._inner.fetch(), self._group)[: self._elements]

    def settle(self) -> None:
        """Make sure that the copy is done."""
        if self._inner is not None:
            self._inner.settle()

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Hand the share to the hooks."""
        if self._inner is not None:
            self._inner.pack_with_outer_hooks(hooks)

    def prefetch(self) -> None:
        """Start to copy back what backward needs next."""
        if self._inner is not None:
            self._inner.prefetch()

    def drop(self) -> None:
        """Release the share."""
        if self._inner is not None:
            self._inner.drop()
            self._inner = None

    @property
    def local(self) -> torch.Tensor | None:
        """The share, if it is on the device."""
        return self._inner.local if self._inner is not None else None

    @property
    def host_bytes(self) -> int:
        """The bytes of the share, if it is in host memory on behalf of a device."""
        return self._inner.host_bytes if self._inner is not None else 0
