"""The regions of a model with a budget: recomputed in full, profiled, or as a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from sac.blocks.applying import apply, groups_of
from sac.blocks.find import Block
from sac.blocks.install import Applied, RegionForward, ours_on, regions_of
from sac.config import Config
from sac.engine.fp8 import keeps_fp8_state
from sac.engine.frame import Frame
from sac.engine.handles import EXTERNAL
from sac.engine.op_trace import OpTraceRecorder, RegionStats, SavedFigures
from sac.engine.recorder import TapeMode
from sac.engine.region import Region, RegionGroup
from sac.engine.settings import REPLAY, Settings
from sac.engine.table import CallSite, DecisionTable, resolve_policy
from sac.engine.tape import Tape
from sac.engine.taped import TapedFrame
from sac.outer_hooks import PackHooks
from sac.planner.agreeing import size_of
from sac.planner.cost import attention_flops, entry_of_call, moved_bytes
from sac.planner.observing import Observation
from sac.planner.profile import Entry, RegionProfile
from sac.planner.rules import PlannedRegion, policy_of
from sac.policy.model import Decision, Policy
from sac.tensors import storage_bytes

# Note [How a profile comes about]
#
# In the observed step, each block runs under full recomputation and the recorder of the engine. So the engine itself
# determines what a policy may save, the identity of each value, and what autograd has saved. Sizes and FLOPs come from
# the arguments as each op runs. Regions with equal profiles are of one kind.

FULL, PROFILED, PLANNED = "full", "profiled", "planned"


class _SizedTape(Tape):
    """A tape that knows the bytes of each value's storage."""

    def __init__(self, table: DecisionTable, owners: Sequence[nn.Module]) -> None:
        super().__init__(table, owners)
        self.value_bytes: list[int] = []

    def add_value(self, tensor: Tensor, root: int, maker: int) -> int:
        """See ``Tape.add_value``."""
        self.value_bytes.append(storage_bytes(tensor) if maker >= 0 else 0)
        return super().add_value(tensor, root, maker)


class _ProfileTrace(OpTraceRecorder):
    """Records the sizes of each entry of a tape, in addition to its row of the op trace."""

    def __init__(self, tape: Tape, regions: BudgetRegions) -> None:
        super().__init__()
        self._tape, self._regions = tape, regions
        self.entries: dict[int, Entry] = {}  # with what is known while an op runs

    def add(self, site: CallSite, rule: Any, decision: Decision, args: Any, kwargs: Any, out: Any) -> None:
        """Append the op that just ran, which is the last entry of the tape unless the tape skips it."""
        super().add(site, rule, decision, args, kwargs, out)
        entry = len(self._tape.sites) - 1
        if entry < 0 or entry in self.entries or self._tape.sites[entry] is not site:
            return
        savable = site.savable and (site.savable_if is None or site.savable_if(args, kwargs, out))
        self._add(entry, replace(entry_of_call(site.op, args, kwargs, out), savable=savable))

    def add_unit(self, site: Any, rule: Any, decision: Decision, arguments: Any, returned: Any, first: int) -> None:
        """Append a unit, the last entry of the tape; it runs the ops inside again."""
        super().add_unit(site, rule, decision, arguments, returned, first)
        entry = len(self._tape.sites) - 1
        inside = [self.entries[number] for number in range(first, entry) if number in self.entries]
        flops = sum(one.flops for one in inside) or attention_flops(site.rule_name, arguments)
        moved = max(sum(one.moved_bytes for one in inside), moved_bytes(arguments, {}, returned))
        self._add(entry, Entry(op=site.rule_name, savable=True, flops=flops, moved_bytes=moved))

    def _add(self, entry: int, call: Entry) -> None:
        row = self.rows[-1]
        self.entries[entry] = replace(call, module=row.module, call=row.call, shape=row.shape, dtype=row.dtype)
        if self._regions.observation is not None:
            self._regions.observation.after_op()


class _ProfilingFrame(TapedFrame):
    """A call that makes a profile of its tape for its region, unless it cannot be replayed."""

    tape: _SizedTape

    def __init__(self, *args: Any, region: FullRegion) -> None:
        self._region = region
        super().__init__(*args, trace=None, replays=True)
        assert self.mode is not None
        self.mode.keeps_units = False  # later steps do not

    def _new_tape(self) -> _SizedTape:
        return _SizedTape(self.group.table, self.owners)

    def _new_mode(self) -> TapeMode:
        assert self._region.profiled_for is not None
        self._ops = _ProfileTrace(self.tape, self._region.profiled_for)
        return TapeMode(self.group.table, self.tape, self._ops)

    def _schedule_replay(self) -> None:
        handles = [handle for reference in self._handles if (handle := reference()) is not None]
        needs = dict.fromkeys(handle.position for handle in handles if handle.state != EXTERNAL)
        entries = tuple(map(self._entry, range(len(self.tape.sites))))
        profile = RegionProfile(entries, tuple(self.tape.roots), tuple(self.tape.value_bytes), tuple(needs))
        regions = self._region.profiled_for
        if regions is not None and regions.observation is not None:
            regions.observation.read(leaf.tensor for leaf in self.tape.leaves.values())
        super()._schedule_replay()
        self._region.made = profile if self._replays else None

    def _entry(self, number: int) -> Entry:
        tape, entry = self.tape, self._ops.entries.get(number, Entry())
        results = tape.results(number)
        return replace(
            entry,
            number=number,
            reads=tuple(tape.reads[number]),
            makes=tuple(results),
            writes=tuple(dict.fromkeys(tape.writes_of(number))),
            savable=bool(results) and entry.savable,
            must_save=any(value in tape.kept for value in results),
        )


