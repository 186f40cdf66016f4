"""A kind of region: layers that share a table, what their first calls have shown, and what was last kept."""

from __future__ import annotations

from typing import Any

from torch import nn

from sac.policy.model import Policy
from sac.region.frame import Frame
from sac.region.inputs import KeptInputs, surrounding_hooks
from sac.region.state import buffer_owners
from sac.selective.announce import announce
from sac.selective.bind import rebuild_table
from sac.selective.rerun import RerunRecorder
from sac.selective.stats import RegionStats
from sac.selective.table import Table
from sac.selective.tape import OpRow, Tape

# Note [Evidence]
#
# The first call of a kind of region always runs under the recorder, in `full` mode too. If it shows nothing that needs
# a dispatch mode (no op that may be saved, no generator passed by the caller, no write to something from outside, no
# last op that writes to what autograd has saved), later calls of the same kind enter none. A kind is a table and a sort
# of inputs: dtypes, numbers of dimensions, which need gradients, and whether the module is in training.


class Kind:
    """Regions of one sort; ``run`` runs a call of one of them."""

    def __init__(self, table: Table, name: str) -> None:
        self.table = table
        self.name = name
        self.rows: tuple[OpRow, ...] = ()
        self._free: set[Any] = set()  # sorts of inputs that need no mode

    def __reduce__(self) -> tuple[Any, ...]:
        table = self.table
        return _rebuild, (table.policy, tuple(bound.index for bound in table.rules), table.must_save, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Kind:
        return self  # what it has learnt holds for copies of its regions too

    def run(
        self, function: Any, module: nn.Module | None, path: str, stats: RegionStats, args: Any, kwargs: Any
    ) -> Any:
        """Run one region call; gradients are those of ``function(*args, **kwargs)``."""
        inputs = KeptInputs(args, kwargs)
        sort = (module is not None and module.training, inputs.kind)
        if sort in self._free:
            if self.table.saves_everything and surrounding_hooks() is None:
                stats.calls += 1
                return function(*args, **kwargs)
            if not self.table.saves_everything:
                return self._run_free(function, module, path, stats, inputs, args, kwargs)
        tape = Tape() if not self.rows else None
        recorder = RerunRecorder(self.table, path, tape)
        recorder.begin(inputs)
        frame = Frame(function, path, recorder, buffer_owners(module))
        output = frame.run(inputs, args, kwargs)
        if tape is not None:
            self.rows = tuple(tape.rows)
            announce(path, self.rows)
        if self.table.saves_everything or not (self.table.could_save or recorder.needs_mode):
            self._free.add(sort)
        stats.take(recorder.record, frame.kept_handles(), frame.input_bytes)
        recorder.record.decided = []
        return output

    def _run_free(
        self,
        function: Any,
        module: nn.Module | None,
        path: str,
        stats: RegionStats,
        inputs: KeptInputs,
        args: Any,
        kwargs: Any,
    ) -> Any:
        frame = Frame(function, path, None, buffer_owners(module))
        output = frame.run(inputs, args, kwargs)
        stats.take(None, (), frame.input_bytes)
        return output


def _rebuild(policy: Policy, indices: tuple[int, ...], must_save: bool, name: str) -> Kind:
    return Kind(rebuild_table(policy, indices, must_save), name)
