"""Profiles of a model's regions, from one forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from sac.blocks.find import Block
from sac.blocks.install import InstalledForward, set_forward, take_off, track_modules
from sac.blocks.paths import parts_of
from sac.engine.handles import EXTERNAL
from sac.engine.op_trace import OpTraceRecorder, RegionStats, signature
from sac.engine.recorder import TapeMode
from sac.engine.region import Region, RegionGroup
from sac.engine.settings import NEVER, REPLAY, RERUN, Settings
from sac.engine.table import CallSite, DecisionTable, decide, resolve_policy
from sac.engine.tape import Tape
from sac.engine.taped import TapedFrame
from sac.errors import PlanError, Problem
from sac.ops.names import op_name
from sac.outer_hooks import PackHooks, active_hooks
from sac.planner.cost import is_causal, moved_bytes
from sac.planner.profile import Entry, Need, RegionProfile
from sac.policy.model import Decision, Policy, Rule
from sac.stores.store import InputStoring, OnDevice
from sac.tensors import storage_address, storage_bytes, tensors_of
from sac.torch_private import tree_leaves

# Note [How a profile comes about]
#
# The model runs forward once, with each block under the recorder of the engine and a policy that saves everything that
# can be saved. So the engine itself determines what a policy may save, the identity of each value, and what autograd
# has saved. Sizes and FLOPs come from the arguments as each op runs. Regions with equal tapes form one group.

_EVERYTHING = Policy("everything", (Rule("everything", Decision.SAVE.value, ("*",)),))
_SETTINGS = Settings(engine=REPLAY, verify=NEVER)


class CannotProfile(Exception):  # noqa: N818 (the caller says it in the user's words)
    """The region cannot be replayed; the text gives the reason."""


def profile_regions(
    blocks: Sequence[Block], forward: Callable[[], Any], order: list[str] | None = None
) -> tuple[RegionProfile, ...]:
    """Return the profiles of ``blocks``, one per group in model order; ``forward`` runs the model once, with gradients.

    The path of each called block is appended to ``order``; blocks that are not called have no profile.

    Raises ``CannotProfile`` if a block is not replayable.
    """
    bound = resolve_policy(_EVERYTHING)
    track_modules([block.module for block in blocks])
    # The uses of one region's inputs count for the next region with the same table. Stacks may have their own rules.
    tables = {stack: bound.table(range(len(bound.rules))) for stack in {block.stack for block in blocks}}
    calls: list[str] = [] if order is None else order
    watchers = [_Profiled(block, tables[block.stack], calls) for block in blocks]
    for block, watcher in zip(blocks, watchers, strict=True):
        set_forward(block.module, watcher)
    try:
        with torch.enable_grad():
            forward()
    finally:
        for block in blocks:
            for _, module in parts_of(block.module):
                take_off(module)
    return merged([watcher.profile for watcher in watchers if watcher.profile is not None])


class _Profiled(InstalledForward):
    """Runs a block under the profiling recorder in its first call, which makes its ``profile``."""

    def __init__(self, block: Block, table: DecisionTable, calls: list[str]) -> None:
        self._calls = calls
        self.module = block.module
        self.before = block.module.__dict__.get("forward")
        self.block = block
        self.profile: RegionProfile | None = None
        self._table = table

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and profile it if it has no profile yet."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        self._calls.append(self.block.path)
        if self.profile is not None:
            return self.original(*args, **kwargs)
        group = RegionGroup(self._table, self.block.path)
        frame = _ProfilingFrame(self.original, (self.module,), _SETTINGS, self.block, group, took=self._take)
        return frame.run(args, kwargs, is_careful=False)

    def _take(self, profile: RegionProfile) -> None:
        self.profile = profile


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Properties of an entry that are known only while its op runs."""

    call: int = 0
    flops: int = 0
    moved_bytes: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    is_causal: bool = False


