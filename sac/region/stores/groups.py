"""The group over which inputs are scattered: what a user gives as one, and which DTensors are replicated over it."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from sac.errors import ConfigError, Problem
from sac.policy.nodes import shown
from sac.region.stores.layout import is_dtensor

LEGAL = "a process group that holds this rank, or a mesh of one dimension"


def group_problem(group: Any, where: str) -> list[Problem]:
    """Return what is wrong with ``group`` as the tensor-parallel group of this rank; ``where`` names the call."""
    where = f"{where}.tp_group"
    if group is None:
        fix = "pass tp_group=, the group whose ranks all have this input"
        return [
            Problem(where, "inputs are to be scattered, and there is no group to scatter them over", LEGAL, fix=fix)
        ]
    if not (dist.is_available() and dist.is_initialized()):
        fix = "call torch.distributed.init_process_group first"
        return [Problem(where, "torch.distributed is not initialised", fix=fix)]
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns to ranks that it leaves out
        return [_without_this_rank(where)]
    if _is_mesh(group):
        return _mesh_problem(group, where)
    if not isinstance(group, dist.ProcessGroup):
        return [Problem(where, f"{_described(group)} is no group", LEGAL)]
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
    except ValueError:  # torch does not know it, or not any more
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
    """Return the process group of a group in which ``group_problem`` finds nothing wrong."""
    return group.get_group() if _is_mesh(group) else group


def reference_to(group: Any) -> str | None:
    """Return what ``named_group`` finds the group by in another process; None for the default group."""
    return None if group is dist.group.WORLD else str(group.group_name)


def named_group(name: str | None) -> Any:
    """Return the process group that was pickled as ``name``; raises ``ConfigError`` if this process has none such."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(_not_unpickled(name, "torch.distributed is not initialised here"))
    if name is None:
        return dist.group.WORLD
    # Private name (torch 2.11 to 2.13).
    resolve = getattr(dist.distributed_c10d, "_resolve_process_group", None)
    try:
        found = resolve(name) if resolve is not None else None
    except (RuntimeError, ValueError, KeyError):
        found = None
    if found is None:
        raise ConfigError(_not_unpickled(name, "there is no such group here"))
    return found


def _not_unpickled(name: str | None, found: str) -> Problem:
    group = "the default group" if name is None else f'the process group "{name}"'
    fix = "make the same groups in the same order before loading, or pickle the model without sac (sac.remove)"
    return Problem("tp_group", f"what is loaded was scattered over {group}, and {found}", fix=fix)


def reaches(group: Any, device: torch.device) -> bool:
    """Return whether ``group`` has a backend for tensors on ``device``: one made for NCCL alone knows no CPU."""
    # Private name (torch 2.11 to 2.13); without it the collective itself tells.
    kinds = getattr(group, "_device_types", None)
    return kinds is None or any(kind.type == device.type for kind in kinds)


def is_replicated(tensor: torch.Tensor, group: Any) -> bool:
    """Return whether the ranks of ``group`` have the same local tensor, as far as the tensor's type tells.

    Of a plain tensor they are taken to. Of a DTensor they have, if along each mesh dimension that is sharded or partial
    all of them have the same place.
    """
    if not is_dtensor(tensor):
        return True
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    divided = [dimension for dimension, placement in enumerate(placements) if not placement.is_replicate()]
    if not divided:
        return True
    places = set()
    for rank in dist.get_process_group_ranks(group):
        place = (mesh.mesh == rank).nonzero()
        if len(place):  # the others have a mesh of their own, on which theirs is as ours is here
            places.add(tuple(place[0, divided].tolist()))
    return len(places) <= 1
