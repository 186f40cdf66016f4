"""Ranks that hold parts of the same parameters agree on one plan, for the largest sizes among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import nn

from sac.errors import PlanError, Problem
from sac.planner.observing import StepPhase, StepRecord
from sac.planner.profile import RegionProfile
from sac.planner.tracing import earliest

# Note [One plan for several ranks]
#
# Ranks agree over the groups of the device meshes of their parameters, one mesh dimension after the other: those of
# FSDP2 and of tensor parallelism. All of them are at the same place, the begin of a step, and nothing else is sent.
# Each gathers what the others have observed and takes the largest numbers. The search is deterministic, so that
# all find the same plan. Afterwards no rank sends anything for it. Replicas without a mesh (DDP) plan by themselves.


@dataclass(frozen=True, slots=True)
class Grounds:
    """What a plan is made from."""

    profiles: tuple[RegionProfile, ...]  # of each region
    record: StepRecord
    extra: int
    memory_bytes: int
    shapes: tuple[tuple[tuple[int, ...], ...], ...]


def agreed(mine: Grounds, model: nn.Module) -> Grounds:
    """Return the grounds of all ranks that share parameters of ``model``; raises ``PlanError`` if their ops differ."""
    for group in _groups(model):
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group)
        mine = largest(found)
    return mine


def meshes_of(model: nn.Module) -> set[Any]:
    """Return the device meshes of a model's parameters."""
    return {mesh for one in model.parameters() if (mesh := getattr(one, "device_mesh", None)) is not None}


def _groups(model: nn.Module) -> Iterator[Any]:
    names: set[str] = set()
    for mesh in sorted(meshes_of(model), key=lambda mesh: (mesh.ndim, str(mesh.mesh.tolist()))):
        for dimension in range(mesh.ndim):
            group = mesh.get_group(dimension)
            name = str(dist.get_process_group_ranks(group))
            if name not in names and dist.get_world_size(group) > 1:
                names.add(name)
                yield group


def largest(several: Sequence[Grounds]) -> Grounds:
    """Return the largest numbers of several ranks' grounds; raises ``PlanError`` if more than numbers differ."""
    return Grounds(
        tuple(_profile(alike) for alike in _aligned(one.profiles for one in several)),
        _record([one.record for one in several]),
        max(one.extra for one in several),
        min(one.memory_bytes for one in several),
        tuple(tuple(map(_most, _aligned(alike))) for alike in _aligned(one.shapes for one in several)),
    )


def _aligned(several: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    rows = [*zip_longest(*several)]
    if any(one is None for row in rows for one in row):
        _differ("the number of their regions, ops or inputs")
    return rows


def _differ(what: str) -> None:
    found = f"the ranks that share its parameters differ in {what}, so that no plan is right for all of them"
    raise PlanError(Problem("activation_checkpointing.budget", found, fix="use mode: full, or a policy by hand"))


def _most(sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(max, _aligned(sizes)))


def _profile(several: Sequence[RegionProfile]) -> RegionProfile:
    first = several[0]
    unplanned = next((one for one in several if one.reason), None)
    if unplanned is not None:
        return unplanned
    if len({(one.paths, one.roots, one.needs) for one in several}) > 1:
        _differ(f"the ops of {first.paths[0]}")
    entries = []
    for alike in _aligned(one.entries for one in several):
        flops, moved = max(one.flops for one in alike), max(one.moved_bytes for one in alike)
        same = {replace(one, flops=flops, moved_bytes=moved, shape=alike[0].shape) for one in alike}
        if len(same) > 1:
            _differ(f"the ops of {first.paths[0]}")
        entries.append(same.pop())
    return replace(first, entries=tuple(entries), bytes=_most([one.bytes for one in several]), until=earliest(several))


def _record(several: Sequence[StepRecord]) -> StepRecord:
    if len({one.paths for one in several}) > 1:
        _differ("the regions that they call")
    phases = tuple(_phase(alike) for alike in _aligned(one.phases for one in several))
    static, peak = max(one.static for one in several), max(one.peak for one in several)
    return replace(several[0], phases=phases, static=static, peak=peak)


def _phase(several: Sequence[StepPhase]) -> StepPhase:
    if len({(one.part, one.position, one.ended) for one in several}) > 1:
        _differ("the order of their regions")
    before, peak, after = (max(getattr(one, name) for one in several) for name in ("before", "peak", "after"))
    rises: tuple[tuple[int, int], ...] = ()
    if len({tuple(entry for entry, _ in one.rises) for one in several}) == 1:
        rises = tuple(map(max, zip(*(one.rises for one in several), strict=True)))
    return replace(several[0], before=before, peak=peak, after=after, rises=rises)
