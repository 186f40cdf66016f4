"""Profiles of a model's regions, from one forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.find import Block
from sac.blocks.install import InstalledForward, set_forward, take_off, track_modules
from sac.blocks.paths import parts_of
from sac.errors import PlanError, Problem
from sac.ops.names import op_name
from sac.planner.cost import is_causal, moved_bytes
from sac.planner.profile import Entry, Need, RegionProfile
from sac.policy.model import Decision, Policy, Rule
from sac.recompute.op_trace import OpTraceRecorder, signature
from sac.recompute.recorder import ReplayRecorder
from sac.recompute.regions import PendingCall, Region, RegionGroup
from sac.recompute.replay import ReplayFrame
from sac.recompute.table import CallSite, DecisionTable, resolve_policy
from sac.recompute.tape import Tape, new_tensors
from sac.region.fingerprint import FunctionFingerprint
from sac.region.frame import Handle
from sac.region.inputs import RegionInputs
from sac.region.settings import NEVER, REPLAY, Settings
from sac.stores.store import InputStoring, OnDevice
from sac.tensors import storage_address, storage_bytes, tensors_of

# Note [How a profile comes about]
#
# The model runs forward once, with each block under the recorder of the replay engine and a policy that saves
# everything that can be saved. So the engine itself determines what a policy may save, the identity of each value, and
# what autograd has saved. Sizes and FLOPs come from the arguments as each op runs. Regions with equal tapes form one
# group.

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
    return merged([watcher.found for watcher in watchers if watcher.found is not None])


class _Profiled(InstalledForward):
    """Runs a block under the profiling recorder in its first call; ``found`` is then its profile."""

    def __init__(self, block: Block, table: DecisionTable, calls: list[str]) -> None:
        self._calls = calls
        self.module = block.module
        self.before = block.module.__dict__.get("forward")
        self.block = block
        self.found: RegionProfile | None = None
        self._table = table

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and profile it if it has no profile yet."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        self._calls.append(self.block.path)
        if self.found is not None:
            return self.original(*args, **kwargs)
        identity = FunctionFingerprint()
        identity.look_at(self.module)
        owners = tuple(identity.owners)
        inputs = RegionInputs(args, kwargs)
        path = self.block.path
        recorder = _ProfilingRecorder(self.block, self._table, path, owners, _SETTINGS)
        recorder.begin(inputs, inputs.leaves_of(args, kwargs))
        frame = ReplayFrame(self.original, path, recorder, owners, _SETTINGS, give_up=_refuse, given_up=str)
        leaves = inputs.leaves_of(args, kwargs)
        input_bytes = sum(storage_bytes(leaves[at]) for at in InputStoring(OnDevice()).choose(leaves))
        output = frame.run(inputs, args, kwargs)
        made = {storage_address(one) for one in tensors_of(output)}
        results = frozenset(root for address, root in recorder.at_end.items() if address in made)
        if recorder.profile is not None:
            self.found = replace(recorder.profile, results=results, input_bytes=input_bytes)
        return output


def _refuse(reason: str) -> None:
    raise CannotProfile(reason)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Properties of an entry that are known only while its op runs."""

    call: int = 0
    flops: int = 0
    moved_bytes: int = 0
    results: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""
    is_causal: bool = False


_NO_SIZES = _Sizes()


