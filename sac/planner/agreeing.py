"""Ranks that hold parts of the same parameters agree on one plan, for the largest sizes among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from sac.errors import PlanError, Problem
from sac.planner.observing import StepRecord
from sac.planner.profile import RegionProfile

# Note [One plan for several ranks]
#
# Ranks agree over the groups of the device meshes of their parameters, one mesh dimension after the other: those of
# FSDP2 and of tensor parallelism. All of them are at the same place, the begin of a step, and nothing else is sent.
# Each gathers what the others have observed, and takes the step with the largest peak, and for each region the profile
# with the most bytes. The search is deterministic, so all ranks find the same plan. Replicas without a mesh (DDP) plan
# by themselves.


@dataclass(frozen=True, slots=True)
class Grounds:
    """What a plan is made from."""

    profiles: tuple[RegionProfile, ...]  # of each region
    record: StepRecord
    extra: int
    memory_bytes: int


def agreed(mine: Grounds, model: nn.Module) -> Grounds:
    """Return the grounds of all ranks that share parameters of ``model``; raises ``PlanError`` if regions differ."""
    for mesh in sorted(meshes_of(model), key=lambda mesh: (mesh.ndim, str(mesh.mesh.tolist()))):
        for group in map(mesh.get_group, range(mesh.ndim)):
            gathered: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, mine, group)
            mine = largest(gathered)
    return mine


def meshes_of(model: nn.Module) -> set[Any]:
    """Return the device meshes of a model's parameters."""
    return {mesh for one in model.parameters() if (mesh := getattr(one, "device_mesh", None)) is not None}


def largest(several: Sequence[Grounds]) -> Grounds:
    """Return the grounds of a plan for several ranks; raises ``PlanError`` if these run different regions."""
    if len({one.record.paths for one in several}) > 1:
        found = "the ranks that share its parameters run different regions, so that no plan is right for all"
        raise PlanError(Problem("activation_checkpointing.budget", found, fix="use mode: full, or a policy by hand"))
    profiles = (max(each, key=size_of) for each in zip(*(one.profiles for one in several), strict=True))
    record = max((one.record for one in several), key=lambda one: one.peak)
    return Grounds(tuple(profiles), record, max(one.extra for one in several), min(one.memory_bytes for one in several))


def size_of(profile: RegionProfile) -> tuple[bool, int]:
    """Return by what the largest of several profiles of a region is found: if one cannot be planned, it is that one."""
    return bool(profile.reason), sum(profile.bytes)
