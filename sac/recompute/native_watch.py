"""Calls without a recorder, with the optional native library: their ops are watched all the same."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from sac.errors import Problem
from sac.recompute.table import DecisionTable
from sac.region.frame import Handle, Handles, Recorder
from sac.region.inputs import RegionInputs
from sac.region.module_state import KEPT_WHOLE, ModuleState, UnseenWriteError

# Note [Watched calls]
#
# A call that needs no recorder, as an earlier call has shown (Note [Evidence]), may do what the earlier one did not:
# run an op that chooses, pass a generator to an op, fill what autograd has saved just before, or write to a parameter,
# a buffer or an input in a way that moves no version counter. With the library such calls are watched. No mode is
# active: torch reports each op to a callback in C++ (`RecordFunction`), at about 0.2 us per op. It sees composite ops
# and the ops that they consist of, and it ignores the ops that others run inside of their kernels, which no mode sees.
#
# If the recomputation could not repeat what was found, the call's activations are kept (Note [The walk of a region] on
# unseen writes), with one warning, and later calls have a recorder. So with the library, what earlier calls have shown
# changes no result.
#
# Example. A layer in mode `full` adds noise from its own generator in every third call. The first two calls are no
# evidence against the third, whose `randn` is passed a generator: its activations are kept. From the fourth call on, a
# recorder restores the generator.

_FOUND = (  # by `Reason` of the library
    "which makes a choice",
    "with a generator of its own",
    "which fills a tensor that autograd has saved before",
)


class NativeWatch(Recorder):
    """The ``Recorder`` of a call that decides on nothing; see Note [Watched calls].

    ``watches_writes``: whether the region starts again from the buffers that its forward started from.
    """

    sees_ops = False

    def __init__(
        self, library: Any, table: DecisionTable, path: str, inputs: RegionInputs, *, watches_writes: bool
    ) -> None:
        self.path = path
        self.watches_writes = watches_writes
        self._inputs: RegionInputs | None = inputs
        self._module_state: ModuleState | None = None
        self._library, self._ops = library, table.watched_ops(library)

    def set_start(self, module_state: ModuleState, handles: Handles) -> None:
        """See ``Recorder``."""
        self._module_state = module_state
        self._native = self._library.Watch(self._ops, handles)

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the context in which the ops of this thread are watched."""
        watch: AbstractContextManager[Any] = self._native
        return watch

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """The forward is over. Raises ``UnseenWriteError`` if it will run again, but cannot be repeated."""
        inputs, module_state = self._inputs, self._module_state
        self._inputs = self._module_state = None
        if last_missing >= 0:
            assert inputs is not None
            assert module_state is not None
            self._check(inputs, module_state)
        return True

    def _check(self, inputs: RegionInputs, module_state: ModuleState) -> None:
        noted = self._native.found()
        if noted is not None:
            reason, name = noted
            found = f"this call ran {name.replace('::', '.')}, {_FOUND[reason]}, and no earlier call did"
            raise UnseenWriteError(Problem(where=self.path or "region", found=found, fix=KEPT_WHOLE))
        written = self._native.written() if self.watches_writes else []
        if not written:
            return
        tensors, given = module_state.without_copy(), inputs.without_copy()
        for address in written:
            if address in tensors:
                raise UnseenWriteError(module_state.unseen(tensors[address], self.path))
            if address in given:
                raise UnseenWriteError(given[address].unseen(self.path))
