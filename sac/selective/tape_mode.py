"""The dispatch mode under which a region's forward runs when it is to be replayed: it decides, and writes the tape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sac.region.detach import equal
from sac.selective import scope
from sac.selective.autocast import callers_autocast
from sac.selective.bare_mode import BareMode
from sac.selective.modes import decide
from sac.selective.record import default_generators
from sac.selective.rows import Rows
from sac.selective.table import Plan, run_op
from sac.selective.tape import HOLE, as_reads
from sac.selective.tensors import tensors_of

if TYPE_CHECKING:
    from sac.selective.replay import ReplayRecorder

_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_NO_REPLAY = frozenset({"fsdp", "streams"})  # what they do hangs on more than tensors


class TapeMode(BareMode):
    """Runs a region's forward: decides per op, holds what is saved, and writes down how to make the rest again."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function inside the region may be used under this mode."""
        return True

    def __init__(self, recorder: ReplayRecorder, rows: Rows | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = recorder
        self.tape = recorder.tape
        self.rows = rows
        self.plans = recorder.table.scope("")
        self.path = ""

    def __enter__(self) -> TapeMode:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._outer = scope.enter(self)
        return self

    def __exit__(self, *error: Any) -> None:
        scope.leave(self._outer)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plan: Plan | None = self.plans.get(func)
        record, tape = self.record, self.tape
        if plan is None:
            plan = record.table.plan(func, self.path)
        if plan.is_silent or record.paused:
            if self.rows is not None and not record.paused:
                self.rows.add(plan, None, False, args, kwargs or {}, None)
            if plan.traits.is_infrastructure and func.namespace in _NO_REPLAY:
                tape.fail(f"{func.namespace} ops run inside the region")
            return plan.run(*args, **kwargs) if kwargs else plan.run(*args)
        if tape.trouble:
            return record.run_untaped(self, plan, args, kwargs or {})

        # What it reads.
        rest: Any
        keywords: Any = kwargs
        if plan.flat:
            ids, versions = tape.ids, tape.versions
            reads, rest = [], []
            for value in args:
                kind = type(value)
                if kind is Tensor or kind is Parameter or isinstance(value, Tensor):
                    found = ids.get(id(value))
                    if found is None or found[0]() is not value:
                        number = tape.meet(value, func)
                    else:
                        number = found[1]
                        if value._version != versions[number]:
                            number = tape.look_at_version(value, number)
                    reads.append(number)
                    rest.append(HOLE)
                else:
                    rest.append(value)
        else:
            reads = []
            rest = as_reads(args, tape, func, reads)
            keywords = as_reads(kwargs, tape, func, reads) if kwargs else kwargs
        kwargs = kwargs or {}
        if tape.factories:
            record.read_factories(plan, args, kwargs, reads, rest)
        if plan.writes:
            record.before_write(plan, args, kwargs)

        # The op itself.
        if plan.draws:
            before = record.draw(plan, args, kwargs)
        if plan.own_body:
            tape.guards[len(tape.entries)] = callers_autocast(func, args)
            out = run_op(plan, args, kwargs)
        elif kwargs:
            out = plan.run(*args, **kwargs)
        else:
            out = plan.run(*args)

        # What it makes.
        entry = len(tape.entries)
        first = len(tape.roots)
        if type(out) is Tensor and not (plan.writes or plan.is_view):
            tape.add(out)
            count = 1
        else:
            count = record.add_results(plan, out)
        tape.entries.append((plan, rest, tuple(reads), keywords, first, count))
        saves, rule = False, plan.final
        if plan.counts or plan.candidates:
            call = record.calls[plan]
            saves, rule = decide(record, plan, args, kwargs, out)
            if saves:
                saves = record.save(plan, rule, first, count, out, reads)
            record.may_save = record.may_save or plan.counts
        else:
            call = None
        if rule is not None:
            record.hits[rule.index] += 1
        if plan.draws:
            record.after_draw(plan, entry, before, saves)
        if plan.traits.is_factory and count:
            tape.factories[first] = entry
        elif func is _LIFT_FRESH and count:
            record.keep(first, out)
        if record.recent:
            record.look_at_recent(entry)
        if self.rows is not None:
            self.rows.add(plan, rule, saves, args, kwargs, out, call=call)
        return out


def generators_of(args: Any, kwargs: Any) -> list[torch.Generator]:
    """Return the generators that an op with these arguments may draw from: those passed, else the default ones."""
    passed = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    return passed or default_generators(args, kwargs)


def moved(states: list[tuple[torch.Generator, Tensor]]) -> bool:
    """Whether one of the generators has moved since its state was taken."""
    return any(not equal(generator.get_state(), state) for generator, state in states)


def new_tensors(out: Any) -> list[Tensor]:
    """Return the tensors of an op's result, in order."""
    return [out] if isinstance(out, Tensor) else tensors_of(out)
