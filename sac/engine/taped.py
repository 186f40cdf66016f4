"""The frame of a recorded call: it keeps what the policy saves, and is replayed if that is possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sac.checksums import checksum, find_different
from sac.engine.fp8 import Fp8Function
from sac.engine.frame import Frame, alive
from sac.engine.handles import EXTERNAL, KEPT, MISSING, OTHER, OTHER_FIX, WRITTEN, Handle
from sac.engine.inputs import Inputs
from sac.engine.offload import offload
from sac.engine.op_trace import NO_RULE, OpTraceRecorder, SavedFigures
from sac.engine.recorder import TapeMode
from sac.engine.replay import ChangedError, replay
from sac.engine.rng import advanced, python_random
from sac.engine.schedule import Schedule, UnobtainableError, key_of, schedule_replay
from sac.engine.serve import Served
from sac.engine.settings import ALWAYS, NEVER, REPLAY, RERUN
from sac.engine.table import module_name, site_name
from sac.engine.tape import CannotReplayError, DiffersError, Tape
from sac.engine.untraced import never_compiled
from sac.engine.verify import may_differ
from sac.engine.wrappers import is_in_flight
from sac.errors import Problem, RegionError, warn
from sac.outer_hooks import fetch, pack_with_outer_hooks
from sac.stores.backward_order import CallNode
from sac.tensors import (
    describe,
    detached,
    is_plain,
    landed,
    metadata,
    place_of,
    storage_address,
    storage_bytes,
    tensor_parts,
    version_of,
)


class TapedFrame(Frame):
    """A call whose ops are recorded. ``group``: the region group, which learns from the call."""

    tape: Tape

    def __init__(self, *args: Any, trace: OpTraceRecorder | None, replays: bool) -> None:
        super().__init__(*args)
        group, self.trace = self.group, trace
        self.tape = self._new_tape()
        self._replays = replays and not group.not_replayable
        table = group.table
        self._is_full = not (table.decides_on_ops or table.saves_everything)
        verify = self.settings.verify
        is_new = verify != NEVER and not group.verified
        # What a rerun is served is compared in every call: only a replay has learned what writes to it unseen.
        verifies = verify == ALWAYS or is_new or (verify != NEVER and not self._replays)
        self.mode: TapeMode | None = self._new_mode()
        self.mode.verifies, self.tape.where = verifies, self.where
        self.mode.facts, self.mode.probes = group.functions, verify != NEVER
        self.mode.takes_functions = self._replays
        self._spans: list[tuple[range, str, str]] = []
        self.mode.spans = None if self._replays else self._spans
        self.mode.keeps_units = self.settings.engine == REPLAY and is_new
        self._sums: dict[int, Any] = {}  # checksums of what autograd saved, by handle
        if is_new or verify == ALWAYS:
            self.mode.sums = self._sums
        self._schedule: Schedule | None = None
        self._wanted: list[tuple[int, int, int]] = []

    def _new_tape(self) -> Tape:
        return Tape(self.group.table, self.owners)

    def _new_mode(self) -> TapeMode:
        return TapeMode(self.group.table, self.tape, self.trace)

    def _begin(self, inputs: Inputs) -> None:
        self._input_leaves = {index: self.tape.find_input(tensor) for index, tensor in inputs.tensors}
        self.tape.module_tensors = set(map(id, self.state.tensors))
        for tangent in self._tangents:  # ops read them, although they are no arguments
            self.tape.add_leaf(tangent)
        self.tape.stored = {self.tape.roots[self._input_leaves[index]]: one for index, one in inputs.stored.items()}
        if self.group.table.offloads:
            self.call = self.call or CallNode()
            for _, tensor in inputs.tensors:
                self.call.follow(tensor)
        self._python = python_random() if self.group.careful is None else None
        if self.mode is not None:
            self.mode.first_states, self.mode.autocast = self.state.random[:1], self.state.autocast

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the function in the body, and record it."""
        assert self.mode is not None
        with super().recording(), self.mode:
            yield

    def _pack(self, tensor: Tensor) -> Handle:
        handle = self._new_handle(tensor)
        mode = self.mode
        if mode is not None and not mode.paused:
            mode.paused = True  # to detach a tensor of a wrapper class is an op
            mode.pack(tensor, handle)
            mode.paused = False
        return handle

    @property
    def engine(self) -> str:  # type: ignore[override]
        """How backward recomputes the call, as far as is known."""
        return REPLAY if self._replays and not self.group.not_replayable else RERUN

    # -- The end of the forward

    def _end(self, written: list[Tensor]) -> bool:
        tape, group, mode = self.tape, self.group, self.mode
        assert mode is not None
        handles = alive(self._handles)
        tape.ends_early = self.early_stop
        if isinstance(self.function, Fp8Function):
            own = {storage_address(tensor) for tensor in self.state.tensors}  # not what the library keeps in objects
            tape.before = {
                root: held
                for root, held in tape.before.items()
                if root in tape.input_roots or storage_address(held[0]) in own
            }
        seen = Counter[Any]()
        if self._is_full:  # else no call of the group runs without a mode
            seen = self._seen(handles, draws=not group.careful and bool(advanced(self.state.random)))
        # Without rules a call on another rank may have no tape, and runs until it has all that autograd saved.
        is_asked = self._is_full or not self.early_stop
        if tape.writers or tape.fresh or tape.stored or is_asked:
            for handle in handles:
                self._look_at(handle, is_asked=is_asked)
        self._wanted = [(handle.index, *handle.position) for handle in handles if handle.state == MISSING]
        if self._python is not None and self._python != python_random():
            self.state.python, tape.is_careful = self._python, True
        group.learn(seen, is_careful=tape.is_careful)
        group.communicates = group.communicates or tape.has_collectives
        if tape.why_not and self._replays:
            group.give_up(tape.why_not, self.where)
        self._replays = self._replays and not tape.why_not
        every = tape.kept
        if self._replays:
            self._schedule_replay()
        self.compiled_graphs = mode.compiled_graphs if group.table.decides_on_ops else 0
        self._release()
        roots = {tape.roots[value] for value in tape.kept}
        others = [one for one in handles if one.state == KEPT and tape.roots[one.position[0]] not in roots]
        self._compact(others)
        self.figures = self._count(others, every)
        self._share_versions()
        tape.kept_versions = {value: version_of(tensor) for value, tensor in tape.kept.items()}
        for leaf in tape.leaves.values():
            if leaf.tensor is not None:
                leaf.version = version_of(leaf.tensor)
        del every
        if self.call is not None and tape.table.offloads:
            self.offloads = offload(tape, handles, self.settings, self.call, is_packed=self._outer is not None)
        if not self._wanted:  # what of the inputs autograd saved
            held = [handle for handle in handles if handle.state == EXTERNAL and not self._is_of_parameter(handle)]
            inputs = [handle.value for handle in held if tape.roots[handle.position[0]] in tape.input_roots]
            self.input_bytes = sum({storage_address(one): storage_bytes(one) for one in inputs}.values()), 0
        self._pack_outside(handles)
        tape.close()
        self.mode = None
        return bool(self._wanted)

    def _share_versions(self) -> None:
        """Give kept values the version counters of the tensors that live on, so that later writes to these are seen.

        Below autograd, where the recorder runs, ``detach`` returns a tensor with a counter of its own.
        """
        tape = self.tape
        roots = {tape.roots[value] for value in tape.kept}
        living: dict[int, Tensor] = {}
        for root, reference in zip(tape.roots, tape.refs, strict=True):
            if root in roots and type(tensor := reference()) is Tensor:
                living.setdefault(root, tensor)
        for value, kept in tape.kept.items():
            tensor = living.get(tape.roots[value])
            if tensor is None or type(kept) is not Tensor or tensor.dtype is not kept.dtype:
                continue
            if tensor.layout is torch.strided and storage_address(tensor) == storage_address(kept):
                held, (offset, shape, stride) = tensor.detach(), place_of(kept)
                if place_of(held) != (offset, shape, stride):
                    held = held.as_strided(shape, stride, offset).detach()  # a view would hold its base
                tape.kept[value] = held

    def _look_at(self, handle: Handle, *, is_asked: bool) -> None:
        """Find out whether a handle is missing, and what is written to its tensor after it was saved.

        ``is_asked``: a recomputation gives back all that autograd saved.
        """
        tape, (value, time) = self.tape, handle.position
        last = tape.last_write(value)
        if last == time:  # saved by the op that then wrote to it
            time = time + 1
            handle.position = value, time
            tape.is_careful = True  # a rerun without a mode would stop too early
            if self._sums.pop(handle.index, None) is not None and (tensor := tape.refs[value]()) is not None:
                self._sums[handle.index] = checksum(tensor)  # an op has filled it since
        if tape.roots[value] in tape.fresh:
            tape.fail("autograd saved memory that no op has written to")
        handle.is_written_later = last >= time
        is_stored = tape.roots[value] in tape.stored
        if is_asked or (handle.state == KEPT and last >= time) or (handle.state == EXTERNAL and is_stored):
            handle.parameter = handle.value if self._is_of_parameter(handle) else None
            handle.release()

    def _schedule_replay(self) -> None:
        """Take the schedule of the group's last call if the tape is the same; otherwise make one."""
        tape, group = self.tape, self.group
        tape.kept_keys = (*tape.kept,)
        key = key_of(tape, self._wanted)
        known = group.schedule
        if known is not None and known.key == key:
            self._schedule = known
            return
        try:
            self._schedule = schedule = schedule_replay(tape, self._wanted)
        except UnobtainableError as reason:
            self._replays = False
            group.give_up(str(reason), self.where)
            return
        schedule.key = key
        group.schedule = schedule

    def _release(self) -> None:
        """Release the values, tensors from outside and random states that a recomputation does not start from."""
        tape = self.tape
        if self._replays:
            assert self._schedule is not None
            running = self._schedule.running
            units = [tape.units[entry] for entry in running & tape.units.keys()]
            served = [value for unit in units for value in unit.served]
            # A rerun that has to take over must route as the forward did.
            routed = [value for value in tape.kept if getattr(tape.sites[tape.makers[value]], "must_save", False)]
            starts = dict.fromkeys([*self._schedule.kept, *served, *routed])
            tape.kept = {value: tape.kept[value] for value in starts}
            tape.states = {entry: states if entry in running else None for entry, states in tape.states.items()}
        else:
            last = max((time for _, _, time in self._wanted), default=0) if self.early_stop else len(tape.sites)
            tape.kept = self._asked_for(last)  # a rerun ends before it asks for later results
            tape.states = {}
        needed = {*self._input_leaves.values(), *tape.before, *(self._schedule.leaves if self._schedule else ())}
        for value, leaf in tape.leaves.items():
            if value not in needed and not leaf.is_parameter:
                leaf.tensor = None
            elif isinstance(leaf.tensor, Tensor) and not leaf.tensor.is_leaf:  # its graph may hold this tape
                leaf.tensor = detached(leaf.tensor)

    def _asked_for(self, last: int) -> dict[int, Any]:
        """Return the kept values before entry ``last`` that a rerun needs.

        Cheap ones that only saved ops read it makes again. What only a Function's own forward uses, nothing would hold
        without a region.
        """
        tape, roots = self.tape, self.tape.roots
        inside = {entry: number for number, (span, _, _) in enumerate(self._spans) for entry in span}
        asked = {roots[handle.position[0]] for handle in alive(self._handles)}
        used = {*asked}  # elsewhere than in the Function that makes it
        for entry, site in enumerate(tape.sites):
            runs = entry < last and not site.is_view and any(value not in tape.kept for value in tape.results(entry))
            asked.update(roots[value] for value in tape.reads[entry] if runs)
            scope = inside.get(entry)
            used.update(roots[value] for value in tape.reads[entry] if inside.get(tape.makers[value]) != scope)

        def is_asked(value: int) -> bool:
            maker, root = tape.makers[value], roots[value]
            site = tape.sites[maker]
            is_costly = not getattr(site, "is_cheap", False) or site.must_save or maker in tape.states
            is_used = site.must_save or maker not in inside or root in used
            return maker < last and site.may_save and is_used and (is_costly or root in asked)

        return {value: tensor for value, tensor in tape.kept.items() if is_asked(value)}

    def _compact(self, handles: list[Handle]) -> None:
        """Copy kept parts of storages of which little else is kept; ``handles``: that hold what the tape does not."""
        whole = {storage_address(tensor) for tensor in self.tape.kept.values()} if handles else ()
        parts: dict[int, list[Handle]] = {}
        for handle in handles:
            if is_plain(handle.value):
                address = storage_address(handle.value)
                if address not in whole:
                    parts.setdefault(address, []).append(handle)
        for together in parts.values():
            if 2 * sum(handle.value.nbytes for handle in together) <= storage_bytes(together[0].value):
                for handle in together:
                    handle.compact()

    def _count(self, handles: list[Handle], every: dict[int, Any]) -> SavedFigures:
        tape, mode = self.tape, self.mode
        assert mode is not None
        rules: dict[int, int] = dict.fromkeys(tape.rule_of.values(), 0)
        rule_at = {tape.roots[value]: tape.rule_of[value] for value in every}
        held: set[int] = set()
        for value, tensor in [*tape.kept.items(), *((one.position[0], one.value) for one in handles)]:
            for part in tensor_parts(tensor):
                address = storage_address(part)
                if address not in held:
                    held.add(address)
                    rule = rule_at.get(tape.roots[value], NO_RULE)
                    rules[rule] = rules.get(rule, 0) + storage_bytes(part)
        dropped = [tensor for value, tensor in every.items() if value not in tape.kept]
        parts = (part for tensor in dropped for part in tensor_parts(tensor))
        sizes = {storage_address(part): storage_bytes(part) for part in parts}
        lost = sum(size for address, size in sizes.items() if address not in held)
        return SavedFigures(sum(rules.values()), lost, rules, {**mode.hits})

    def _pack_outside(self, handles: list[Handle]) -> None:
        """Hold inputs, and pass what this call holds to the hooks around the region."""
        packed = self._packer()
        self.inputs.end(packed)
        for index, value in self._input_leaves.items():
            self.tape.leaves[value].tensor = self.inputs.leaves[index]
        if self._outer is None:
            return
        for value, tensor in self.tape.kept.items():
            self.tape.kept[value] = packed(tensor)
        for handle in handles:
            if handle.state != MISSING and not self._is_of_parameter(handle):
                handle.value = pack_with_outer_hooks(handle.value, self._outer)

    def _is_of_parameter(self, handle: Handle) -> bool:
        leaf = self.tape.leaves.get(self.tape.roots[handle.position[0]])
        return handle.state == EXTERNAL and leaf is not None and leaf.is_parameter

    # -- Backward

    @never_compiled
    def _unpack(self, handle: Handle) -> Tensor:
        tensor = super()._unpack(handle)
        if self.is_open:  # its own forward calls backward, whose ops are on the tape
            self.tape.adopt(tensor, handle.position[0])
        return tensor

    def _recompute(self, waiting: dict[int, Handle]) -> None:
        if self.is_open:
            self._recompute_early(waiting)
            return
        if self.engine == REPLAY:
            try:
                if self._replay(waiting, [wanted for wanted in self._wanted if wanted[0] in waiting]):
                    return
            except CannotReplayError as reason:
                # Other ranks may replay, and would not take part in a rerun.
                if self.tape.has_collectives and isinstance(reason, DiffersError):
                    fix = "set `engine: rerun` for this model"
                    raise RegionError(Problem(self.where, str(reason), fix=fix)) from None
                self.group.give_up(str(reason), self.where)
        self._rerun(waiting, Served(self.tape))
        compares = self.settings.verify == ALWAYS or not self.group.verified
        if self._sums and compares and self.settings.preserve_rng_state:
            self._verify_rerun(waiting)

    def _drop(self) -> None:
        super()._drop()
        self.tape.kept, self.tape.leaves, self.tape.before = {}, {}, {}

    def _recompute_early(self, waiting: dict[int, Handle]) -> None:
        """Recompute for a backward inside of the region's own forward, from the tape so far."""
        tape, mode = self.tape, self.mode
        assert mode is not None
        mode.paused = True
        try:
            tape.kept_versions = {value: version_of(tensor) for value, tensor in tape.kept.items()}
            if tape.why_not:
                self._rerun(waiting, None)
            else:
                for leaf in tape.leaves.values():
                    leaf.version = version_of(leaf.tensor)
                self._replay(waiting, [(index, *handle.position) for index, handle in waiting.items()])
        finally:
            mode.paused = False

    def _replay(self, waiting: dict[int, Handle], wanted: list[tuple[int, int, int]]) -> bool:
        """Replay, and fill the handles; return False if a unit does not repeat itself, not even in shape."""
        tape, schedule = self.tape, self._schedule
        try:
            if schedule is None or wanted != schedule.key[0]:
                schedule = schedule_replay(tape, wanted)
            # A function that runs again is Python: it sees what a rerun sees, and leaves as little behind.
            repeats = not (self.is_open or schedule.running.isdisjoint(tape.units))
            with self.state.restored(None) if repeats else self.state.flags.entered():
                filled = [*replay(tape, schedule, wanted)]
            if tape.has_collectives:
                filled = [(index, landed(tensor)) for index, tensor in filled]
        except ChangedError as change:
            raise self._changed(*change.args) from None
        if tape.differing and not self._save_from_now_on(tape.differing.pop(), filled, waiting):
            return False
        if self._sums:
            self._verify(filled, waiting)
        for index, tensor in filled:
            waiting[index].fill(tensor, self.where, checks=self.settings.checks_metadata)
        return True

    def _changed(self, value: int) -> RegionError:
        """Return the error about a leaf that was written to after the forward."""
        tensor, inputs = fetch(self.tape.leaves[value].tensor), self._input_leaves.items()
        index = next((index for index, other in inputs if self.tape.roots[other] == self.tape.roots[value]), None)
        if index is not None:
            return self.inputs.changed(index, tensor, self.function, self.where)
        found = f"a tensor from outside the region ({describe(tensor)}) was changed in place after the forward"
        return RegionError(Problem(self.where, found, fix=WRITTEN))

    def _verify(self, filled: list[tuple[int, Tensor]], waiting: dict[int, Handle]) -> None:
        """Compare replayed values with those of the forward."""
        different = self._different(filled, waiting)
        if different is None:
            self.group.verified = True
            return
        self._sums = {}
        index, tensor = different
        found = f"saved tensor {index} ({describe(tensor)}) is replayed with other values than forward had"
        raise DiffersError(found)

    def _different(self, filled: Iterable[tuple[int, Tensor]], waiting: dict[int, Handle]) -> tuple[int, Tensor] | None:
        """Return the first of the tensors that handles are filled with that is not the one of the forward."""
        compared = [pair for pair in filled if pair[0] in self._sums and not is_in_flight(pair[1])]
        different = {*find_different([(self._sums[index], checksum(tensor)) for index, tensor in compared])}
        for position, (index, tensor) in enumerate(compared):
            handle = waiting[index]
            is_other = position in different or metadata(tensor) != handle.metadata
            if is_other and not may_differ(self.tape, handle.position[:1], handle.metadata[2]):
                return index, tensor
        return None

    def _verify_rerun(self, waiting: dict[int, Handle]) -> None:
        """Compare the values of a rerun with those of the forward."""
        different = self._different([(index, handle.value) for index, handle in waiting.items()], waiting)
        self.group.verified, self._sums = True, {}  # one warning
        if different is None:
            return
        handle = waiting[different[0]]
        maker, of = self.tape.makers[handle.position[0]], ""
        if maker >= 0:
            site = self.tape.sites[maker]
            of = f", of {site_name(site)} in {module_name(site.path)}{self._depends(maker)}"
        found = f"saved tensor {handle.index} ({describe(handle.value)}{of}) has other values in "
        found += f"recomputation than in forward: {OTHER}"
        if self.settings.refuses_differences:
            raise RegionError(Problem(self.where, found, fix=OTHER_FIX))
        warn(Problem(self.where, found, fix=f"{OTHER_FIX}. The gradients of this and later steps may differ"))

    def _depends(self, entry: int) -> str:
        """Return the last Function on which an entry depends."""
        depends = {entry}
        for earlier in range(entry, -1, -1):  # entries read what earlier ones have made
            if earlier in depends:
                if span := next((span for span in self._spans if earlier in span[0]), None):
                    return f", which depends on {span[1]} in {module_name(span[2])}"
                depends.update(self.tape.makers[value] for value in self.tape.reads[earlier])
        return ""

    def _save_from_now_on(self, entry: int, filled: list[tuple[int, Tensor]], waiting: dict[int, Handle]) -> bool:
        """Have later calls save the results of a unit that has not repeated itself; warn once, or raise if strict.

        Return whether the handles can be filled; otherwise the region runs again as Python.
        """
        unit, site = self.tape.units[entry], self.tape.sites[entry]
        found = f"{site.name} in {module_name(site.path)} gives other values when it runs again"
        rule = f"save it: a rule with `{site.name.replace(' ', ': ')}` and `do: save`"
        if self.settings.refuses_differences:
            raise RegionError(Problem(self.where, found, fix=rule))
        if not unit.facts.is_kept:
            fix = "none is needed for later steps, its results are kept from now on"
            if not unit.spare:
                fix += f". The gradients of this step may differ; {rule} avoids that"
            warn(Problem(self.where, found, fix=fix))
            self.group.op_trace = ()  # the next call lists what is decided now
        unit.facts.is_kept = True
        if not unit.spare:
            self._sums = {}
        fits = all(metadata(tensor) == waiting[index].metadata for index, tensor in filled)
        if not fits and self.tape.has_collectives:
            raise RegionError(Problem(self.where, found, fix=rule))
        return fits