class _ProfileTrace(OpTraceRecorder):
    """Records the sizes of each entry of a tape, in addition to its row of the op trace."""

    tape: Tape

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, _Sizes] = {}
        self.after_op: Callable[[int], None] | None = None
        self.until: dict[int, int] = {}  # root -> the last entry after which it was alive
        self._alive: dict[int, weakref.ref[Tensor]] = {}

    def add(
        self,
        site: CallSite,
        rule: Any,
        decision: Decision,
        args: Any,
        kwargs: Any,
        out: Any,
        *,
        call: int | None = None,
    ) -> None:
        """Append the op that just ran, which is the last entry of the tape unless the tape skips it."""
        super().add(site, rule, decision, args, kwargs, out, call=call)
        entry = len(self.tape.sites) - 1
        if entry < 0 or entry in self.sizes or self.tape.sites[entry] is not site:
            return
        row = self.rows[-1]
        results = tuple(storage_bytes(tensor) for tensor in new_tensors(out))
        moved = 0 if site.is_view else moved_bytes(args, kwargs, out)
        causal = is_causal(site.op, args, kwargs)
        self.sizes[entry] = _Sizes(row.call, row.flops, moved, results, row.shape, row.dtype, causal)
        if self.after_op is not None:
            self.after_op(entry)
            self._look(entry, out)

    def _look(self, entry: int, out: Any) -> None:
        """Note which values are alive now that an op has returned ``out``."""
        tape, alive = self.tape, self._alive
        for tensor in tensors_of(out):
            value = tape.known(tensor)
            if value is not None:
                alive[value] = weakref.ref(tensor)
        for value, reference in [*alive.items()]:
            found = reference()
            if found is not None and storage_bytes(found):
                self.until[tape.roots[value]] = entry
            else:
                del alive[value]


class _ProfilingRecorder(ReplayRecorder):
    """A recorder that makes a profile of the tape when the forward ends, unless ``block`` is None."""

    op_trace: _ProfileTrace
    profile: RegionProfile | None = None

    def __init__(
        self, block: Block | None, table: DecisionTable, path: str, owners: tuple[nn.Module, ...], settings: Settings
    ) -> None:
        super().__init__(table, path, owners, settings, _ProfileTrace(), verifies=settings.verify != NEVER)
        self.op_trace.tape = self.tape
        self._block = block
        self._needs: dict[int, Need] = {}  # by handle
        self.at_end: dict[int, int] = {}  # address of each storage that is alive at the end -> its root

    def pack(self, tensor: Tensor, handle: Handle) -> None:
        """Record the value that autograd saves, even if it is kept right away."""
        super().pack(tensor, handle)
        if handle.index in self._places:
            value, time, _ = self._places[handle.index]
            self._needs[handle.index] = Need(value, time)
        elif not handle.is_external and (known := self.tape.known(tensor)) is not None:
            self._needs[handle.index] = Need(known, len(self.tape.sites))

    def end(self, kept: list[Handle], missing: list[int]) -> None:
        """Make the profile, then end as usual."""
        if self._block is not None:
            alive = {handle.index for handle in kept} | {*missing}
            for index in alive & self._needs.keys():
                if index in self._places:  # it may have been moved after a write
                    self._needs[index] = Need(*self._places[index][:2])
            needs = dict.fromkeys(need for index, need in sorted(self._needs.items()) if index in alive)
            tape = self.tape
            self.at_end = {storage_address(one): tape.roots[value] for value, one in tape.alive().items()}
            self.profile = self._profile(self._block, tuple(needs), self._savable())
        super().end(kept, missing)

    def _savable(self) -> set[int]:
        """Return the values that the policy saves."""
        return {*self._rules}

    def _profile(self, block: Block, needs: tuple[Need, ...], saved: set[int]) -> RegionProfile:
        tape, sizes = self.tape, self.op_trace.sizes
        roots = tuple(tape.roots)
        value_bytes = [0] * len(roots)
        entries = []
        for number, site in enumerate(tape.sites):
            makes = tape.results(number)
            size = sizes.get(number, _NO_SIZES)
            is_op = type(site) is CallSite
            for value, count in zip(makes, size.results, strict=False):
                value_bytes[value] = count
            for value in makes:  # an alias that was made without a visible op has no size of its own
                value_bytes[value] = value_bytes[value] or value_bytes[roots[value]]
            entries.append(
                Entry(
                    number=number,
                    module=site.path if is_op else "",
                    op=op_name(site.op) if is_op else "",
                    call=size.call,
                    reads=tuple(tape.reads[number]),
                    makes=tuple(value for value in makes if value not in tape.kept or value in saved),
                    writes=tuple(tape.writes.get(number, ())),
                    savable=bool(makes) and all(value in saved for value in makes),
                    must_save=is_op and site.must_save and any(value in saved for value in makes),
                    is_collective=is_op and site.is_collective,
                    is_view=is_op and site.is_view,
                    is_causal=size.is_causal,
                    flops=size.flops,
                    moved_bytes=size.moved_bytes,
                    shape=size.shape,
                    dtype=size.dtype,
                )
            )
        return RegionProfile(
            name=block.path,
            paths=(block.path,),
            layers=(block.layer,),
            entries=tuple(entries),
            roots=roots,
            bytes=tuple(value_bytes),
            needs=needs,
            signature=signature(self.op_trace.rows),
            stack=block.stack,
            stack_size=block.stack_size,
            until=tuple(self.op_trace.until.get(value, -1) for value in range(len(roots))),
        )


