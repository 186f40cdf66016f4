"""The two dispatch modes of the rerun engine: one decides and holds in forward, one serves in recomputation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sac.errors import Problem, RegionError
from sac.ops.flops import flops_of
from sac.region.advice import OTHER_WRITE
from sac.region.detach import equal
from sac.region.handles import ToTheEnd
from sac.region.parking import Parked, fetch
from sac.region.states.rng_trackers import state_of, states_of
from sac.selective.bare_mode import RegionMode
from sac.selective.checksum import same, sums_of
from sac.selective.forward_state import ForwardState
from sac.selective.labels import Labels
from sac.selective.mismatch import agree, overwritten_problem, swapped_problem, unmatched_problem
from sac.selective.module_passes import SavingPass, ServingPass
from sac.selective.record import CallRecord, SavedValue, default_generators, written_tensors
from sac.selective.rows import Rows
from sac.selective.table import BoundRule, Plan, run_op
from sac.selective.tensors import map_tensors, storage_address, tensor_parts, tensors_of, written_parts
from sac.selective.weights import NOT_PARAMETERS, is_large
from sac.selective.whole_modules import SavedCall

if TYPE_CHECKING:
    from sac.selective.scope import ScopedForward

_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class Counting(Protocol):
    """What decisions hang on beside the call itself: how many calls there were before it."""

    calls: defaultdict[Plan, int]
    alternations: defaultdict[int, int]


class Settling(Protocol):
    """What the recomputation mode asks before each op: has everything been filled, and what then."""

    @property
    def done(self) -> bool:
        """Whether nothing more is wanted, once the op that comes next is known not to matter."""

    verify: Callable[[int, torch.Tensor], None] | None

    def settle(self, written: Sequence[torch.Tensor]) -> None:
        """An op that writes to ``written`` is about to run although ``done``."""

    def after_op(self) -> None:
        """An op has run."""


class ForwardMode(RegionMode):
    """Runs a region's forward: decides per op, and holds what is saved on the call's record."""

    def __init__(self, record: CallRecord, rows: Rows | None) -> None:
        super().__init__(record.table)
        self.record = record
        self.rows = rows
        self.hooks = 1  # how many of the innermost saved-tensor hooks are the region's

    def whole_modules(self) -> SavingPass | None:
        """Return what keeps them."""
        record = self.record
        if record.modules is None:
            return None
        return SavingPass(record.modules, lambda: record.packs, self, hooks=self.hooks)

    def __enter__(self) -> ForwardMode:
        super().__enter__()
        self.record.saw_grad = torch.is_grad_enabled()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        record = self.record
        if record.paused:
            return func(*args, **kwargs)
        if record.inside is not None:
            return self._run_inside(record.inside, func, args, kwargs)
        plan: Plan | None = self.plans.get(id(func))
        if plan is None:
            plan = record.table.plan(func, self.path)
        if plan.light:
            record.reads_values = record.reads_values or plan.reads_value
            record.labels.see(args)
            out = plan.run(*args, **kwargs)
            if plan.is_view and func is _LIFT_FRESH:
                record.labels.name_constant(out)
            if self.rows is not None:
                self.rows.add(plan, None, False, args, kwargs, out)
            return out
        signature, foreign, made_of = record.labels.signature(plan.key, args, kwargs)
        if plan.is_random:
            signature, made_of = record.labels.draw(plan.key, signature), NOT_PARAMETERS
        if plan.has_generator:
            _note_generators(record, args, kwargs)
        if plan.writes:
            record.before_write(plan, args, kwargs)
        if plan.counts or plan.candidates:
            out = self._run_decided(plan, signature, foreign, made_of, args, kwargs)
        else:
            record.note_reads(args)
            out = run_op(plan, args, kwargs) if plan.own_body else plan.run(*args, **kwargs)
            if plan.final is not None:
                record.hits[plan.final.index] += 1
            if self.rows is not None:
                self.rows.add(plan, plan.final, False, args, kwargs, out)
        if plan.writes:
            _relabel(record.labels, plan, signature, foreign, args, kwargs, made_of)
        record.labels.makers[signature] = plan
        record.labels.name_output(out, signature, foreign, made_of)
        record.after_op()
        return out

    def passed_generators(self) -> list[torch.Generator]:
        """See ``Watcher``."""
        return [generator for generator, _ in self.record.generators.values()]

    @contextmanager
    def watches(self, call: SavedCall) -> Iterator[None]:
        """See ``Watcher``."""
        self.record.inside = call
        try:
            yield
        finally:
            self.record.inside = None

    def returned(self, call: SavedCall, forward: ScopedForward, out: Any) -> None:
        """See ``Watcher``."""
        assert call.result is not None
        self.record.after_module((kept.held for _, kept in call.result.writes), call.result.where)
        labels, label = self.record.labels, hash(("module", *call.place))
        for position, kept in call.result.writes:
            for number, part in enumerate(tensor_parts(kept.held)):
                labels.name_output(part, hash((label, "written", position, number)), False)
        for number, kept in enumerate(call.result.kept):
            kept.places = labels.name_new(kept.held, hash((label, number)))
        if self.rows is not None:
            kept_bytes = sum({**call.inside, **call.result_sizes()}.values())
            self.rows.add_module(call.place, call.rule, forward.module, out, kept_bytes=kept_bytes, flops=call.flops)

    def _run_inside(self, call: SavedCall, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op of a saved module: see what it writes to, and count its FLOPs."""
        table, path = self.record.table, call.place[0]
        plan = table.scope(path).get(id(func)) or table.plan(func, path)
        if plan.light:  # torch asks nested tensors for their layout where an error would end the process
            return plan.run(*args, **kwargs)
        if plan.writes:
            self.record.before_write(plan, args, kwargs)
        out = run_op(plan, args, kwargs)
        call.flops += flops_of(plan.op, args, kwargs, out)
        return out

    def _run_decided(self, plan: Plan, signature: int, foreign: bool, made_of: int, args: Any, kwargs: Any) -> Any:
        """Run an op that may be saved, decide, and hold its result if so."""
        record = self.record
        before = []
        if plan.draws and plan.counts:
            before = states_of(_generators(args, kwargs))
        out = run_op(plan, args, kwargs)
        record.may_save = record.may_save or plan.counts
        call = record.calls[plan]
        twin = record.twins[signature]
        record.twins[signature] = twin + 1
        saves, rule = decide(record, plan, args, kwargs, out)
        if rule is not None:
            record.hits[rule.index] += 1
        moved = [(g, now) for g, state in before if not equal(now := state_of(g), state)] if saves else []
        if saves and (_aliases(args, kwargs, out) or (is_large(out, made_of) and not (plan.must_save or moved))):
            saves = False
        if saves:
            value = SavedValue(plan, call, rule, signature, twin, foreign)
            value.description = record.labels.describe(args, kwargs)
            value.rng_after = moved
            record.save(value, out)
        else:
            record.note_reads(args)
        if self.rows is not None:
            self.rows.add(plan, rule, saves, args, kwargs, out, call=call)
        return out


