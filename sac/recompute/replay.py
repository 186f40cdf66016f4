"""The replay engine: runs recorded ops again, below autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from sac.errors import Problem, RegionError, SacWarning
from sac.outer_hooks import fetch
from sac.recompute.autocast import as_then
from sac.recompute.recorder import UNSEEN_WRITE, ReplayRecorder
from sac.recompute.schedule import ReplaySchedule
from sac.recompute.table import CallSite
from sac.recompute.tape import ALIAS, CAST, PART, TENSOR_HOLE, WRAP, Tape, from_reads
from sac.region.compiled_graphs import never_compiled
from sac.region.frame import Frame, Handle
from sac.region.inputs import RegionInputs
from sac.region.rng import state_of
from sac.region.undo import UndoStack
from sac.tensors import (
    copy_of,
    describe,
    detached,
    layout_key,
    placed_on,
    storage_address,
    storage_bytes,
    tensors_of,
    version_of,
    with_lazy_bits,
    wrapped_parts,
)
from sac.torch_private import BelowAutograd, WithoutAutocast

# -- Running a replay schedule

CAN_REPLAY = BelowAutograd is not None and WithoutAutocast is not None

Filled = list[tuple[int, Tensor]]  # handles, by index, and what a replay has computed for them


class CannotReplay(Exception):  # noqa: N818 (not an error: the region's Python runs instead)
    """This call cannot be replayed; the text says why, for example which starting value is gone."""


class ExternalChangeError(Exception):
    """An external tensor was written to after the forward; holds the tensor and its version in the forward."""

    def __init__(self, tensor: Tensor, version: int) -> None:
        super().__init__()
        self.tensor, self.version = tensor, version


Before = dict[int, torch.UntypedStorage]


class Runner(Protocol):
    """Runs the steps of a schedule."""

    def below(self) -> AbstractContextManager[Any]:
        """Return a context with grad enabled, below autograd and without autocast."""

    def new_values(self, count: int) -> Any:
        """Return a sequence for ``count`` values, all None."""

    def load(self, schedule: ReplaySchedule, tape: Tape, before: Before, values: Any) -> Sequence[int]:
        """Put the leaves that are certainly what they were into ``values``; return the others. See ``run_schedule``."""

    def run(self, schedule: ReplaySchedule, tape: Tape, values: Any) -> Filled:
        """Run all steps on ``values``, those that they start from; return what the waiting handles get."""


def run_schedule(
    schedule: ReplaySchedule, tape: Tape, inputs: dict[int, Tensor], before: Before, runner: Runner
) -> Filled:
    """Run the steps of ``schedule``; return what the waiting handles get.

    ``inputs``: the region's inputs, by position. ``before``: the earlier data of external tensors that were written to
    since, by the address of their storage. Raises ``CannotReplay`` and ``ExternalChangeError`` before any op runs.
    """
    values = runner.new_values(tape.value_count())
    kept = tape.kept
    for value in schedule.kept:  # above autograd: fetching a value may recompute an outer region
        held = kept[value]
        values[value] = held if type(held) is Tensor else fetch(held)
    # Active dispatch modes see the ops, as they would inside a mode's handler; autograd and autocast do not.
    with runner.below():
        _load(schedule, runner.load(schedule, tape, before, values), tape, inputs, before, values)
        with generators_kept(schedule, tape):
            return runner.run(schedule, tape, values)


def generators_kept(schedule: ReplaySchedule, tape: Tape) -> AbstractContextManager[Any]:
    """Return a context after which the generators that the steps of ``schedule`` draw from are as before it."""
    stack = UndoStack()
    if tape.states:
        generators = {id(g): g for step in schedule.steps for g, _ in tape.states.get(step.number, ())}
        for generator in generators.values():
            stack.callback(generator.set_state, state_of(generator))
    return stack


def _load(
    schedule: ReplaySchedule,
    leaves: Sequence[int],
    tape: Tape,
    inputs: dict[int, Tensor],
    before: Before,
    values: Any,
) -> None:
    copies: dict[int, torch.UntypedStorage] = {}
    for value in leaves:
        leaf = tape.leaf(value)
        assert leaf is not None
        if leaf.position >= 0:
            values[value] = detached(inputs[leaf.position])
            continue
        tensor = leaf.tensor()
        if tensor is None:
            raise CannotReplay("a tensor from outside the region that an op read no longer exists")
        address = storage_address(tensor)
        if address in before:
            if address not in copies:
                copies[address] = copy_of(before[address])
            values[value] = placed_on(copies[address], tensor)
            continue
        if tape.roots[value] in tape.writers:
            raise CannotReplay("the data of a tensor that the region has written to has moved")
        if tensor.shape != leaf.shape or (not storage_bytes(tensor) and tensor.numel()):
            raise CannotReplay("the data of a parameter that an op read has moved")
        if not leaf.is_persistent and version_of(tensor) != leaf.version:
            raise ExternalChangeError(tensor, leaf.version)
        values[value] = tensor
    for value in schedule.kept if schedule.written else ():
        if tape.roots[value] in schedule.written:
            values[value] = values[value].clone()


def leaf_as_then(tape: Tape, inputs: dict[int, Tensor], value: int) -> Tensor | None:
    """Return the tensor of a leaf; None if it is not certain that it is what the forward read."""
    leaf = tape.leaf(value)
    if leaf is None:
        return None
    if leaf.position >= 0:
        return detached(inputs[leaf.position])
    tensor: Tensor | None = leaf.tensor()
    if tensor is None or tensor.shape != leaf.shape or tape.roots[value] in tape.writers:
        return None
    is_there = storage_bytes(tensor) or not tensor.numel()
    return tensor if is_there and (leaf.is_persistent or version_of(tensor) == leaf.version) else None


class PythonRunner:
    """Runs all steps from Python."""

    @contextmanager
    def below(self) -> Iterator[None]:
        """See ``Runner``."""
        with torch.enable_grad(), BelowAutograd(), WithoutAutocast():
            yield

    def new_values(self, count: int) -> list[Any]:
        """See ``Runner``."""
        return [None] * count

    def load(self, schedule: ReplaySchedule, tape: Tape, before: Before, values: Any) -> Sequence[int]:
        """See ``Runner``."""
        return schedule.leaves

    def run(self, schedule: ReplaySchedule, tape: Tape, values: list[Any]) -> Filled:
        """See ``Runner``."""
        filled = [(handle, values[value]) for handle, value in schedule.fills]
        rests, states, keywords = tape.arg_templates, tape.states, tape.keywords
        works: list[Any] = []  # of point-to-point calls, several of which must be in flight at once
        for number, run, positions, result, fills, frees in schedule.orders or _orders(schedule, tape):
            if result < 0 or works or number in states:
                run_unusual(schedule, tape, number, values, works)
            else:
                args = [*rests[number]]
                for index, value in positions:
                    if (
                        args[index] is not TENSOR_HOLE
                    ):  # a number, where another call with this tape layout had a tensor
                        args = _arguments(rests[number], tape.reads[number], values)
                        break
                    args[index] = values[value]
                values[result] = run(*args, **keywords[number]) if number in keywords else run(*args)
            for handle, value in fills:
                filled.append((handle, values[value]))
            for value in frees:
                values[value] = None
        wait(works)
        return filled


def _orders(schedule: ReplaySchedule, tape: Tape) -> list[Any]:
    """Return the steps in the form in which they run; calls with the same schedule share it.

    An ordinary step consists of its number, the callable, the places of tensors in its arguments, the number of its
    result, the handles to fill and the values to free. The result is -1 for a step that ``run_unusual`` runs.
    """
    orders: list[Any] = []
    schedule.steps_by_number = {step.number: step for step in schedule.steps}
    for step in schedule.steps:
        number = step.number
        op, rest = tape.sites[number], tape.arg_templates[number]
        result = -1
        positions: tuple[tuple[int, int], ...] = ()
        if (
            type(op) is CallSite
            and op.is_ordinary
            and not op.traits.takes_optional
            and tape.output_counts.get(number, 1) == 1
        ):
            holes = [index for index, one in enumerate(rest) if one is TENSOR_HOLE]
            positions = tuple(zip(holes, tape.reads[number], strict=True))
            result = step.outputs[0][1] if step.outputs else -1
        orders.append((number, getattr(op, "run", None), positions, result, step.fills, step.frees))
    schedule.orders = orders
    return orders


def run_unusual(schedule: ReplaySchedule, tape: Tape, number: int, values: Any, works: list[Any]) -> None:
    """Run a step that is not ordinary: several results or none, tensors in containers, random numbers, collectives."""
    op, rest, reads = tape.sites[number], tape.arg_templates[number], tape.reads[number]
    if type(op) is not CallSite:
        out = _made(op, rest, [values[read] for read in reads])
    else:
        if works and op.op.namespace != "c10d":
            wait(works)
        for generator, state in tape.states.get(number, ()):
            generator.set_state(state)
        keywords = tape.keywords.get(number, {})
        if op.is_flat:
            args = _arguments(rest, reads, values)
        else:
            args, keywords = from_reads(rest, values), from_reads(keywords, values)
        if op.is_custom_op:
            with as_then(tape.autocast_states.get(number)):
                out = op.op(*args, **keywords)
        else:
            out = op.run(*args, **keywords)
        if op.is_collective and op.op.namespace == "c10d":
            works.extend(_works_of(out))
            if schedule.steps_by_number[number].fills:
                wait(works)
    made = [out] if isinstance(out, Tensor) else tensors_of(out)
    for index, value in schedule.steps_by_number[number].outputs:
        values[value] = made[index]


def _arguments(rest: Sequence[Any], reads: Sequence[int], values: Any) -> list[Any]:
    left = iter(reads)
    return [values[next(left)] if one is TENSOR_HOLE else one for one in rest]


def _works_of(out: Any) -> list[Any]:
    """Return the `Work` objects among an op's results; `Work.wait` is not an op, so the tape does not contain it."""
    found = out if isinstance(out, (tuple, list)) else (out,)
    return [one for one in found if isinstance(one, torch.ScriptObject) and hasattr(one, "wait")]


