"""The regions of a model with a budget: recomputed in full, profiled, or as a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from sac.planner.profile import RegionProfile
from sac.planner.rules import PlannedRegion
from sac.planner.tracing import ProfiledRegion
from sac.policy.model import Decision, Policy, Rule

_EVERYTHING = Policy("everything", (Rule("everything", Decision.SAVE.value, ("*",)),))
FULL, PROFILED, PLANNED = "full", "profiled", "planned"


class BudgetForward(RegionForward):
    """Runs its module as the region that its ``BudgetRegions`` have chosen for the pass."""

    def __init__(self, block: Block, group: RegionGroup, applied: Applied) -> None:
        super().__init__(block, group, applied)
        self.block = block
        self.full = self.region
        self.planned: Region | None = None
        self.profiled: ProfiledRegion | None = None
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
        try:
            output = call(*args, **kwargs)
        except BaseException:
            regions.stop()
            raise
        observation.leave(output)
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

    def begin(self, inputs: Any, path: str = "") -> None:
        """A forward begins: of the model, or of the region at ``path``."""

    def place(self) -> tuple[str, str]:
        """Return the part of the observed step that runs, and the path of its region; empty between two."""
        assert self.observation is not None
        return self.observation.place()

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
            forwards[block.path].region = forwards[block.path].profiled = ProfiledRegion(block, group)

    def profiles(self) -> tuple[RegionProfile, ...]:
        """Take the profiles that the calls have made."""
        regions = [one.profiled for one in self.forwards if one.profiled is not None]
        profiles = tuple(region.profile for region in regions if region.profile is not None)
        for region in regions:
            region.profile = None
        return profiles

    def use(self, which: str) -> None:
        """Have the next calls run as regions that are recomputed in full, or as those of the plan."""
        if which != self.used:
            self.used = which
            for one in self.forwards:
                if isinstance(one.region, ProfiledRegion):
                    one.full.stats = one.region.stats  # it was recomputed in full, too
                one.region = one.planned if which == PLANNED and one.planned is not None else one.full
                one.regions = (one.region,)

    def plan(self, planned: Sequence[PlannedRegion], policy: Policy) -> None:
        """Have the next calls run as ``planned``; ``policy``: that of the plan."""
        forwards = {one.block.path: one for one in self.forwards}
        of_path = {one.path: one for one in planned}
        resolved = resolve_policy(policy)
        for block, group in groups_of(resolved, [one.block for one in forwards.values()], "selective"):
            forward, region, mine = forwards[block.path], Region(group, block.path), of_path.get(block.path)
            forward.planned = region
            if (profiled := forward.profiled) is not None:  # a planned call keeps nothing to verify units anew
                group.functions.update(profiled.group.functions)
                group.verified = group.verified or profiled.group.verified
            if mine is not None and mine.profile.reason:
                forward.planned = forward.full
                forward.full.group.give_up("it is not planned", block.path)
            forward.is_plain = mine is not None and mine.option.saved is None
            if mine is not None and forward.is_plain:
                size = mine.option.bytes
                rule = next(one.index for one in group.table.rules if one.rule.matches_module)  # saves the whole block
                region.stats = RegionStats(1, SavedFigures(size, 0, {rule: size}, {rule: 1}))
        self.used = ""
        self.use(PLANNED)
