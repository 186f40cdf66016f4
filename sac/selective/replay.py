"""The replay engine: a region's forward is written to a tape, and backward runs again what it needs of that."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sac.errors import Problem, RegionError, SacWarning
from sac.region.eager import never_compiled
from sac.region.frame import Frame
from sac.region.handles import Handle
from sac.region.inputs import KeptInputs
from sac.region.storages import describe, version_of
from sac.selective.replay_recorder import ReplayRecorder
from sac.selective.replay_run import CannotReplay, ExternalChangeError, run_plan

# Note [Replay]
#
# Forward. The region's function runs under a `TapeMode`, which writes down what each op read, made and wrote (Note [The
# tape]), and holds what the policy saves. What autograd saves is a missing handle, known by its value on the tape.
# At the end a plan is made of what backward will have to run (Note [What is replayed]), and what the plan does not
# start from is let go.
#
# Backward. The first unpack of a missing handle runs the plan: the ops alone, below autograd, with no dispatch mode of
# ours and none of the region's Python. So nothing that Python does happens twice, and nothing that it looks at matters:
# numbers that came from tensors, autocast, the way through an `if` stand on the tape. Random ops that run again find
# their generators as they stood.
#
# Where replay gives way. Trouble on the tape (`Tape.fail`), a leaf that is gone or lies elsewhere, or a value that is
# not the one of the forward (`verify`): then this call's Python is run again from its start, with random states,
# buffers and flags as they were; nothing of what the policy saved is of use then, except what must not be chosen anew.
# Later calls of the kind go under the rerun engine, and those whose backward is still to come run as Python too. Not so
# inside hooks on saved tensors, which may be those of an outer checkpoint: that counts what is handed to it, and finds
# in its recomputation what it found in its forward. There a call goes on as before, but that its backward runs Python.
# A value that differs is an error where the tape holds collectives: another rank may not have seen the difference, and
# would not take part in a second run.
#
# Note [Auto]
#
# With `engine: auto` nothing may be worse than under rerun: no warning where replay gives way, no error that rerun
# would not raise, nothing held that rerun would not hold. So replay gives way in more places (`yields` of the
# recorder): where it would hold what the policy does not save, because a kernel has made it that the dispatcher does
# not see; where a write would be an error; and inside hooks on saved tensors, where giving way would not last. The one
# warning is of a tensor from outside that was written to after the forward: Python reads what is there now, which may
# be something else. The one error is that of a value that differs where ranks meet, see above.

_CHANGED = "a tensor from outside was changed in place after the forward"
_READ_AGAIN = "the region's Python runs again, and finds what is there now: gradients are right if that is the same"


class ReadAgain(CannotReplay):
    """A tensor from outside was written to after the forward: this call's Python runs again, and reads it anew."""

    def __init__(self) -> None:
        super().__init__(_CHANGED)


