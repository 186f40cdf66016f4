"""The regions of a model with a budget: recomputed in full, profiled, or as a plan says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sac.blocks.applying import apply, groups_of
from sac.blocks.find import Block
from sac.blocks.install import Applied, RegionForward, ours_on, regions_of
from sac.config import Config
from sac.engine.compiled import run_in_eager
from sac.engine.op_trace import RegionStats, SavedFigures
from sac.engine.region import Region, RegionGroup
from sac.engine.settings import REPLAY
from sac.engine.table import resolve_policy
from sac.planner.observing import Observation
from sac.planner.predict import Choice, Prediction
from sac.planner.profile import RegionProfile
from sac.planner.rules import is_named, policy_of
from sac.planner.tracing import ProfiledRegion
from sac.policy.model import Decision, Policy, Rule

_EVERYTHING = Policy("everything", (Rule("everything", Decision.SAVE.value, ("*",)),))
FULL, PROFILED, PLANNED = "full", "profiled", "planned"


@dataclass(frozen=True, slots=True)
class PlannedRegions:
    """What a plan says of each of ``paths``: the policy, whether it is one, and the bytes that it holds.

    ``plain``: the paths without checkpointing. ``full``: those that are recomputed in full whatever a policy says.
    """

    policy: Policy
    plain: frozenset[str]
    full: frozenset[str]
    held: dict[str, int]
    blocks: dict[str, tuple[int, int]]  # layer and size of the stack, by path

    def rule_of(self, path: str, op: str) -> str:
        """Return what the plan says of an op in the block at ``path``, if it names the op."""
        if path in self.plain:
            return "no checkpointing"
        rules = (one for one in self.policy.rules if one.ops and one.matches_region(path, *self.blocks[path]))
        return next((f"rule {one.id}" for one in rules if is_named(one.ops, op)), "")


def planned_regions(prediction: Prediction, choice: Choice, name: str) -> PlannedRegions:
    """Return what the regions are to do for a choice."""
    rows = [
        (path, prediction.profiles[kind], prediction.options[kind][option])
        for path, kind, option in zip(prediction.paths, prediction.kinds, choice, strict=True)
    ]
    return PlannedRegions(
        policy_of([(path, profile, option.saved) for path, profile, option in rows], name),
        frozenset(path for path, _, option in rows if option.saved is None),
        frozenset(path for path, profile, _ in rows if profile.reason),
        {path: option.bytes for path, _, option in rows},
        {path: (one.layers[one.paths.index(path)], one.stack_size) for path, one, _ in rows},
    )


class BudgetForward(RegionForward):
    """Runs its module as the region that its ``BudgetRegions`` have chosen for the pass."""

    def __init__(self, block: Block, group: RegionGroup, applied: Applied) -> None:
        super().__init__(block, group, applied)
        self.block = block
        self.full = self.region
        self.planned: Region | None = None
        self.profiled: RegionGroup | None = None  # of the profile
        self.is_plain = False  # whether the plan is no checkpointing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as a region."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return run_in_eager(self._run, *args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.applied.fitting.begin((args, kwargs), self.block.path)
        return super()._run(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        regions: BudgetRegions = self.applied.fitting
        observation = regions.observation
        # No checkpointing: as a region, its first call would hold all its results.
        call = self.original if self.is_plain and self.region is self.planned else super()._call
        if observation is None:
            return call(*args, **kwargs)
        observation.enter(self.block.path, args, kwargs)
        profiled = self.region if isinstance(self.region, ProfiledRegion) else None
        if profiled is not None:
            profiled.after_op = observation.after_op
        try:
            output = call(*args, **kwargs)
        except BaseException:
            regions.stop()
            raise
        finally:
            if profiled is not None:
                profiled.after_op = None
        observation.leave(output, profiled.last_frame if profiled is not None else None)
        return output


class BudgetRegions:
    """The regions that a ``sac.apply`` with a budget has put on a model. ``observation``: that of the running pass."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model, self.config = model, config
        self.observation: Observation | None = None
        self.used = FULL

    def put_on(self, **arguments: Any) -> Applied | None:
        """Put regions on the model that are recomputed in full; returns their record, None if there are none."""
        policy = self.config.policy
        nothing = Policy("full, until the plan is made")
        if policy is not None:
            nothing = replace(policy, rules=(), default=Decision.RECOMPUTE)
        observed = replace(self.config, policy=nothing, engine=REPLAY, budget=None)
        apply(self.model, observed, **arguments, forward=BudgetForward)
        applied = next((one.applied for one in regions_of(self.model)), None)
        if applied is not None:
            applied.fitting = self
        return applied

    def begin(self, inputs: Any, path: str | None = None) -> None:
        """A forward begins: of the model, or if that is not called itself of the region at ``path``."""

    def stop(self) -> None:
        """Observe nothing more."""
        observation, self.observation = self.observation, None
        if observation is not None:
            observation.end()

    @property
    def forwards(self) -> list[BudgetForward]:
        """The forwards on the model, in module order."""
        found = (ours_on(module) for module in self.model.modules())
        return [one for one in found if isinstance(one, BudgetForward)]

    def profile(self) -> None:
        """Have the next calls profiled."""
        self.used = PROFILED
        forwards = {one.block.path: one for one in self.forwards}
        resolved = resolve_policy(self.config.policy or _EVERYTHING)
        for block, group in groups_of(resolved, [one.block for one in forwards.values()], "selective"):
            forwards[block.path].region, forwards[block.path].profiled = ProfiledRegion(block, group), group

    def profiles(self) -> tuple[RegionProfile, ...]:
        """Return the profiles that the calls have made."""
        regions = [one.region for one in self.forwards]
        profiles = [region.profile for region in regions if isinstance(region, ProfiledRegion)]
        return tuple(profile for profile in profiles if profile is not None)

    def use(self, which: str) -> None:
        """Have the next calls run as regions that are recomputed in full, or as those of the plan."""
        if which != self.used:
            self.used = which
            for one in self.forwards:
                if isinstance(one.region, ProfiledRegion):
                    one.full.stats = one.region.stats  # it was recomputed in full, too
                one.region = one.planned if which == PLANNED and one.planned is not None else one.full
                one.regions = (one.region,)

    def plan(self, planned: PlannedRegions) -> None:
        """Have the next calls run as ``planned``."""
        forwards = {one.block.path: one for one in self.forwards}
        resolved = resolve_policy(planned.policy)
        for block, group in groups_of(resolved, [one.block for one in forwards.values()], "selective"):
            forward, region = forwards[block.path], Region(group, block.path)
            forward.planned = region
            if (profiled := forward.profiled) is not None:  # a planned call keeps nothing to verify units anew
                group.functions.update(profiled.functions)
                group.verified = group.verified or profiled.verified
            if block.path in planned.full:
                forward.planned = forward.full
                forward.full.group.give_up("it is not planned", block.path)
            forward.is_plain = block.path in planned.plain
            if forward.is_plain:
                size = planned.held[block.path]
                rule = next(one.index for one in group.table.rules if one.rule.matches_module)  # saves the whole block
                region.stats = RegionStats(1, SavedFigures(size, 0, {rule: size}, {rule: 1}))
        self.used = ""
        self.use(PLANNED)