_NO_SIZES = _Sizes()


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

    def __init__(self, tape: Tape, after_op: Callable[[int], None] | None) -> None:
        super().__init__()
        self._tape, self._after_op = tape, after_op
        self.sizes: dict[int, _Sizes] = {}
        self.until: dict[int, int] = {}  # root -> the last entry after which it was alive
        self._alive: dict[int, weakref.ref[Tensor]] = {}

    def add(self, site: CallSite, rule: Any, decision: Decision, args: Any, kwargs: Any, out: Any, **more: Any) -> None:
        """Append the op that just ran, which is the last entry of the tape unless the tape skips it."""
        super().add(site, rule, decision, args, kwargs, out, **more)
        entry = len(self._tape.sites) - 1
        if entry < 0 or entry in self.sizes or self._tape.sites[entry] is not site:
            return
        row = self.rows[-1]
        moved = 0 if site.is_view else moved_bytes(args, kwargs, out)
        causal = is_causal(site.op, args, kwargs)
        self.sizes[entry] = _Sizes(row.call, row.flops, moved, row.shape, row.dtype, causal)
        if self._after_op is not None:
            self._after_op(entry)
            self._look(entry, out)

    def _look(self, entry: int, out: Any) -> None:
        """Note which values are alive now that an op has returned ``out``."""
        tape, alive = self._tape, self._alive
        for tensor in tensors_of(out):
            value = tape.known(tensor)
            if value is not None:
                alive[value] = weakref.ref(tensor)
        for value, reference in [*alive.items()]:
            tensor = reference()
            if tensor is not None and storage_bytes(tensor):
                self.until[tape.roots[value]] = entry
            else:
                del alive[value]


class _ProfilingMode(TapeMode):
    """Saves what the policy saves."""

    op_trace: _ProfileTrace

    def savable(self) -> set[int]:
        """Return the values that the policy saves."""
        return {*self.tape.rule_of}


