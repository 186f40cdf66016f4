"""Frames: one call of a region, from the forward to the recomputation in backward."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from sac.checksums import checksum, find_different
from sac.engine.handles import EXTERNAL, KEPT, MISSING, WRITTEN, Handle
from sac.engine.recorder import TapeMode
from sac.engine.replay import CannotReplay, Changed, replay
from sac.engine.rerun import Served, rerun
from sac.engine.schedule import Schedule, Unobtainable, key_of, schedule_replay
from sac.engine.state import ForwardState, python_random, same_python_random
from sac.engine.tape import Tape
from sac.errors import Problem, RegionError, SacWarning
from sac.outer_hooks import OuterPacked, active_hooks, fetch, pack_with_outer_hooks
from sac.recompute.op_trace import OpTraceRecorder, SavedFigures
from sac.region.settings import Settings
from sac.stores.prefetch import CallNode
from sac.stores.store import InputStoring, StoredInput
from sac.tensors import cloned, describe, placed_on, storage_address, storage_bytes, tensor_parts, version_of
from sac.torch_private import graph_is_retained, tree_flatten, tree_unflatten

# Autograd holds the handles and this frame (by its `_unpack`); the frame holds handles weakly and nothing that has the
# graph of the region. So all of it is freed with the graph, without the garbage collector.


class Unsteady(Exception):
    """A function gives other values when it runs again; later calls keep its results."""


class Inputs:
    """The arguments of a call until backward."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(isinstance(one, (list, tuple, dict)) for one in (*args, *kwargs.values())):
            self.leaves, self._spec = tree_flatten((args, kwargs))
        else:
            self.leaves, self._spec = [*args, *kwargs.values()], (len(args), [*kwargs])
        self.tensors = [(index, one) for index, one in enumerate(self.leaves) if isinstance(one, Tensor)]
        self._versions: list[tuple[int, int, bool]] = []
        self._stored: dict[int, StoredInput] = {}

    def store(self, storing: InputStoring, where: str) -> None:
        """Copy the chosen inputs to their store before the forward."""
        call, leaves = CallNode(), [*self.leaves]
        for index in storing.choose(leaves):
            name = partial("argument {}".format, index)
            self._stored[index] = StoredInput(leaves[index], storing.store, call, (where, index), name)

    def end(self, packed: Callable[[Tensor], Any]) -> None:
        """Hold the tensors as ``packed`` returns them."""
        self._versions = [(index, version_of(one), one.requires_grad) for index, one in self.tensors]
        for index, tensor in self.tensors:
            stored = self._stored.get(index)
            if stored is None:
                self.leaves[index] = packed(tensor)
            else:
                stored.close(None)
                self.leaves[index] = stored
        held = [one for index, one in self.tensors if type(one) is Tensor and index not in self._stored]
        sizes = [one.bytes() for one in self._stored.values()]
        self.bytes = sum(map(storage_bytes, held)) + sum(size for size, _ in sizes), sum(size for _, size in sizes)
        self.tensors = []

    def again(self, where: str, *, written: bool) -> tuple[Any, Any]:
        """Return the arguments for a rerun; ``written``: the region writes to inputs, whose contents are put back."""
        leaves = [*self.leaves]
        for index, version, requires_grad in self._versions:
            tensor = leaves[index]
            if isinstance(tensor, Tensor) and version_of(tensor) != version:
                found = f"its input {index} ({describe(tensor)}) was changed in place after the forward"
                raise RegionError(Problem(where, found, fix=WRITTEN))
            if isinstance(tensor, StoredInput):
                leaves[index] = tensor.fetch(where).requires_grad_(requires_grad)
            elif type(tensor) is not Parameter:
                leaves[index] = found = fetch(tensor).detach().requires_grad_(requires_grad)
                if written and requires_grad and not tensor.is_leaf:
                    with torch.enable_grad():
                        leaves[index] = _NotLeaf.apply(found)
        if isinstance(self._spec, tuple):
            count, names = self._spec
            return tuple(leaves[:count]), dict(zip(names, leaves[count:]))
        return tree_unflatten(leaves, self._spec)