class FullRegion(Region):
    """A region that is recomputed in full, and also finds out what a policy may save, or why none may.

    It does so while it is ``profiled_for`` a step. ``profile`` is of the call with the most bytes.
    """

    profiled_for: BudgetRegions | None = None
    profile: RegionProfile | None = None
    made: RegionProfile | None = None  # by the last call

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Region.run``."""
        self.made = None
        output = super().run(*args, **kwargs)
        if self.profiled_for is not None:
            reason = self.group.not_replayable or "it does not run under the replay engine"
            made = self.made or RegionProfile(reason=reason)
            self.profile = max(self.profile or made, made, key=size_of)
        return output

    def frame(self, function: Any, owners: Any, settings: Settings, outer: PackHooks | None) -> Frame:
        """See ``Region.frame``."""
        if self.profiled_for is None or (outer is not None and settings.engine != REPLAY) or keeps_fp8_state(owners):
            return super().frame(function, owners, settings, outer)
        return _ProfilingFrame(function, owners, settings, self.path or self.group.name, self.group, region=self)


class BudgetForward(RegionForward):
    """Runs its module as the region that its ``BudgetRegions`` have chosen for the pass."""

    def __init__(self, block: Block, group: RegionGroup, applied: Applied) -> None:
        super().__init__(block, group, applied)
        self.block = block
        self.region = self.full = FullRegion(group, block.path)
        self.regions = (self.full,)
        self.planned: Region | None = None

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        regions: BudgetRegions = self.applied.fitting
        regions.begin((args, kwargs), self.block.path)
        observation = regions.observation
        if observation is None:
            return super()._call(*args, **kwargs)
        observation.enter(self.block.path, args, kwargs)
        try:
            output = super()._call(*args, **kwargs)
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
        self.told = ""  # in the report

    def put_on(self, **arguments: Any) -> Applied | None:
        """Put regions on the model that are recomputed in full; returns their record, None if there are none."""
        observed = replace(self.config, policy=Policy("full recomputation"), engine=REPLAY, budget=None)
        apply(self.model, observed, **arguments, forward=BudgetForward)
        applied = next((one.applied for one in regions_of(self.model)), None)
        if applied is not None:
            applied.fitting = self
        return applied

    def begin(self, inputs: Any, path: str = "") -> None:
        """A forward begins: of the model, or of the region at ``path``."""

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

    def profiles(self, block_bytes: int) -> dict[Block, RegionProfile]:
        """Take the profiles that the calls have made, with sizes rounded up to multiples of ``block_bytes``."""
        profiles = {}
        for one in self.forwards:
            if one.full.profile is not None:
                sizes = (-(-size // block_bytes) * block_bytes for size in one.full.profile.bytes)
                profiles[one.block] = replace(one.full.profile, bytes=tuple(sizes))
            one.full.profile = None
        return profiles

    def use(self, which: str) -> None:
        """Have the next calls run as regions that are recomputed in full, also be profiled, or as those of the plan."""
        if which != self.used:
            self.used = which
            for one in self.forwards:
                one.full.profiled_for = self if which == PROFILED else None
                one.region = one.planned if which == PLANNED and one.planned is not None else one.full
                one.regions = (one.region,)

    def plan(self, planned: Sequence[PlannedRegion]) -> None:
        """Have calls run as ``planned`` from the next ``use(PLANNED)`` on."""
        forwards, of_path = {one.block.path: one for one in self.forwards}, {one.block.path: one for one in planned}
        policy = resolve_policy(policy_of(planned))
        for block, group in groups_of(policy, [one.block for one in forwards.values()], "selective"):
            forward, path, mine = forwards[block.path], block.path, of_path.get(block.path)
            forward.planned, full = Region(group, path), forward.full.group
            group.functions.update(full.functions)  # a planned call keeps nothing to verify units anew
            group.verified = group.verified or full.verified
            if mine is None or mine.profile.reason:  # it was not called, or cannot be planned
                forward.planned = forward.full
                if mine is not None:
                    full.give_up("it is not planned", path)
            if mine is not None and mine.option.saved is None:
                size = mine.option.bytes
                rule = next(one.index for one in group.table.rules if one.rule.matches_module)  # saves the whole block
                # The next call is not its first, which would hold all its results.
                forward.planned.stats = RegionStats(1, SavedFigures(size, 0, {rule: size}, {rule: 1}))
        self.used = ""