def wait(works: list[Any]) -> None:
    """Wait for all ``works``, in order."""
    while works:
        works.pop(0).wait()


def _made(marker: Any, rest: Any, reads: list[Any]) -> Tensor:
    """Make a tensor that was created unseen in the forward; see Note [The tape]."""
    if marker is ALIAS:
        return _alias(reads[0], rest[0])
    if marker is CAST:
        cast: Tensor = reads[0].to(rest[0])
        return cast
    if marker is PART:
        part = wrapped_parts(reads[0])[rest[0]]
        return part if layout_key(part) == rest[1] else _alias(part, rest[1])
    assert marker is WRAP
    cls, inside, context, size, stride = rest
    left = iter(reads)
    held = {name: next(left) if value is TENSOR_HOLE else value for name, value in inside}
    made: Tensor = cls.__tensor_unflatten__(held, context, size, stride)
    return made


def _alias(tensor: Tensor, geometry: tuple[Any, ...]) -> Tensor:
    shape, stride, offset, dtype, bits = geometry
    found: Tensor = torch.empty(0, dtype=dtype, device=tensor.device)
    return with_lazy_bits(found.set_(tensor.untyped_storage(), offset, shape, stride), bits)


# -- The frame of a replayed region

# Note [Replay]
#
# Forward. The region's function runs under a `TapeMode`, which records what each op read, produced and wrote to (Note
# [The tape]), and keeps what the policy saves. A tensor that autograd saves becomes a missing handle unless its value
# is kept; the tape knows its value. At the end of the forward, the recorder computes the replay schedule: which ops
# backward has to run (Note [What is replayed]). Values that the schedule does not start from are released.
#
# Backward. The first unpack of a missing handle runs the schedule: only the ops, below autograd, without our dispatch
# modes and without the region's Python. So no side effect of Python happens twice, and nothing that Python depends on
# matters: numbers read from tensors, autocast casts and the branches taken are on the tape. Random ops that run again
# start from the generator states of the forward.
#
# Fallback to rerun. A call cannot be replayed if its tape is not replayable (`Tape.fail`), if a leaf is gone or its
# data has moved, or if a value differs from the forward's (`verify`). Then the call's Python runs again from its start,
# with random states, buffers and flags restored. It uses the saved results that the tape holds, as long as what it
# gives is what the forward gave (Note [What a fallback is served]).
# Later calls of the region group use the rerun engine; earlier calls whose backward is still to come run as Python too.
# The exception is a region inside saved-tensor hooks, which may be those of an outer checkpoint. An outer checkpoint
# counts the tensors passed to it, and expects the same ones in its recomputation as in its forward. There, later calls
# are recorded as before, and only their backward runs Python.
# A value that differs is an error if the tape contains collectives: another rank may not have seen the difference, and
# would not take part in a second run.
#
# Example. A block computes `down(gelu(up(x)))` with Linears without bias, and the policy saves `mm`. Autograd saves x,
# both weights, the result of `up` and the result of `gelu`. Only the last is a missing handle. The schedule has one
# step: `gelu`, which starts from the kept result of `up`. Backward of `down` unpacks the handle and runs that step;
# no `mm` runs again, and neither does the block's Python.
#
# Note [Auto]
#
# With `engine: auto`, replay must be no worse than rerun: no warning when it falls back to rerun, no error that rerun
# would not raise, no memory held that rerun would not hold. So replay falls back in more cases (`may_fall_back` of the
# recorder): if it would keep a value that the policy does not save, made by a kernel that the dispatcher does not see;
# if a write would be an error; and inside saved-tensor hooks, where a fallback would not last. The only warning is
# about an external tensor that was written to after the forward: Python reads its present data, which may differ. The
# only error is a value that differs where the tape contains collectives, see above.
#
# Example. A kernel that the dispatcher does not see fills a `torch.empty(8, 8)`, and an op reads it. Replay cannot
# recompute that value, so `engine: replay` keeps its 64 elements. Rerun would call the kernel again and keep nothing.
# So under `auto` the backward of this call runs Python, and later calls of the region group use rerun, without a
# warning.