class RecomputeMode(RegionMode):
    """Runs a region again: serves held values in place of their ops, and stops when nothing more is needed."""

    def __init__(self, record: CallRecord, inputs: list[tuple[int, torch.Tensor]], filling: Settling) -> None:
        super().__init__(record.table)
        self.record = record
        self.inputs = inputs
        self.filling = filling

    def __enter__(self) -> RecomputeMode:
        self.plans = self.table.scope("")
        self.path = ""
        self.labels = Labels()
        for position, tensor in self.inputs:
            self.labels.name_input_again(tensor, self.record.places[position])
        self.inputs = []
        self.filling.verify = self.verify
        self._was_paused, self.record.paused = self.record.paused, not self.record.forward_over
        self.record.lenient = self.record.lenient or not self.record.forward_over
        self.live: list[tuple[Plan, Any]] = []  # calls that ran although a saved value of the same op waits
        self.record.look_for_overwritten()
        self.waiting = {(value.signature, value.twin): value for value in self.record.saved}
        # Now, above autograd and outside of this mode: an outer region runs again for them, whole.
        self._fetched: dict[int, torch.Tensor] = {}
        for value in self.record.saved:
            map_tensors(value.outputs, self._fetch)
        modules = self.record.modules
        self._results = modules.fetch_recomputed() if modules is not None else {}
        self.twins: defaultdict[int, int] = defaultdict(int)
        self.calls: defaultdict[Plan, int] = defaultdict(int)
        served = (g for value in self.record.saved for g, _ in value.rng_after)  # serving moves these
        self._forward_state = ForwardState(self.record.images, self.record.generators, served)
        self._forward_state.put_back()
        super().__enter__()
        return self

    def whole_modules(self) -> ServingPass | None:
        """Return what serves them."""
        modules = self.record.modules
        if modules is None:
            return None
        fetched, self._results = self._results, {}
        return ServingPass(modules, fetched, self, self.labels)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.filling.verify = None
        self.filling = ToTheEnd()  # it leads to the frame, and if this was an error the frame still leads here
        self.record.paused = self._was_paused
        self._forward_state.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plan: Plan | None = self.plans.get(id(func))
        if plan is None:
            plan = self.record.table.plan(func, self.path)
        filling = self.filling
        labels = self.labels
        if plan.light:
            labels.see(args)
            out = plan.run(*args, **kwargs)
            if plan.is_view and func is _LIFT_FRESH:
                labels.name_constant(out)
            return out
        if filling.done:
            filling.settle(written_tensors(plan, args, kwargs) if plan.writes else ())
        signature, foreign, _ = labels.signature(plan.key, args, kwargs)
        if plan.is_random:
            signature = labels.draw(plan.key, signature)
        value = None
        if plan.counts or plan.candidates:  # the calls that forward counted, and no others
            value = self._find(plan, signature, args, kwargs)
            if value is not None and not value.overwritten:
                filling.after_op()
                return self._serve(value)
        if plan.writes:
            self._check_write(plan, args, kwargs)
        out = run_op(plan, args, kwargs) if plan.own_body else plan.run(*args, **kwargs)
        if value is not None and value.must and not same(value.sums, sums_of(out)):
            raise RegionError(overwritten_problem(self.record.path, plan.op))
        if plan.writes:
            _relabel(labels, plan, signature, foreign, args, kwargs)
        labels.makers[signature] = plan
        labels.name_output(out, signature, foreign)
        filling.after_op()
        return out

    def _serve(self, value: SavedValue) -> Any:
        for generator, state in value.rng_after:
            generator.set_state(state)
        outputs = map_tensors(value.outputs, self._at_hand) if self._fetched else value.outputs
        out = map_tensors(outputs, _copied if value.written else _fresh)
        self.labels.name_output(out, value.signature, value.foreign)
        return out

    def _fetch(self, kept: torch.Tensor | Parked) -> None:
        if isinstance(kept, Parked) and kept.is_recomputed:
            self._fetched[id(kept)] = kept.fetch()

    def _at_hand(self, kept: torch.Tensor | Parked) -> torch.Tensor | Parked:
        return self._fetched.pop(id(kept), kept)

    def _find(self, plan: Plan, signature: int, args: Any, kwargs: Any) -> SavedValue | None:
        """Return the saved value of this call, if it has one, and take it off the waiting list."""
        call = self.calls[plan]
        twin = self.twins[signature]
        self.calls[plan] = call + 1
        self.twins[signature] = twin + 1
        value = self.waiting.pop((signature, twin), None)
        if value is None and signature not in self.record.twins:
            value = self._match_by_order(plan, call, args, kwargs)
            if value is not None:
                del self.waiting[value.signature, value.twin]
        return value

    def _match_by_order(self, plan: Plan, call: int, args: Any, kwargs: Any) -> SavedValue | None:
        """Return the waiting value of this call in order if its arguments may be the same, see Note [Labels]."""
        seen = self.labels.describe(args, kwargs)
        for value in self.record.saved:
            if value.plan is plan and value.call == call and (value.signature, value.twin) in self.waiting:
                if agree(value.description, seen, closely=self.record.saw_grad):
                    return value
                break
        self.live.append((plan, seen))
        return None

    def verify(self, place: int, tensor: torch.Tensor) -> None:
        """Raise if the ``place``-th tensor that autograd saves is known to be another value than in forward."""
        packed = self.record.packed
        if place < len(packed):
            label, foreign, maker = packed[place]
            if self.record.lenient or label is None:
                return
            seen = self.labels.of(tensor)
            tolerated = (foreign or seen in self.labels.foreign) and seen not in self.record.known
            if label != seen and not tolerated:
                raise RegionError(swapped_problem(self.record.path, place, tensor, maker, self.labels.makers.get(seen)))

    def _check_write(self, plan: Plan, args: Any, kwargs: Any) -> None:
        """Raise if the region now writes to a held value that it did not write to in forward."""
        held = self.record.held_addresses
        for part in _written_parts(plan, args, kwargs):
            if storage_address(part) in held:
                raise RegionError(
                    Problem(
                        where=self.record.path or "region",
                        found=f"{plan.op} writes to a saved value in recomputation, and did not in forward",
                        fix=OTHER_WRITE,
                    )
                )

    def check(self, reached: int) -> None:
        """Raise if a saved value found no call although a call of its op found no value.

        ``reached`` is the last of the tensors saved in forward that this run was to fill: what comes later was not run.
        """
        for value in self.record.saved:
            if (value.signature, value.twin) not in self.waiting or value.packs_before > reached:
                continue
            rivals = [(plan, seen) for plan, seen in self.live if plan is value.plan]
            if rivals or value.must or value.rng_after:
                raise RegionError(unmatched_problem(self.record.path, value, rivals))


