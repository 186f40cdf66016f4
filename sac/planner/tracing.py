"""Profiles of regions, from one step under full recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from sac.blocks.find import Block
from sac.engine.fp8 import keeps_fp8_state
from sac.engine.frame import Frame
from sac.engine.handles import EXTERNAL
from sac.engine.op_trace import OpTraceRecorder, RegionStats
from sac.engine.recorder import TapeMode
from sac.engine.region import Region, RegionGroup
from sac.engine.settings import REPLAY, Settings
from sac.engine.table import CallSite, DecisionTable, ResolvedRule, decide
from sac.engine.tape import Tape
from sac.engine.taped import TapedFrame
from sac.errors import PlanError
from sac.outer_hooks import PackHooks
from sac.planner.agreeing import largest
from sac.planner.cost import attention_flops, entry_of_call, moved_bytes
from sac.planner.profile import Entry, Need, RegionProfile
from sac.policy.model import Decision
from sac.tensors import storage_bytes

# Note [How a profile comes about]
#
# In the observed step, each block runs under full recomputation and the recorder of the engine, with a policy that
# saves everything that can be saved, of which nothing is kept. So the engine itself determines what a policy may save,
# the identity of each value, and what autograd has saved. Sizes and FLOPs come from the arguments as each op runs.
# Regions with equal tapes get one profile.


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

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self.entries: dict[int, Entry] = {}  # with what is known while an op runs

    def add(self, site: CallSite, rule: Any, decision: Decision, args: Any, kwargs: Any, out: Any) -> None:
        """Append the op that just ran, which is the last entry of the tape unless the tape skips it."""
        super().add(site, rule, decision, args, kwargs, out)
        entry = len(self._tape.sites) - 1
        if entry < 0 or entry in self.entries or self._tape.sites[entry] is not site:
            return
        call = entry_of_call(site.op, args, kwargs, out)
        self.entries[entry] = replace(call, module=site.path, call=self.rows[-1].call)

    def add_unit(self, site: Any, rule: Any, decision: Decision, arguments: Any, returned: Any, first: int) -> None:
        """Append a unit, the last entry of the tape; it runs the ops inside again."""
        super().add_unit(site, rule, decision, arguments, returned, first)
        entry, row = len(self._tape.sites) - 1, self.rows[-1]
        inside = [self.entries[number] for number in range(first, entry) if number in self.entries]
        self.entries[entry] = Entry(
            module=site.path,
            op=site.rule_name,
            call=row.call,
            flops=sum(one.flops for one in inside) or attention_flops(site.rule_name, arguments),
            moved_bytes=max(sum(one.moved_bytes for one in inside), moved_bytes(arguments, {}, returned)),
            shape=row.shape,
            dtype=row.dtype,
        )


class _ProfilingMode(TapeMode):
    """Notes what a policy would save, and saves nothing but the results of ops that must be saved."""

    op_trace: _ProfileTrace

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._would_save: set[int] = set()
        self.units: set[Any] = set()  # sites of units that a policy would save

    def decide_on_unit(self, site: Any, args: Any, out: Any) -> tuple[Decision, ResolvedRule | None]:
        """See ``TapeMode.decide_on_unit``; a call of which ops explain everything does not become a unit."""
        if super().decide_on_unit(site, args, out)[0].keeps:
            self.units.add(site)
        return Decision.RECOMPUTE, None

    def _decide(self, site: CallSite, entry: int, args: Any, kwargs: Any, out: Any) -> None:
        if site.must_save:
            super()._decide(site, entry, args, kwargs, out)
            return
        decision, rule = decide(self, site, args, kwargs, out)
        if decision.keeps:
            self._would_save.update(self.tape.results(entry))
        self.op_trace.add(site, rule, decision, args, kwargs, out)

    def savable(self) -> set[int]:
        """Return the values that the policy would save."""
        return {*self.tape.rule_of, *self._would_save}


class _ProfilingFrame(TapedFrame):
    """A call that makes a ``profile`` of its tape, or None if it cannot be replayed."""

    tape: _SizedTape

    def __init__(self, *args: Any, block: Block) -> None:
        self._block = block
        self.profile: RegionProfile | None = None
        super().__init__(*args, trace=None, replays=True)
        assert self.mode is not None
        self.mode.keeps_units = False  # later steps do not

    def _new_tape(self) -> _SizedTape:
        return _SizedTape(self.group.table, self.owners)

    def _new_mode(self) -> _ProfilingMode:
        return _ProfilingMode(self.group.table, self.tape, _ProfileTrace(self.tape))

    def _schedule_replay(self) -> None:
        handles = [handle for reference in self._handles if (handle := reference()) is not None]
        needs = dict.fromkeys(Need(*handle.position) for handle in handles if handle.state != EXTERNAL)
        profile = self._profile_of(tuple(needs))
        super()._schedule_replay()
        self.profile = profile if self._replays else None

    def _profile_of(self, needs: tuple[Need, ...]) -> RegionProfile:
        tape, mode, block = self.tape, self.mode, self._block
        assert isinstance(mode, _ProfilingMode)
        trace = mode.op_trace
        saved = mode.savable()
        return RegionProfile(
            paths=(block.path,),
            layers=(block.layer,),
            entries=tuple(self._entry(number, saved, trace.entries) for number in range(len(tape.sites))),
            roots=tuple(tape.roots),
            bytes=tuple(tape.value_bytes),
            needs=needs,
            stack=block.stack,
            stack_size=block.stack_size,
        )

    def _entry(self, number: int, saved: set[int], entries: dict[int, Entry]) -> Entry:
        tape, mode, site = self.tape, self.mode, self.tape.sites[number]
        assert isinstance(mode, _ProfilingMode)
        results, is_op, is_unit = tape.results(number), type(site) is CallSite, number in tape.units
        is_kept = is_unit and any(value in tape.kept for value in results)  # it communicates
        can_save = is_unit or (is_op and not (site.traits.unsavable_reason or site.must_save))
        would_save = site in mode.units if is_unit else is_op and all(one in saved for one in results)
        return replace(
            entries.get(number, Entry()),
            number=number,
            reads=tuple(tape.reads[number]),
            makes=tuple(results),
            writes=tuple(dict.fromkeys(tape.writes_of(number))),
            savable=bool(results) and would_save,
            is_declined=bool(results) and can_save and not would_save,
            must_save=is_kept or (is_op and site.must_save and any(value in saved for value in results)),
        )


class ProfiledRegion(Region):
    """A region that is recomputed in full, and profiled: ``profile`` is what its policy may save, or why it cannot.

    If its calls differ in size, the profile has the largest sizes.
    """

    def __init__(self, block: Block, group: RegionGroup) -> None:
        super().__init__(group, block.path)
        self.profile: RegionProfile | None = None
        self._block = block

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Region.run``."""
        self.stats = RegionStats()  # a policy that saves everything has only the first call recorded
        self._frame: _ProfilingFrame | None = None
        try:
            output = super().run(*args, **kwargs)
        finally:
            frame, self._frame = self._frame, None
        reason = self.group.not_replayable or "it does not run under the replay engine"
        profile = frame.profile if frame is not None else None
        if profile is None:
            profile = RegionProfile((self.path,), (self._block.layer,), reason=reason)
        known = self.profile
        self.profile = (
            profile if known is None or profile.reason else known if known.reason else _larger(known, profile)
        )
        return output

    def frame(self, function: Any, owners: Any, settings: Settings, outer: PackHooks | None) -> Frame:
        """See ``Region.frame``."""
        if (outer is not None and settings.engine != REPLAY) or keeps_fp8_state(owners):
            return super().frame(function, owners, settings, outer)
        where, block = self.path or self.group.name, self._block
        frame = _ProfilingFrame(function, owners, settings, where, self.group, block=block)
        self._frame = frame
        return frame


def _larger(one: RegionProfile, other: RegionProfile) -> RegionProfile:
    """Return the profile with the largest sizes of both, or the larger one if their ops differ."""
    try:
        both: RegionProfile = largest((one, other))
    except PlanError:
        return max(one, other, key=lambda profile: sum(profile.bytes))
    return both


def merged(profiles: Sequence[RegionProfile], block_bytes: int) -> tuple[RegionProfile, ...]:
    """Return one profile for all regions of a stack that run the same ops on the same sizes.

    The sizes are those that an allocator counts that rounds up to ``block_bytes``.
    """
    kinds: dict[Any, list[RegionProfile]] = {}
    for one in profiles:
        rest = one.paths[0].removeprefix(one.stack).lstrip(".").partition(".")[2]
        own = one.paths if one.reason else ()
        kinds.setdefault((one.stack, rest, one.entries, one.roots, one.bytes, one.needs, own), []).append(one)
    return tuple(
        replace(
            alike[0],
            paths=tuple(path for one in alike for path in one.paths),
            layers=tuple(layer for one in alike for layer in one.layers),
            bytes=tuple(-(-size // block_bytes) * block_bytes for size in alike[0].bytes),
        )
        for alike in kinds.values()
    )