_CHANGED = "a tensor from outside the region was changed in place after the forward"
_READ_AGAIN = "the region's Python runs again and reads the present data: gradients are right if it equals forward's"


class OtherValues(CannotReplay):
    """Replay gave other values than the forward: an op does not repeat itself, or reads what no op wrote."""


class ReadAgain(CannotReplay):
    """An external tensor was written to after the forward: this call's Python runs again, and reads it anew."""

    def __init__(self) -> None:
        super().__init__(_CHANGED)


class _LeafIds(Collection[int]):
    """The ids of the tensors of some leaves, found when they are first asked for, which is seldom."""

    __slots__ = ("_found", "_leaves", "_tape")

    def __init__(self, tape: Tape, leaves: Sequence[int]) -> None:
        self._tape, self._leaves = tape, leaves
        self._found: frozenset[int] | None = None

    def _ids(self) -> frozenset[int]:
        if self._found is None:
            self._found = self._tape.leaf_ids(self._leaves)
        return self._found

    def __contains__(self, one: object) -> bool:
        return one in self._ids()

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids())

    def __len__(self) -> int:
        return len(self._ids())


class ReplayFrame(Frame):
    """The frame of a region that is replayed; see Note [Replay].

    ``give_up`` is called with the reason if the call cannot be replayed. ``given_up`` returns the reason once a call of
    the same region group has given up.
    """

    recorder: ReplayRecorder
    runner: Runner = PythonRunner()

    def __init__(self, *args: Any, give_up: Callable[[str], None], given_up: Callable[[], str], **more: Any) -> None:
        super().__init__(*args, **more)
        self._give_up = give_up
        self._given_up = given_up
        self._rebuilt: Any = None

    def _begin(self, inputs: RegionInputs) -> None:
        super()._begin(inputs)
        self.recorder.tape.external_tensors = self.ambient.reachable.tensors | inputs.tensors_in_objects()
        self.recorder.random_states.begin(self.ambient.rng)

    def _run_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super()._run_forward(args, kwargs)
        except BaseException:
            self.recorder.forget_recent()
            raise

    def _pack(self, tensor: Tensor) -> Handle:
        handle = Handle(len(self._handles))
        self._handles.add(handle)
        self.recorder.pack(tensor, handle)
        return handle

    def _close(self) -> None:
        self.recorder.hold_external()
        super()._close()

    def _hold(self, kept: list[Handle], missing: list[int]) -> None:
        recorder = self.recorder
        needed = recorder.may_run_again(kept, missing)
        self.ambient.close(self.path, needed=needed)
        recorder.end(kept, missing)
        if recorder.tape.not_replayable:
            self._give_up(recorder.tape.not_replayable)
        self._offload(kept)
        self._hold_inputs(kept, needed=needed)
        if self.hooks is not None:
            # With a recorder, later calls pass the hooks the same values again.
            recorder.needs_mode = recorder.needs_mode or bool(kept or recorder.tape.kept)
            recorder.pack_with_outer_hooks(self.hooks)

    @never_compiled
    def _unpack(self, handle: Handle) -> Tensor:
        if not handle.is_kept and handle.index in self.recorder.modified_after_save:
            version = self.recorder.modified_after_save[handle.index]
            raise RegionError(
                self._problem(
                    f"saved tensor {handle.index} was changed in place: backward expects version {version} of it",
                    fix="do not change it in place between the op that uses it and backward",
                )
            )
        if not self._forward_over:
            self.recorder.hold_external()
        if self._was_changed(handle):
            self.recorder.tape.fail(_CHANGED)
            self.recorder.end_serving()
            self.recorder.forget_external(self._handles.alive())
        return super()._unpack(handle)

    def _was_changed(self, handle: Handle) -> bool:
        """Return whether ``handle`` keeps an external tensor that was written to and can be read anew by Python."""
        recorder = self.recorder
        if not recorder.may_fall_back or self._dropped or handle.index not in recorder.external_handles:
            return False
        return handle.was_changed

    def _recompute(self, wanted: Handle, task: int, *, last: bool) -> None:
        recorder = self.recorder
        if self._dropped or recorder.tape.not_replayable:
            self._run_python(wanted, task, last=last)
            return
        last = last and self._forward_over
        wanted.task = -2  # it may have been unpacked in this task before: a second read of ctx.saved_tensors
        waiting: dict[int, Handle] = {}
        try:
            if self._replay_at_once(task):
                if last:
                    self._drop()
                    self._last_task = task
                return
            waiting = self._handles.waiting(task)
            # Not during a forward inside hooks: an outer checkpoint must be passed the same tensors as in its forward.
            if (self._forward_over or self.hooks is None) and (reason := self._given_up()):
                raise CannotReplay(reason)
            if recorder.external_handles and any(map(self._was_changed, self._handles.alive())):
                raise ReadAgain
            self._replay(waiting)
        except CannotReplay as error:
            # A write between forward and backward is no evidence about other calls, and Python is to read other values.
            if isinstance(error, ReadAgain):
                recorder.end_serving()
            else:
                self._give_up(str(error))
                recorder.compares_python = not isinstance(error, OtherValues)  # such an op may differ again
            recorder.tape.fail(str(error))
            recorder.forget_external(self._handles.alive())
            for handle in waiting.values():
                handle.value = None
            self._run_python(wanted, task, last=last)
            return
        if last:
            self._drop()
            self._last_task = task

    def _replay_at_once(self, task: int) -> bool:
        """Fill the handles that wait in graph task ``task``, if the C++ library can; return whether it has.

        Raises as ``_replay`` does if a value differs.
        """
        return False

    def _replay(self, waiting: dict[int, Handle]) -> None:
        recorder = self.recorder
        module_state = self.ambient.module_state
        before: Before = {}
        is_same = module_state.is_known_to_be_same()
        if not is_same:
            copies = module_state.copies()
            if copies is None:
                raise CannotReplay("the data of a buffer or parameter has moved")
            before = {**recorder.changed_external(), **copies}
        elif recorder.has_external:
            before = recorder.changed_external()
        if recorder.snapshots:
            before.update((address, image.copy) for address, image in recorder.snapshots.items())
        schedule = recorder.schedule
        asked = frozenset(waiting)
        if recorder.modified_after_save:
            asked -= recorder.modified_after_save.keys()
        if schedule is None or schedule.handles != asked:
            schedule = recorder.schedule_of(sorted(asked))
        self._check_unseen_writes(schedule, is_same=is_same)
        if self.settings.checks_metadata and not (is_same and module_state.has_same_versions()):
            read = _LeafIds(recorder.tape, schedule.leaves)
            if (problem := module_state.changed_parameter(self.path, read)) is not None:
                raise RegionError(problem)
        was_paused, recorder.paused = recorder.paused, not self._forward_over
        if recorder.paused:
            recorder.tape.needs_attention = True
        try:
            inputs = self.inputs.unchanged()
            if inputs is None:
                self._rebuilt = rebuilt = self._rebuild()
                inputs = dict(rebuilt[2])
            with self.ambient.process_flags():
                filled = run_schedule(schedule, recorder.tape, inputs, before, self.runner)
        except ExternalChangeError as change:
            problem = self._problem(
                f"a tensor from outside the region ({describe(change.tensor)}) was changed in place after the "
                f"forward: it is at version {version_of(change.tensor)}, backward expects version {change.version}",
                fix="do not write to it between forward and backward, or pass it to the region as an argument",
            )
            if not recorder.may_fall_back:
                raise RegionError(problem) from None
            warnings.warn(f"{problem}\n    {_READ_AGAIN}", SacWarning, stacklevel=2)
            raise ReadAgain from None
        finally:
            recorder.paused = was_paused
        for index, tensor in filled:
            waiting[index].value = tensor
        if not self._forward_over:
            for index, tensor in filled:
                recorder.unpack_early(index, tensor)
        if schedule.written:
            self._rebuilt = None  # the inputs may have been written to
        if recorder.checksums is not None:
            self._verify(filled)
        self._rebuilt = None

    def _check_unseen_writes(self, schedule: ReplaySchedule, *, is_same: bool) -> None:
        """Raise ``CannotReplay`` if the forward wrote to a leaf unseen, before or after an op read it.

        ``is_same``: whether buffers are known to be as they were when the forward began.
        """
        if not self._forward_over:
            self.recorder.check_left()
            self.recorder.random_states.catch_up()
        tape = self.recorder.tape
        if tape.not_replayable:
            raise CannotReplay(tape.not_replayable)
        unseen = () if is_same else self.ambient.module_state.written_unseen()
        if not unseen:
            return
        for value in schedule.leaves:
            leaf = tape.leaf(value)
            assert leaf is not None
            if leaf.position >= 0 or tape.roots[value] in tape.writers:  # see ``check_left``
                continue
            tensor = leaf.tensor()
            if tensor is not None and storage_address(tensor) in unseen:
                raise CannotReplay(UNSEEN_WRITE)

    def _rebuild(self) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]]]:
        """Return the arguments; a fallback after a replay reuses those of the replay: hooks may unpack only once."""
        rebuilt, self._rebuilt = self._rebuilt, None
        return super()._rebuild() if rebuilt is None else rebuilt

    def _verify(self, filled: Filled) -> None:
        """Compare replayed values with those that autograd saved; raise ``CannotReplay`` if they differ."""
        recorder = self.recorder
        if different := recorder.different(filled):
            self._refuse([(index, value) for index, value in different if not recorder.may_differ(index, value.device)])

    def _refuse(self, different: Filled) -> None:
        for index, value in different:
            found = f"saved tensor {index} ({describe(value)}) is replayed with other values than forward had"
            if self.recorder.has_collectives:
                raise RegionError(self._problem(found, fix="set `engine: rerun` for this model"))
            raise OtherValues(found)

    def _run_python(self, wanted: Handle, task: int, *, last: bool) -> None:
        """Run the region's Python; see Note [What a fallback is served]."""
        recorder, wanted.task = self.recorder, -2
        waiting = self._handles.waiting(task)
        if self._dropped or not self._forward_over or not recorder.begin_serving(waiting):
            was_paused, recorder.paused = recorder.paused, not self._forward_over
            try:
                super()._recompute(wanted, task, last=last)
            finally:
                recorder.paused = was_paused
            return
        self._rebuilt = rebuilt = self._rebuild()
        try:
            super()._recompute(wanted, task, last=False)
            self._refuse(recorder.found_different(waiting))
        except Exception:
            if recorder.has_collectives:  # other ranks would not take part in another run
                raise
            recorder.end_serving()
            recorder.evidence.serves = False
            for handle in waiting.values():
                handle.value = None
            self._rebuilt = None if recorder.wrote_inputs else rebuilt
            super()._recompute(wanted, task, last=last)
            return
        if last:
            self._drop()
            self._last_task = task


def warn_not_replayable(path: str, reason: str) -> None:
    """Warn that regions like the one at ``path`` cannot be replayed."""
    found = f"replay cannot be used here: {reason}"
    fix = "none is needed, the region runs again as Python; `engine: rerun` asks for that from the start"
    warnings.warn(str(Problem(path or "region", found, fix=fix)), SacWarning, stacklevel=2)