def _copied(kept: torch.Tensor | Parked) -> torch.Tensor:
    return fetch(kept).clone()


def _fresh(kept: torch.Tensor | Parked) -> torch.Tensor:
    return fetch(kept).detach()


def decide(record: Counting, plan: Plan, args: Any, kwargs: Any, out: Any) -> tuple[bool, BoundRule | None]:
    """Return whether this call's result is saved, and the rule that matched; counts the call."""
    call = record.calls[plan]
    record.calls[plan] = call + 1
    saves, rule = plan.final_saves, plan.final
    for candidate in plan.candidates:
        if candidate.matches(call, args, kwargs, out):
            rule, saves = candidate.bound, candidate.saves
            if candidate.alternates:
                turn = record.alternations[rule.index]
                record.alternations[rule.index] = turn + 1
                saves = turn % 2 == 0
            break
    if not saves and plan.must_save:
        condition = plan.must_save_condition
        saves = condition is None or condition(args, kwargs, out)
    if saves and plan.savable_if is not None:
        saves = plan.savable_if(args, kwargs, out)
    return saves, rule


def _written_parts(plan: Plan, args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [part for tensor in written_tensors(plan, args, kwargs) for part in written_parts(tensor)]


def _relabel(
    labels: Labels, plan: Plan, signature: int, foreign: bool, args: Any, kwargs: Any, made_of: int = NOT_PARAMETERS
) -> None:
    for place, part in enumerate(_written_parts(plan, args, kwargs)):
        labels.name_output(part, hash((signature, "written", place)), foreign, made_of)


def _generators(args: Any, kwargs: Any) -> list[torch.Generator]:
    passed = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    return passed or default_generators(args, kwargs)


def _note_generators(record: CallRecord, args: Any, kwargs: Any) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            record.note_generator(value)


def _aliases(args: Any, kwargs: Any, out: Any) -> bool:
    """Whether an op gave back one of its arguments, or a view of it: such a result is never held."""
    inputs = {storage_address(part) for t in tensors_of([*args, *kwargs.values()]) for part in tensor_parts(t)}
    return any(storage_address(part) in inputs for t in tensors_of(out) for part in tensor_parts(t))
