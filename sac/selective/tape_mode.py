"""The dispatch mode under which a region's forward runs when it is to be replayed: it decides, and writes the tape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from sac.selective.autocast import callers_autocast
from sac.selective.bare_mode import RegionMode
from sac.selective.record import default_generators
from sac.selective.rows import Rows
from sac.selective.table import Plan, run_op
from sac.selective.tape_entries import HOLE, as_reads
from sac.selective.tensors import tensors_of

if TYPE_CHECKING:
    from sac.selective.tape_recorder import TapeRecorder

_NO_REPLAY = frozenset({"fsdp", "streams"})  # what they do hangs on more than tensors


class TapeMode(RegionMode):
    """Runs a region's forward: decides per op, holds what is saved, and writes down how to make the rest again."""

    def __init__(self, recorder: TapeRecorder, rows: Rows | None) -> None:
        super().__init__(recorder.table)
        self.record = recorder
        self.tape = recorder.tape
        self.rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plan: Plan | None = self.plans.get(id(func))
        tape, record = self.tape, self.record
        if plan is None or not plan.is_usual or tape.is_busy or self.rows is not None:
            return self._run(plan or record.table.plan(func, self.path), func, args, kwargs or {})

        # The usual op, of which there are many: all that is known of it beforehand is not asked again. What follows
        # does what `_run` does, with the methods of the tape written out.
        ids, versions, roots = tape.ids, tape.versions, tape.roots
        reads = []
        rest: Any = args
        try:
            for place in plan.places:
                if place >= len(args):
                    break
                value: Any = args[place]
                found = ids.get(id(value))
                if found is None or found[0]() is not value:
                    if not isinstance(value, Tensor):  # left out, or a number
                        continue
                    number = tape.meet(value, func)
                else:
                    number = found[1]
                    if value._version != versions[number]:
                        number = tape.look_at_version(value, number)
                reads.append(number)
                if rest is args:
                    rest = [*args]
                rest[place] = HOLE
        except RuntimeError:  # a tensor of inference mode has no version
            return self._run(plan, func, args, kwargs or {})
        if tape.is_busy:  # trouble
            return self._run(plan, func, args, kwargs or {})
        out = plan.run(*args, **kwargs) if kwargs else plan.run(*args)
        if type(out) is not Tensor:
            record.finish(self, plan, args, kwargs or {}, rest, reads, kwargs or {}, out)
            return out
        first = len(roots)
        if plan.view_of >= 0:
            versions.append(versions[reads[0]])
            roots.append(roots[reads[0]])
            ids[id(out)] = ref(out), first
        else:  # in new memory, always
            versions.append(0)
            roots.append(first)
            reference = ref(out)
            ids[id(out)] = reference, first
            tape.unsynced.append((first, reference))
        if kwargs:
            tape.keywords[len(tape.plans)] = kwargs
        tape.plans.append(plan)
        tape.rests.append(rest)
        tape.reads.append(reads)
        tape.firsts.append(first)
        if plan.decides:
            record.decide_on(plan, args, kwargs or {}, out, first, reads)
        if record.recent:
            record.recent = []
        return out

    def _run(self, plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
        """Run any op, and write it down."""
        record, tape = self.record, self.tape
        if plan.is_silent or record.paused:
            return self._run_silently(plan, func, args, kwargs)
        if record.suspects:
            record.settle_suspects()
        if tape.trouble:
            return record.run_untaped(self, plan, args, kwargs)
        reads: list[int] = []
        rest: Any
        keywords: Any = kwargs
        if plan.flat:
            rest = []
            for value in args:
                if isinstance(value, Tensor):
                    reads.append(tape.find(value, func))
                    rest.append(HOLE)
                else:
                    rest.append(value)
        else:
            rest = as_reads(args, tape, func, reads)
            keywords = as_reads(kwargs, tape, func, reads)
        if tape.factories:
            record.read_factories(plan, args, kwargs, reads)
        if plan.writes:
            record.before_write(plan, args, kwargs)
        if plan.draws:
            record.draw(plan, args, kwargs)
        if tape.trouble:
            return record.run_untaped(self, plan, args, kwargs)
        if plan.own_body:
            tape.guards[len(tape.plans)] = callers_autocast(func, args)
        out = run_op(plan, args, kwargs)
        record.finish(self, plan, args, kwargs, rest, reads, keywords, out)
        return out

    def _run_silently(self, plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.record.paused:
            self.record.reads_values = self.record.reads_values or plan.reads_value
            if plan.traits.is_infrastructure and func.namespace in _NO_REPLAY:
                self.tape.fail(f"{func.namespace} ops run inside the region")
            if self.rows is not None:
                self.rows.add(plan, None, False, args, kwargs, None)
        return plan.run(*args, **kwargs)


def generators_of(args: Any, kwargs: Any) -> list[torch.Generator]:
    """Return the generators that an op with these arguments may draw from: those passed, else the default ones."""
    passed = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    return passed or default_generators(args, kwargs)


def new_tensors(out: Any) -> list[Tensor]:
    """Return the tensors of an op's result, in order."""
    return [out] if isinstance(out, Tensor) else tensors_of(out)
