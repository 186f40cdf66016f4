"""Ranks that hold parts of the same parameters agree on one plan, for the largest sizes among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import nn

from sac.errors import PlanError, Problem
from sac.planner.profile import Entry, RegionProfile
from sac.planner.step import StepPhase, StepRecord
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


def _groups(model: nn.Module) -> Iterator[Any]:
    meshes = {mesh for one in model.parameters() if (mesh := getattr(one, "device_mesh", None)) is not None}
    names: set[str] = set()
    for mesh in sorted(meshes, key=lambda mesh: (mesh.ndim, str(mesh.mesh.tolist()))):
        for dimension in range(mesh.ndim):
            group = mesh.get_group(dimension)
            name = str(dist.get_process_group_ranks(group))
            if name not in names and dist.get_world_size(group) > 1:
                names.add(name)
                yield group


def largest(found: Sequence[Grounds]) -> Grounds:
    """Return the largest numbers of several ranks' grounds; raises ``PlanError`` if more than numbers differ."""
    return Grounds(
        tuple(_profile(alike) for alike in _aligned(one.profiles for one in found)),
        _record(tuple(one.record for one in found)),
        max(one.extra for one in found),
        min(one.memory_bytes for one in found),
        tuple(tuple(map(_most, _aligned(alike))) for alike in _aligned(one.shapes for one in found)),
    )


def _aligned(several: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    rows = [*zip_longest(*several)]
    if any(one is None for row in rows for one in row):
        _differ("the number of their regions, ops or inputs")
    return rows


def _differ(what: str) -> None:
    found = f"the ranks that share its parameters differ in {what}, so that no plan is right for all of them"
    raise PlanError(Problem("activation_checkpointing.budget", found, fix="use mode: full, or a policy by hand"))


def _most(sizes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(map(max, _aligned(sizes)))


def _profile(several: tuple[RegionProfile, ...]) -> RegionProfile:
    first = several[0]
    if len({(one.name, one.roots, one.needs) for one in several}) > 1:
        _differ(f"the ops of {first.name}")
    return replace(
        first,
        entries=tuple(_entry(first.name, alike) for alike in _aligned(one.entries for one in several)),
        bytes=_most(tuple(one.bytes for one in several)),
        until=earliest(several),
    )


def _entry(region: str, several: tuple[Entry, ...]) -> Entry:
    first = several[0]
    flops, moved = max(one.flops for one in several), max(one.moved_bytes for one in several)
    alike = {replace(one, flops=flops, moved_bytes=moved, shape=first.shape) for one in several}
    if len(alike) > 1:
        _differ(f"the ops of {region}")
    return alike.pop()


def _record(several: tuple[StepRecord, ...]) -> StepRecord:
    first = several[0]
    if len({one.paths for one in several}) > 1:
        _differ("the regions that they call")
    phases = tuple(_phase(alike) for alike in _aligned(one.phases for one in several))
    return replace(first, phases=phases, peak=max(one.peak for one in several))


def _phase(several: tuple[StepPhase, ...]) -> StepPhase:
    if len({(one.part, one.position, one.ended) for one in several}) > 1:
        _differ("the order of their regions")
    before, peak, after = (max(getattr(one, name) for one in several) for name in ("before", "peak", "after"))
    rises: tuple[tuple[int, int], ...] = ()
    if len({tuple(entry for entry, _ in one.rises) for one in several}) == 1:
        rises = tuple(map(max, zip(*(one.rises for one in several), strict=True)))
    return replace(several[0], before=before, peak=peak, after=after, rises=rises)