class _NotLeaf(torch.autograd.Function):
    """Gives a tensor in the same storage that is no leaf, so that the region may write to it again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return placed_on(tensor.untyped_storage(), tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("no backward runs through a recomputation")


class Frame:
    """A call whose Python runs again in backward, without a dispatch mode in either pass."""

    tape: Tape | None = None

    def __init__(self, function: Callable[..., Any], owners: Sequence[nn.Module], settings: Settings, where: str) -> None:
        self.function, self.owners, self.settings, self.where = function, owners, settings, where
        self.early_stop = settings.early_stop
        self.is_open = True  # the forward has not ended
        self._handles: list[weakref.ref[Handle]] = []
        self._last: Any = None  # the tensor saved last, and its version

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_careful: bool) -> Any:
        """Run the forward and return its result."""
        self._outer = active_hooks()
        self.inputs = inputs = Inputs(args, kwargs)
        arguments = [one for one in (*args, *kwargs.values()) if not isinstance(one, Tensor)]
        self.state = ForwardState(self.owners, arguments, self.settings, is_careful=is_careful)
        if self.settings.input_storing is not None:
            inputs.store(self.settings.input_storing, self.where)
        self._begin(inputs)
        with saved_tensors_hooks(self._pack, self._unpack):
            output = self._forward(args, kwargs)
        self.state.end()
        self._end()
        self.is_open = False
        return output

    def _begin(self, inputs: Inputs) -> None:
        pass

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.function(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> Handle:
        handle = Handle(len(self._handles), tensor)
        self._handles.append(weakref.ref(handle))
        self._last = tensor, tensor._version
        return handle

    def _end(self) -> None:
        if self._last is not None:
            # An op that fills a tensor which autograd has saved before must run to its end.
            self.early_stop = self.early_stop and self._last[0]._version == self._last[1]
            self._last = None
        self.inputs.end(self._packer())

    def _packer(self) -> Callable[[Tensor], Any]:
        """Return what passes a tensor to the hooks around the region, each tensor once; parameters stay."""
        hooks, packed = self._outer, dict[int, Any]()
        if hooks is None:
            return lambda tensor: tensor

        def pack(tensor: Tensor) -> Any:
            if type(tensor) is Parameter:
                return tensor
            if id(tensor) not in packed:
                packed[id(tensor)] = tensor, pack_with_outer_hooks(tensor, hooks)
            return packed[id(tensor)][1]

        return pack

    def _unpack(self, handle: Handle) -> Tensor:
        if handle.state != MISSING:
            return handle.held(self.where)
        if handle.value is None:
            self._recompute(self._waiting())
            if handle.value is None:
                raise RegionError(Problem(self.where, f"recomputation does not reach saved tensor {handle.index}"))
            if not (self.is_open or graph_is_retained()):
                self._drop()  # all handles that are left have been filled
        value: Tensor = handle.value
        if graph_is_retained():
            handle.value = None  # the next backward recomputes it; otherwise autograd drops the handle soon
        return value

    def _drop(self) -> None:
        """Release what recomputations start from."""
        self.inputs.leaves = []

    def _waiting(self) -> dict[int, Handle]:
        found = (reference() for reference in self._handles)
        return {one.index: one for one in found if one is not None and one.state == MISSING and one.value is None}

    def _recompute(self, waiting: dict[int, Handle]) -> None:
        self._rerun(waiting, None)

    def _rerun(self, waiting: dict[int, Handle], mode: Served | None) -> None:
        self.state.check(self.tape, self.where)
        with self.state.restored(self.tape):
            args, kwargs = self.inputs.again(self.where, written=self.tape is not None and bool(self.tape.before))
            rerun(self.function, args, kwargs, waiting, self.where, self.settings, mode, stops=self.early_stop)


class TapedFrame(Frame):
    """A call whose ops are recorded: it keeps what the policy saves, and is replayed if that is possible.

    ``group``: the region group, which learns from the call.
    """

    tape: Tape

    def __init__(self, *args: Any, group: Any, trace: OpTraceRecorder | None, replays: bool) -> None:
        super().__init__(*args)
        self.group = group
        self.tape = Tape(group.table, self.owners)
        self.mode: TapeMode | None = TapeMode(group.table, self.tape, trace)
        self._replays = replays and not group.not_replayable
        self._verifies = self._replays and self.settings.verify != "never" and not group.verified
        self.mode.verifies = self.settings.verify != "never" and not group.verified
        self.mode.facts, self.mode.probes = group.functions, self.settings.verify != "never"
        self.mode.takes_functions = self._replays
        self._sums: dict[int, Any] = {}
        if self._verifies:
            self.mode.sums = self._sums
        self._schedule: Schedule | None = None
        self.figures: SavedFigures | None = None

    def _begin(self, inputs: Inputs) -> None:
        self._input_leaves = {index: self.tape.find_input(tensor) for index, tensor in inputs.tensors}
        self._python = python_random() if self.group.careful is None else None

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.mode is not None
        with self.mode:
            return self.function(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> Handle:
        handle = Handle(len(self._handles), tensor)
        self._handles.append(weakref.ref(handle))
        mode = self.mode
        if mode is not None and not mode.paused:
            mode.pack(tensor, handle)
        return handle

    def _end(self) -> None:
        tape, group, mode = self.tape, self.group, self.mode
        assert mode is not None
        alive = [handle for reference in self._handles if (handle := reference()) is not None]
        wanted = []
        for handle in alive:
            value, time = handle.place
            last = tape.last_write(value)
            if last == time:  # saved by the op that then wrote to it
                time = time + 1
                handle.place = value, time
                tape.is_careful = True  # a rerun without a mode would stop too early
            if tape.roots[value] in tape.fresh:
                tape.fail("autograd saved memory that no op has written to")
            if (handle.state == KEPT and last >= time) or (handle.state == EXTERNAL and not self._replays):
                handle.release()
            if handle.state == MISSING:
                wanted.append((handle.index, value, time))
        if group.careful is None and self._python is not None:
            if not same_python_random(self._python, python_random()):
                self.state.python, tape.is_careful = self._python, True
        group.careful = group.careful or tape.is_careful
        if tape.why_not and self._replays:
            group.give_up(tape.why_not, self.where)
        self._replays = self._replays and not tape.why_not
        self._wanted = wanted
        every = tape.kept
        if self._replays:
            self._try_to_schedule(wanted)
        if self._replays:
            assert self._schedule is not None
            served = [v for step in self._schedule.steps if (unit := tape.units.get(step[0])) for one in unit.served.values() for v in tape.results(one)]
            tape.kept = {value: tape.kept[value] for value in dict.fromkeys([*self._schedule.kept, *served])}
            running = {step[0] for step in self._schedule.steps} if tape.states else ()
            tape.states = {entry: states for entry, states in tape.states.items() if entry in running}
        elif self.early_stop:  # a rerun ends before it asks for later results
            last = max((time for _, _, time in wanted), default=0)
            tape.kept = {value: one for value, one in tape.kept.items() if tape.makers[value] < last}
        self._compact(alive)
        self.figures = self._count(alive, every, mode.hits)
        tape.kept_versions = {value: version_of(tensor) for value, tensor in tape.kept.items()}
        for leaf in tape.leaves.values():
            leaf.version = version_of(leaf.tensor)
        self._pack_outside(alive)
        tape.close()
        self.mode = None

    def _try_to_schedule(self, wanted: list[tuple[int, int, int]]) -> None:
        try:
            self._schedule_replay(wanted)
        except Unobtainable:
            self._replays = False
            self.group.give_up("earlier contents of a tensor from outside are needed", self.where)

    def _schedule_replay(self, wanted: list[tuple[int, int, int]]) -> None:
        tape, group = self.tape, self.group
        tape.kept_keys = (*tape.kept,)
        key = key_of(tape, wanted)
        known = group.schedule
        if known is not None and known.key == key:
            self._schedule = known
            return
        self._schedule = found = schedule_replay(tape, wanted)
        found.key = key
        group.schedule = found

    def _compact(self, alive: list[Handle]) -> None:
        """Copy kept parts of storages of which little else is kept."""
        whole = {storage_address(one) for one in self.tape.kept.values()}
        parts: dict[int, list[Handle]] = {}
        for handle in alive:
            if handle.state == KEPT and type(handle.value) is Tensor and (address := storage_address(handle.value)) not in whole:
                parts.setdefault(address, []).append(handle)
        for handles in parts.values():
            if 2 * sum(one.value.nbytes for one in handles) <= storage_bytes(handles[0].value):
                for handle in handles:
                    handle.hold(cloned(handle.value), KEPT)

    def _count(self, alive: list[Handle], every: dict[int, Any], hits: dict[int, int]) -> SavedFigures:
        rules: dict[int, int] = dict.fromkeys(self.tape.rule_of.values(), 0)
        held: set[int] = set()
        rule_at = {storage_address(part): self.tape.rule_of[value] for value, one in every.items() for part in tensor_parts(one)}
        for one in [*self.tape.kept.values(), *(handle.value for handle in alive if handle.state == KEPT)]:
            for part in tensor_parts(one):
                address = storage_address(part)
                if address not in held:
                    held.add(address)
                    rule = rule_at.get(address, -1)
                    rules[rule] = rules.get(rule, 0) + storage_bytes(part)
        dead = {storage_address(part): storage_bytes(part) for one in every.values() for part in tensor_parts(one)}
        lost = sum(size for address, size in dead.items() if address not in held)
        return SavedFigures(sum(rules.values()), lost, rules, dict(hits))

    def _pack_outside(self, alive: list[Handle]) -> None:
        """Hold inputs, and pass what this call holds to the hooks around the region."""
        packed = self._packer()
        self.inputs.end(packed)
        for index, value in self._input_leaves.items():
            self.tape.leaves[value].tensor = self.inputs.leaves[index]
        if self._outer is None:
            return
        for value, tensor in self.tape.kept.items():
            self.tape.kept[value] = packed(tensor)
        for handle in alive:
            if handle.state != MISSING and not self._is_of_parameter(handle):
                handle.value = pack_with_outer_hooks(handle.value, self._outer)

    def _is_of_parameter(self, handle: Handle) -> bool:
        leaf = self.tape.leaves.get(self.tape.roots[handle.place[0]])
        return handle.state == EXTERNAL and leaf is not None and leaf.is_parameter

    def _unpack(self, handle: Handle) -> Tensor:
        tensor = super()._unpack(handle)
        if self.is_open:  # its own forward calls backward, whose ops are on the tape
            self.tape.adopt(tensor, handle.place[0])
        return tensor

    def _recompute(self, waiting: dict[int, Handle]) -> None:
        if self.is_open:
            self._recompute_early(waiting)
            return
        if self._replays and not self.group.not_replayable:
            try:
                self._replay(waiting, [one for one in self._wanted if one[0] in waiting])
                return
            except Unsteady:
                for handle in waiting.values():
                    handle.value = None
            except CannotReplay as reason:
                self.group.give_up(str(reason), self.where)
                for handle in waiting.values():
                    handle.value = None
        self._rerun(waiting, Served(self.tape))

    def _drop(self) -> None:
        super()._drop()
        self.tape.kept, self.tape.leaves, self.tape.before = {}, {}, {}

    def _recompute_early(self, waiting: dict[int, Handle]) -> None:
        """Recompute for a backward inside of the region's own forward, from the tape so far."""
        tape, mode = self.tape, self.mode
        assert mode is not None
        mode.paused = True
        try:
            if tape.why_not:
                self._rerun(waiting, None)
            else:
                self._replay(waiting, [(index, *one.place) for index, one in waiting.items()])
        finally:
            mode.paused = False

    def _replay(self, waiting: dict[int, Handle], wanted: list[tuple[int, int, int]]) -> None:
        tape, schedule = self.tape, self._schedule
        if self.is_open:
            tape.kept_versions = {value: version_of(tensor) for value, tensor in tape.kept.items()}
            for leaf in tape.leaves.values():
                leaf.version = version_of(leaf.tensor)
        try:
            if schedule is None or wanted != schedule.key[0]:
                schedule = schedule_replay(tape, wanted)
            # A function that runs again is Python: it sees what a rerun sees, and leaves as little behind.
            repeats = not self.is_open and any(step[0] in tape.units for step in schedule.steps)
            with self.state.restored(None) if repeats else nullcontext():
                found = [*replay(tape, schedule, wanted)]
        except Changed as change:
            found = f"a tensor from outside ({describe(change.tensor)}) was changed in place after the forward"
            raise RegionError(Problem(self.where, found, fix=WRITTEN)) from None
        except Unobtainable:
            raise CannotReplay("earlier contents of a tensor from outside are needed") from None
        if self._sums:
            self._verify(found, waiting)
        for index, tensor in found:
            waiting[index].fill(tensor, self.where, checks=self.settings.checks_metadata)

    def _verify(self, found: list[tuple[int, Tensor]], waiting: dict[int, Handle]) -> None:
        pairs = [(self._sums[index], checksum(tensor)) for index, tensor in found if index in self._sums]
        indices = [index for index, _ in found if index in self._sums]
        like = {index: (one.shape, one.dtype, one.device) == waiting[index].metadata for index, one in found}
        different = {*find_different(pairs), *(place for place, index in enumerate(indices) if not like[index])}
        if different:
            tape = self.tape
            values = {index: value for index, value, _ in self._wanted} if not self.is_open else {}
            units = {tape.makers[values[indices[one]]] for one in different if indices[one] in values} & tape.units.keys()
            if units:
                for unit in units:
                    self.group.functions[tape.units[unit].key].unsteady = True
                names = ", ".join(sorted({tape.units[unit].cls.__name__ for unit in units}))
                self._sums = {}
                warnings.warn(str(Problem(self.where, f"{names} gives other values when it runs again", fix="none is needed for later steps, its results are kept from now on")), SacWarning, stacklevel=2)
                raise Unsteady("")
            self._sums = {}
            if self.tape.has_collectives:  # other ranks may not have seen a difference, and would not take part
                found = "replay gives other values than the forward"
                raise RegionError(Problem(self.where, found, fix="set `engine: rerun` for this model"))
            raise CannotReplay("replay gives other values than the forward: a kernel has written where no op is seen to")
        self.group.verified = True


__all__ = ["Frame", "OuterPacked", "TapedFrame"]