class _ThriftyMode(_ProfilingMode):
    """Notes what a policy would save, and saves nothing but the results of ops that must be saved."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._would_save: set[int] = set()

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
        return super().savable() | self._would_save


class _ProfilingFrame(TapedFrame):
    """A call that passes a profile of its tape to ``took``; raises ``CannotProfile`` if it cannot be replayed."""

    tape: _SizedTape

    def __init__(
        self,
        function: Callable[..., Any],
        owners: Sequence[nn.Module],
        settings: Settings,
        block: Block,
        group: RegionGroup,
        *,
        took: Callable[[RegionProfile], None],
        is_thrifty: bool = False,
        after_op: Callable[[int], None] | None = None,
    ) -> None:
        self._mode_class = _ThriftyMode if is_thrifty else _ProfilingMode
        self._block, self._took, self._after_op = block, took, after_op
        self._profile: RegionProfile | None = None
        self._at_end: dict[int, int] = {}  # address of each storage that is alive at the end -> its root
        super().__init__(function, owners, settings, block.path, group, trace=None, replays=True)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_careful: bool) -> Any:
        """See ``Frame.run``."""
        leaves = tree_leaves((args, kwargs))
        input_bytes = sum(storage_bytes(leaves[index]) for index in InputStoring(OnDevice()).choose(leaves))
        output = super().run(args, kwargs, is_careful=is_careful)
        if self._profile is None:
            raise CannotProfile(self.group.not_replayable)
        addresses = {storage_address(tensor) for tensor in tensors_of(output)}
        results = frozenset(root for address, root in self._at_end.items() if address in addresses)
        self._took(replace(self._profile, results=results, input_bytes=input_bytes))
        return output

    def _new_tape(self) -> _SizedTape:
        return _SizedTape(self.group.table, self.owners)

    def _new_mode(self) -> _ProfilingMode:
        return self._mode_class(self.group.table, self.tape, _ProfileTrace(self.tape, self._after_op))

    def _schedule_replay(self) -> None:
        tape = self.tape
        alive = ((value, tensor) for value, reference in enumerate(tape.refs) if (tensor := reference()) is not None)
        self._at_end = {storage_address(tensor): tape.roots[value] for value, tensor in alive}
        handles = [handle for reference in self._handles if (handle := reference()) is not None]
        needs = dict.fromkeys(Need(*handle.position) for handle in handles if handle.state != EXTERNAL)
        profile = self._profile_of(tuple(needs))
        super()._schedule_replay()
        self._profile = profile if self._replays else None

    def _profile_of(self, needs: tuple[Need, ...]) -> RegionProfile:
        tape, mode, block = self.tape, self.mode, self._block
        assert isinstance(mode, _ProfilingMode)
        trace = mode.op_trace
        saved = mode.savable()
        return RegionProfile(
            name=block.path,
            paths=(block.path,),
            layers=(block.layer,),
            entries=tuple(self._entry(number, saved, trace.sizes) for number in range(len(tape.sites))),
            roots=tuple(tape.roots),
            bytes=tuple(tape.value_bytes),
            needs=needs,
            signature=signature(trace.rows),
            stack=block.stack,
            stack_size=block.stack_size,
            until=tuple(trace.until.get(value, -1) for value in range(len(tape.roots))),
        )

    def _entry(self, number: int, saved: set[int], sizes: dict[int, _Sizes]) -> Entry:
        tape, site = self.tape, self.tape.sites[number]
        results, size, is_op = tape.results(number), sizes.get(number, _NO_SIZES), type(site) is CallSite
        return Entry(
            number=number,
            module=site.path if is_op else "",
            op=op_name(site.op) if is_op else "",
            call=size.call,
            reads=tuple(tape.reads[number]),
            makes=tuple(results),
            writes=tuple(dict.fromkeys(tape.writes_of(number))),
            savable=is_op and bool(results) and all(value in saved for value in results),
            must_save=is_op and site.must_save and any(value in saved for value in results),
            is_collective=is_op and site.is_collective,
            is_view=is_op and site.is_view,
            is_causal=size.is_causal,
            flops=size.flops,
            moved_bytes=size.moved_bytes,
            shape=size.shape,
            dtype=size.dtype,
        )


class ProfiledRegion(Region):
    """A region that is recomputed in full, and profiled: ``profile`` is what its policy may save.

    If its calls differ in size, the profile has the largest sizes. ``after_op`` is called with the number of each entry
    of a call's tape whose op has run. ``last_frame``: that of the last call.
    """

    after_op: Callable[[int], None] | None = None
    last_frame: weakref.ref[TapedFrame] | None = None

    def __init__(self, block: Block, group: RegionGroup) -> None:
        super().__init__(group, block.path)
        self.profile: RegionProfile | None = None
        self._block = block

    def run(
        self,
        function: Callable[..., Any],
        owners: tuple[nn.Module, ...],
        settings: Settings,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """See ``Region.run``."""
        is_alone = active_hooks() is None or settings.engine == REPLAY
        if settings.use_reentrant or settings.engine == RERUN or not is_alone:
            self._refuse("it does not run under the replay engine")
        self.stats = RegionStats()  # a policy that saves everything has only the first call recorded
        try:
            return super().run(function, owners, settings, args, kwargs)
        except CannotProfile as error:
            self._refuse(str(error))

    def frame(
        self,
        function: Callable[..., Any],
        owners: tuple[nn.Module, ...],
        settings: Settings,
        outer: PackHooks | None,
    ) -> TapedFrame:
        """See ``Region.frame``."""
        frame = _ProfilingFrame(
            function,
            owners,
            settings,
            self._block,
            self.group,
            took=self._take,
            is_thrifty=True,
            after_op=self.after_op,
        )
        self.last_frame = weakref.ref(frame)
        return frame

    def _take(self, profile: RegionProfile) -> None:
        self.profile = profile if self.profile is None else _larger(self.profile, profile)

    def _refuse(self, reason: str) -> NoReturn:
        found = f"this block cannot be planned op by op: {reason}"
        raise PlanError(Problem(self.path, found, fix="use mode: full, or a policy by hand"))


def _larger(one: RegionProfile, other: RegionProfile) -> RegionProfile:
    """Return the profile with the largest size of each value of both, or the larger one if their ops differ."""
    larger = max(one, other, key=lambda profile: sum(profile.bytes))
    parts = [
        (profile.roots, profile.needs, [(e.op, e.reads, e.makes) for e in profile.entries]) for profile in (one, other)
    ]
    if parts[0] != parts[1]:
        return replace(larger, until=())
    return replace(larger, bytes=tuple(map(max, one.bytes, other.bytes)), until=earliest((one, other)))


def earliest(profiles: Iterable[RegionProfile]) -> tuple[int, ...]:
    """Return the ``until`` that holds for several profiles with the same ops; nothing if one of them has none."""
    return tuple(map(min, zip(*(one.until for one in profiles), strict=False)))


def merged(profiles: Sequence[RegionProfile]) -> tuple[RegionProfile, ...]:
    """Return one profile for all regions of a stack that run the same ops on the same sizes."""
    groups: dict[Any, list[RegionProfile]] = {}
    for one in profiles:
        parts = one.name.removeprefix(one.stack).lstrip(".").partition(".")[2]
        key = (one.stack, parts, one.entries, one.roots, one.bytes, one.needs, one.signature)
        groups.setdefault(key, []).append(one)
    return tuple(
        replace(
            of_group[0],
            paths=tuple(path for one in of_group for path in one.paths),
            layers=tuple(layer for one in of_group for layer in one.layers),
            until=earliest(of_group),
        )
        for of_group in groups.values()
    )