class _ThriftyRecorder(_ProfilingRecorder):
    """Notes what a policy would save, and saves nothing but the results of ops that must be saved."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._would_save: set[int] = set()

    def _save(self, site: CallSite, rule: Any, call: int, first: int, out: Any, reads: list[int]) -> bool:
        is_saved = super()._save(site, rule, call, first, out, reads)
        if not is_saved or site.must_save:
            return is_saved
        self._would_save |= {
            value for value in range(first, len(self.tape.roots)) if self._rules.pop(value, None) is not None
        }
        return False

    def _keep_routing(self, site: CallSite, value: int, tensor: Tensor) -> None:
        if site.must_save:
            super()._keep_routing(site, value, tensor)

    def _savable(self) -> set[int]:
        return super()._savable() | self._would_save


class ProfiledRegion(Region):
    """A region that is recomputed in full, and profiled: ``profile`` is what its policy may save.

    If its calls differ in size, the profile has the largest sizes. ``after_op`` is called with the number of each entry
    of a call's tape whose op has run. ``last_frame``: that of the last call.
    """

    after_op: Callable[[int], None] | None = None
    last_frame: weakref.ref[ReplayFrame] | None = None

    def __init__(self, block: Block, group: RegionGroup) -> None:
        super().__init__(group, block.path)
        self.profile: RegionProfile | None = None
        self._block = block
        self._seen: set[Any] = set()  # signatures of profiled inputs

    def _replay_frame(self, call: PendingCall) -> tuple[ReplayFrame, ReplayRecorder]:
        is_known = call.signature is not None and call.signature in self._seen  # None equals no other call
        block = None if is_known else self._block
        recorder = _ThriftyRecorder(block, self.group.table, self.path, call.owners, call.settings)
        recorder.op_trace.after_op = self.after_op
        recorder.begin(call.inputs, call.inputs.leaves_of(call.args, call.kwargs))
        frame = ReplayFrame(
            call.function, self.path, recorder, call.owners, call.settings, give_up=self._refuse, given_up=str
        )
        self.last_frame = weakref.ref(frame)
        return frame, recorder

    def _refuse(self, reason: str) -> None:
        found = f"this block cannot be planned op by op: {reason}"
        raise PlanError(Problem(self.path, found, fix="use mode: full, or a policy by hand"))

    def _take_evidence(self, recorder: Any, frame: Any, signature: Any, *, is_alone: bool) -> None:
        if not isinstance(recorder, _ThriftyRecorder):
            self._refuse("it does not run under the replay engine")
        self._seen.add(signature)
        if recorder.profile is not None:
            known = self.profile
            self.profile = recorder.profile if known is None else _larger(known, recorder.profile)
        elif self.profile is not None and not _is_of(self.profile, recorder.tape):
            self.profile = replace(self.profile, until=())
        self.stats.take(recorder.figures, frame.input_bytes)


def _is_of(profile: RegionProfile, tape: Tape) -> bool:
    """Return whether a call with this tape has run the ops of ``profile``."""
    sites = ((op_name(site.op) if type(site) is CallSite else "") for site in tape.sites)
    return [*zip(sites, map(tuple, tape.reads), strict=True)] == [(one.op, one.reads) for one in profile.entries]


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
