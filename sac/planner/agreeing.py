"""Ranks that hold parts of the same parameters agree on one plan, for the largest sizes among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
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
# Each gathers what the others have observed and takes the largest sizes; everything else must be equal. The search is
# deterministic, so all ranks find the same plan. Replicas without a mesh (DDP) plan by themselves.

_LARGEST = ("bytes", "flops", "moved_bytes", "before", "peak", "after", "gradients", "static", "extra")
_SIZES = {*_LARGEST, "shape", "shapes", "rises", "varies"}


@dataclass(frozen=True, slots=True)
class Grounds:
    """What a plan is made from."""

    profiles: tuple[RegionProfile, ...]  # of each region
    record: StepRecord
    extra: int
    memory_bytes: int


def agreed(mine: Grounds, model: nn.Module) -> Grounds:
    """Return the grounds of all ranks that share parameters of ``model``; raises ``PlanError`` if their ops differ."""
    seen: set[str] = set()
    for mesh in sorted(meshes_of(model), key=lambda mesh: (mesh.ndim, str(mesh.mesh.tolist()))):
        for group in map(mesh.get_group, range(mesh.ndim)):
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) > 1 and str(ranks) not in seen:
                seen.add(str(ranks))
                gathered: list[Any] = [None] * len(ranks)
                dist.all_gather_object(gathered, mine, group)
                mine = largest(gathered)
    return mine


def meshes_of(model: nn.Module) -> set[Any]:
    """Return the device meshes of a model's parameters."""
    return {mesh for one in model.parameters() if (mesh := getattr(one, "device_mesh", None)) is not None}


def largest(several: Sequence[Any], name: str = "grounds") -> Any:
    """Return the value with the largest sizes of several ranks' values; raises ``PlanError`` if more differs."""
    first = several[0]
    if is_dataclass(first):
        unplanned = next((one for one in several if getattr(one, "reason", "")), None)
        names = [one.name for one in fields(first) if one.init]
        if unplanned:
            return unplanned
        values = {one: largest([getattr(value, one) for value in several], one) for one in names}
        return replace(first, **values)  # type: ignore[type-var]
    if isinstance(first, tuple):
        if len({*map(len, several)}) == 1:
            return tuple(largest(values, name) for values in zip(*several, strict=True))
        if name == "rises":  # calls vary, and are not observed op by op
            return ()
    elif isinstance(first, int) and name in _SIZES:
        return max(several)
    elif name == "memory_bytes":
        return min(several)
    elif len({*several}) == 1:
        return first
    found = (
        f"the ranks that share its parameters differ in the {name} of their regions, so that no plan is right for all"
    )
    raise PlanError(Problem("activation_checkpointing.budget", found, fix="use mode: full, or a policy by hand"))