class ReplayFrame(Frame):
    """The frame of a region that is replayed; see Note [Replay].

    ``give_up`` hears why it cannot be; ``given_up`` returns that, once another call of the kind has said so.
    """

    recorder: ReplayRecorder

    def __init__(self, *args: Any, give_up: Callable[[str], None], given_up: Callable[[], str], **more: Any) -> None:
        super().__init__(*args, **more)
        self._give_up = give_up
        self._given_up = given_up
        self._rebuilt: Any = None

    def _begin(self, inputs: KeptInputs) -> None:
        super()._begin(inputs)
        self.recorder.tape.outside = self.surroundings.reachable.tensors | inputs.tensors_in_objects()
        self.recorder.draws.begin(self.surroundings.rng)

    def _pack(self, tensor: Tensor) -> Handle:
        handle = Handle(len(self._handles))
        self._handles.append(weakref.ref(handle))
        self.recorder.pack(tensor, handle)
        return handle

    def _hold(self, alive: list[Handle]) -> list[Handle]:
        recorder = self.recorder
        recorder.hold_what_lives()
        kept = [handle for handle in alive if handle.kept]
        missing = [handle.index for handle in alive if not handle.kept]
        needed = recorder.may_run_again(kept, missing)
        self.surroundings.close(self.path, needed=needed)
        recorder.end(kept, missing)
        if recorder.tape.trouble:
            self._give_up(recorder.tape.trouble)
        self._hold_inputs(kept, needed=needed)
        if self.hooks is not None:
            recorder.needs_mode = recorder.needs_mode or bool(kept or recorder.tape.kept)  # so that they are again
            recorder.park(self.hooks)
        return kept

    @never_compiled
    def _unpack(self, handle: Handle) -> Tensor:
        if not handle.kept and handle.index in self.recorder.spoilt:
            version = self.recorder.spoilt[handle.index]
            raise RegionError(
                self._problem(
                    f"saved tensor {handle.index} was changed in place: backward expects version {version} of it",
                    fix="do not change it in place between the op that uses it and backward",
                )
            )
        if not self._forward_over:
            self.recorder.hold_what_lives()
        if self._was_changed(handle):
            self.recorder.tape.fail(_CHANGED)
            self.recorder.forget_what_lives(self._alive())
        return self._value_of(handle)

    def _was_changed(self, handle: Handle) -> bool:
        """Whether what is kept as ``handle`` lives outside of the region, was written to, and can be found anew."""
        recorder = self.recorder
        if not recorder.yields or self._dropped or handle.index not in recorder.from_outside:
            return False
        return handle.watched is not None and version_of(handle.watched) != handle.version

    def _recompute(self, wanted: Handle, task: int, *, last: bool) -> None:
        recorder = self.recorder
        if self._dropped or recorder.tape.trouble:
            super()._recompute(wanted, task, last=last)
            return
        last = last and self._forward_over
        wanted.task = -2  # it may have been unpacked in this task before: a second read of ctx.saved_tensors
        waiting = {handle.index: handle for handle in self._alive() if self._waits(handle, task)}
        try:
            # Not in a forward inside hooks: an outer checkpoint is shown there what its own forward was shown.
            if (self._forward_over or self.hooks is None) and (reason := self._given_up()):
                raise CannotReplay(reason)
            if recorder.from_outside and any(map(self._was_changed, self._alive())):
                raise ReadAgain
            self._replay(waiting)
        except CannotReplay as error:
            # What somebody else did between the passes says nothing about other calls.
            if not isinstance(error, ReadAgain):
                self._give_up(str(error))
            self._run_python(str(error), wanted, waiting, task, last=last)
            return
        if last:
            self._drop()

    def _replay(self, waiting: dict[int, Handle]) -> None:
        recorder = self.recorder
        bindings = self.surroundings.bindings
        before = bindings.copies()
        if before is None:
            raise CannotReplay("a buffer's data is elsewhere now")
        before = {
            **recorder.changed_outside(),
            **before,
            **{address: image.copy for address, image in recorder.images.items()},
        }
        plan = recorder.plan
        asked = frozenset(waiting) - recorder.spoilt.keys()
        if plan is None or plan.handles != asked:
            plan = recorder.plan_of(sorted(asked))
        if self.settings.checks_metadata:
            read = frozenset(id(recorder.tape.leaves[value].tensor()) for value in plan.leaves)
            if (problem := bindings.changed_parameter(self.path, read)) is not None:
                raise RegionError(problem)
        filled: list[int] = []

        def fill(index: int, tensor: Tensor) -> None:
            waiting[index].value = tensor
            filled.append(index)
            if not self._forward_over:
                recorder.give_out(index, tensor)

        was_paused, recorder.paused = recorder.paused, not self._forward_over
        recorder.tape.is_busy = recorder.tape.is_busy or recorder.paused
        try:
            self._rebuilt = rebuilt = self._rebuild()
            with self.surroundings.process_flags():
                run_plan(plan, recorder.tape, dict(rebuilt[2]), before, fill)
        except ExternalChangeError as change:
            problem = self._problem(
                f"a tensor from outside the region ({describe(change.tensor)}) was changed in place after the "
                f"forward: it is at version {version_of(change.tensor)}, backward expects version {change.version}",
                fix="do not write to it between forward and backward, or pass it to the region as an argument",
            )
            if not recorder.yields:
                raise RegionError(problem) from None
            warnings.warn(f"{problem}\n    {_READ_AGAIN}", SacWarning, stacklevel=2)
            raise ReadAgain from None
        finally:
            recorder.paused = was_paused
        if plan.written:
            self._rebuilt = None  # the inputs may have been written to
        if recorder.checksums is not None:
            self._verify(waiting, filled)
        self._rebuilt = None

    def _rebuild(self) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]]]:
        """Return the arguments; what replay was given may serve Python after it, for hooks may give it only once."""
        rebuilt, self._rebuilt = self._rebuilt, None
        return super()._rebuild() if rebuilt is None else rebuilt

    def _verify(self, waiting: dict[int, Handle], filled: list[int]) -> None:
        """Compare what was replayed with what autograd saved; raises ``CannotReplay`` if that is something else."""
        recorder = self.recorder
        for index, value in recorder.different([(index, waiting[index].value) for index in filled]):
            if recorder.may_differ(index, value.device):
                continue
            found = f"saved tensor {index} ({describe(value)}) is replayed with other values than forward had"
            if recorder.has_collectives:
                raise RegionError(self._problem(found, fix="set `engine: rerun` for this model"))
            raise CannotReplay(found)

    def _run_python(self, reason: str, wanted: Handle, waiting: dict[int, Handle], task: int, *, last: bool) -> None:
        self.recorder.tape.fail(reason)
        self.recorder.forget_what_lives(self._alive())
        for handle in waiting.values():
            handle.value = None
        super()._recompute(wanted, task, last=last)


def warn_of_trouble(path: str, reason: str) -> None:
    """Tell that regions like the one at ``path`` cannot be replayed."""
    found = f"replay cannot be used here: {reason}"
    fix = "none is needed, the region runs again as Python; `engine: rerun` asks for that from the start"
    warnings.warn(str(Problem(path or "region", found, fix=fix)), SacWarning, stacklevel=2)
