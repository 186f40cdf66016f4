"""Units: calls of Python autograd Functions, and of pieces named by ``sac.unit``, as entries of the tape.

The ops that run inside of a call are entries as always. At the end of a Function's call each tensor that it returned or
saved is *explained* (the ops that were seen give it again) or not; all that are not become results of one more entry,
the *unit*, whose replay is another call. A call of which everything is explained has no unit: rules for ops apply
inside. Of a named piece nothing counts as explained.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling

from sac.checksums import checksum, find_different
from sac.engine.flags import Autocast
from sac.engine.handles import Handle
from sac.engine.objects import NotLeaf, copied, is_own_object, tensors_in
from sac.engine.rng import advanced, default_generators, set_states, states_of
from sac.engine.table import NO_RULE, site_name
from sac.engine.tape import DiffersError, Tape, as_refs, cast_of, from_refs
from sac.engine.tracker import active_mode, without_mode
from sac.engine.verify import may_differ
from sac.engine.wrappers import is_in_flight
from sac.errors import Problem, RegionError
from sac.ops.facts import OpTraits
from sac.outer_hooks import fetch
from sac.policy.model import Decision
from sac.tensors import copy_of, detached, is_wrapper, storage_address, tensors_of
from sac.torch_private import (
    SingleLevelFunction,
    TorchDispatchMode,
    UnseenByModes,
    apply_function,
    compiler_is_tracing,
    transform_is_active,
    tree_flatten,
    tree_unflatten,
)

_COMPILED = "CompiledFunction"  # the class of AOTAutograd's Functions (torch 2.1 to 2.13, whatever the backend)


def install() -> None:
    """Have ``Function.apply``, which ends in ``super().apply``, come by here.

    The class itself stays as it is, since Dynamo tests what its ``apply`` is.
    """
    if "apply" not in vars(SingleLevelFunction):
        SingleLevelFunction.apply = classmethod(_called)


def _called(cls: Any, *args: Any) -> Any:
    mode, call, name = _recorder(), functools.partial(apply_function, cls), f"function {cls.__qualname__}"
    active = active_mode()
    if active is not None and cls.__name__ == _COMPILED:
        active.compiled_graphs += 1
    if mode is None and active is not None and active.spans is not None:
        first = len(active.tape.sites)
        out = call(*args)
        active.spans.append((range(first, len(active.tape.sites)), name, active.path))
        return out
    if mode is None or cls.__module__.startswith("torch.distributed."):  # only ops, and wrappers around their results
        return call(*args)
    site = _site(mode, cls, name, function=f"{cls.__module__}.{cls.__qualname__}")
    return UnitCall(mode, site, (mode.path, cls), call, args).run(lambda: call(*args))


def _site(mode: Any, op: Any, name: str, **names: str) -> UnitSite:
    site: UnitSite | None = mode.sites.get(op)
    if site is None:
        rules = mode.table.rules_of_unit(mode.path, **names)
        site = mode.sites[op] = UnitSite(op, name, mode.path, rules)
    return site


def _recorder() -> Any:
    """Return the mode that records calls of units now, if there is one; of nested units the outer one counts."""
    mode = active_mode()
    if mode is None or not mode.takes_functions or mode.paused or mode.tape.scope is not None:
        return None
    if transform_is_active() or compiler_is_tracing():  # the compiler runs fake tensors, for a graph that runs later
        return None
    return mode


def unit(name: str, function: Callable[..., Any] | None = None) -> Any:
    """Return ``function`` as one unit of a policy, which a rule names as ``unit: name``; without it, a decorator.

    Inside a region, a call of it is saved, recomputed or offloaded as a whole: its results, and what autograd saves in
    it. A recomputation calls it again, so it has to repeat itself. Arguments and results are any structures of tensors.
    Tensors that the region has computed must be arguments, or ``RegionError`` is raised. Outside of regions, without
    gradients and under ``torch.compile`` it is ``function`` itself. Of nested units, the outer one counts.
    """
    if not (isinstance(name, str) and name):
        raise TypeError(f'sac.unit takes a name and a function, as in sac.unit("rope", rotate), not {name!r} first')
    if function is None:
        return functools.partial(unit, name)
    if not callable(function):
        raise TypeError(f"sac.unit({name!r}, ...) takes a callable, not {function!r}")
    return NamedUnit(name, function)


class NamedUnit:
    """A function that is called as a unit; see ``unit``."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.name, self.function = name, function

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        """Bind a decorated method."""
        return self if owner is None else functools.partial(self, owner)

    def __reduce__(self) -> Any:
        function = self.function
        where: Any = sys.modules.get(getattr(function, "__module__", ""))
        for part in getattr(function, "__qualname__", "<none>").split("."):
            where = getattr(where, part, None)
        return function.__qualname__ if where is self else (NamedUnit, (self.name, function))  # decorated, or not

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if is_dynamo_compiling() or not torch.is_grad_enabled() or (mode := _recorder()) is None:
            return self.function(*args, **kwargs)
        label = f"unit {self.name}"
        site = _site(mode, label, label, unit=self.name)
        inner = self.function
        while isinstance(inner, functools.partial):
            inner = inner.func
        key = mode.path, label, getattr(inner, "__code__", type(inner))
        leaves, spec = _flattened(args, kwargs)
        again = functools.partial(_call_again, self.function, spec)
        return UnitCall(mode, site, key, again, leaves).run(lambda: self.function(*args, **kwargs))


def _flattened(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Return the leaves of arguments, with the tensors in objects at their end; an object becomes a copy with holes."""
    leaves, spec = tree_flatten((args, kwargs))
    count, objects = len(leaves), {}
    for index in range(count):
        if is_own_object(leaves[index]):
            tensors = list({id(tensor): tensor for tensor in tensors_in(leaves[index])}.values())
            holes = [_Hole() for _ in tensors]
            objects[index] = holes
            leaves[index] = copied(leaves[index], {id(one): hole for one, hole in zip(tensors, holes, strict=True)})
            leaves += tensors
    return leaves, (spec, count, objects)


class _Hole:
    """Stands for a tensor in the copy of an object."""


def _call_again(function: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
    """Call a named piece with the arguments that ``_flattened`` has returned as ``leaves``."""
    spec, count, objects = spec
    arguments, tensors = [*leaves[:count]], iter(leaves[count:])
    for index, holes in objects.items():
        arguments[index] = copied(arguments[index], {id(hole): next(tensors) for hole in holes})
    args, kwargs = tree_unflatten(arguments, spec)
    return function(*args, **kwargs)


@dataclass(slots=True)
class Facts:
    """What calls of a function in a module have shown.

    ``strict``: hidden writes to what its ops made. ``written``: positions, among its tensor arguments, of those that
    it writes to where no op is seen to. ``aliased``: positions of those in whose storage a result was. ``unservable``:
    entries, counted from its first, whose results a kernel wrote to. ``unsteady``: a replay gave other values, so it is
    saved.
    """

    strict: bool = False
    written: set[int] = field(default_factory=set)
    unservable: set[int] = field(default_factory=set)
    unsteady: bool = False
    aliased: set[int] = field(default_factory=set)


class UnitSite:
    """Stands for a call site in the tape. ``op``: the class of a Function, or the label of a named piece.

    ``name``: in messages; ``rule_name``: the same with the module of the class, as a rule names it.
    """

    is_flat = is_view = is_inplace_view = is_custom_op = is_collective = may_save = has_decision = writes = False
    must_save, savable_if, traits = False, None, OpTraits()
    final_decision, final_rule = Decision.RECOMPUTE, None

    def __init__(self, op: Any, name: str, path: str, rules: Any) -> None:
        self.op, self.name, self.path, self.conditional_rules = op, name, path, rules
        self.is_named = isinstance(op, str)
        module = "" if self.is_named or op.__module__ == "__main__" else f"{op.__module__}."
        self.rule_name = op if self.is_named else f"function {module}{op.__qualname__}"


@dataclass(slots=True)
class Unit:
    """How to repeat a call: ``call``, with the arguments of the entry.

    ``results``: per result whether it is returned, and its number among these. ``needs``: argument -> (whether it
    requires grad, whether it is a parameter). ``dirty``: arguments that the function returned. ``key``: of its facts.
    ``served``: (op, n-th call of it) -> the entry whose results are kept. ``then``, if the first replay compares:
    values that the call made or wrote to, with metadata and checksum. ``spare``: results that are used if these differ.
    """

    name: str
    call: Any
    results: list[tuple[bool, int]]
    needs: dict[int, tuple[bool, bool]]
    dirty: set[int]
    grad: bool
    autocast: Autocast
    key: Any
    served: dict[tuple[int, int], int] = field(default_factory=dict)
    then: list[tuple[int, Any, Any]] = field(default_factory=list)
    spare: dict[int, Any] = field(default_factory=dict)


class Scope:
    """A call that is running: what its ops have left in each storage, if that is examined (``sums``).

    ``strict``: why nothing that was made inside is explained. ``opaque``: roots of unknown origin. ``saved``: weak
    references to the handles, since graphs made and used inside are gone at the end. ``hidden``: addresses of storages
    that a kernel has written to. ``bad``: roots made inside that entries do not give again.
    """

    def __init__(self, first: int, sums: dict[int, Any] | None) -> None:
        self.first, self.sums = first, sums
        self.strict = ""
        self.opaque: set[int] = set()
        self.saved: list[weakref.ref[Handle]] = []
        self.hidden: set[int] = set()
        self.bad: set[int] = set()

    def look(self, tensors: Iterable[Tensor]) -> None:
        """Notice storages that have changed since an op left them."""
        assert self.sums is not None
        for tensor in tensors:
            address = storage_address(tensor)
            then = self.sums.get(address)
            if then is not None and address not in self.hidden and find_different([(then, _sum(tensor))]):
                self.hidden.add(address)

    def note(self, tensors: Iterable[Tensor], *, is_fresh: bool = False) -> None:
        """Note what an op has left; nothing if its memory is uninitialised, since then a kernel is expected."""
        assert self.sums is not None
        for tensor in tensors:
            address = storage_address(tensor)
            if address not in self.sums:
                self.hidden.discard(address)
            self.sums[address] = None if is_fresh else _sum(tensor)


@dataclass(slots=True)
class _Result:
    """A tensor that a call returned (``is_returned``) or saved; ``number``: among those."""

    is_returned: bool
    number: int
    tensor: Tensor
    value: int


class UnitCall:
    """One call of an autograd Function or of a named piece under the recorder. ``key``: of its facts."""

    def __init__(self, mode: Any, site: Any, key: Any, call: Any, args: Any) -> None:
        self.mode, self.site, self.key, self.call, self.args = mode, site, key, call, args
        self.tape: Tape = mode.tape
        tape = self.tape
        self.reads: list[int] = []
        self.template = as_refs(args, tape.find, self.reads)
        self.arguments = tensors_of(args)
        self.facts: Facts | None = mode.facts.get(self.key)
        self.copies: dict[int, Any] = {}  # root -> an argument, its contents before the call

    def run(self, function: Callable[[], Any]) -> Any:
        """Run ``function``, the call itself; add a unit if there are results that the ops inside do not explain."""
        mode, tape = self.mode, self.tape
        examines = mode.probes and (self.facts is None or mode.verifies)
        self.scope = scope = Scope(len(tape.sites), {} if examines else None)
        if examines:
            self._examine_arguments()
        elif self.facts is not None:
            for position in self.facts.written:
                if position < len(self.reads):
                    tape.will_write(self.reads[position])
        if self.site.is_named:
            scope.strict = "named"
        elif self.facts is None and not examines:
            scope.strict = "not examined"
        elif self.facts is not None and self.facts.strict:
            scope.strict = "a kernel writes to what an op made"
        self.grad, self.autocast = torch.is_grad_enabled(), Autocast(self.arguments)
        self.states = states_of(default_generators())
        self.first_value, self.first_row = len(tape.roots), len(mode.op_trace.rows) if mode.op_trace else 0
        self.needs = {
            value: (tensor.requires_grad, value in tape.leaves and tape.leaves[value].is_parameter)
            for value, tensor in zip(self.reads, self.arguments, strict=True)
        }
        tape.scope = scope
        outer = mode.sites
        first = self.site.conditional_rules[0].resolved if self.site.conditional_rules else None
        if first is not None and first.rule.matches_each_call and not first.saves:  # it decides on the ops inside, too
            mode.unit_rule, mode.sites = first, mode.table.sites_of(mode.path, first)
        try:
            out = function()
            mode.unit_rule, mode.sites = None, outer
            self._end(out)
        finally:
            tape.scope = None
            mode.unit_rule, mode.sites = None, outer
        if examines and self.facts is None:
            mode.facts.setdefault(self.key, Facts())
        return out

    def _examine_arguments(self) -> None:
        """Note what is in the arguments, and copy those from outside to which the call might write."""
        tape = self.tape
        for value, tensor in zip(self.reads, self.arguments, strict=True):
            root = tape.roots[value]
            is_outside = tape.makers[root] < 0 and not tape.leaves[root].is_parameter
            is_plain = not is_wrapper(tensor) and tensor.layout is torch.strided
            if is_outside and is_plain and root not in tape.before and root not in self.copies:
                self.copies[root] = detached(tensor), copy_of(tensor.untyped_storage())
            if not (tensor.is_leaf and tensor.requires_grad):
                self.scope.note([tensor], is_fresh=root in tape.fresh or tape.is_in_flight(root))

    def _end(self, out: Any) -> None:
        """Decide what is explained; add the unit."""
        tape, scope, mode = self.tape, self.scope, self.mode
        roots, makers = tape.roots, tape.makers
        self.handles = {number: handle for number, reference in enumerate(scope.saved) if (handle := reference())}
        self.results = self._results(out)
        self.positions = {roots[value]: position for position, value in reversed([*enumerate(self.reads)])}
        returned = (roots[one.value] for one in self.results if one.is_returned)
        self.aliased = {self.positions[root] for root in returned if root in self.positions}
        self.written = self._written()
        writing = (entry for entry in range(scope.first, len(tape.sites)) if tape.sites[entry].writes)
        op_written = {root for entry in writing for root in tape.writes_of(entry) if makers[root] < scope.first}
        self.op_written = op_written - scope.opaque
        self.decision, self.rule, rule = Decision.RECOMPUTE, NO_RULE, None
        if self.site.conditional_rules:
            self.decision, rule = mode.decide_on_unit(self.site, self.args, out)
            if rule is not None:
                self.rule = rule.index
            if self.decision.keeps:
                scope.strict = scope.strict or "a rule saves it"
        self.wanted = _unexplained(tape, scope, self.results)
        is_unit = bool(self.wanted or self.written or (scope.opaque and self.op_written))
        if is_unit and (self.op_written or self.written or self._sends()) and not scope.strict:
            scope.strict = "writes to arguments, or communicates"  # and must do so once
            self.wanted = _unexplained(tape, scope, self.results)
        # Under `verify: never` most Functions are units, whose ops a rerun on another rank would send again.
        if is_unit and rule is None and self._sends() and mode.probes:
            self.decision = Decision.SAVE
        elif is_unit and rule is None:
            self.decision = mode.table.default
        inner = [value for value in range(self.first_value, len(roots)) if value in tape.kept]
        last = len(roots)
        if is_unit:
            last, served = self._add_unit(inner)
            inner = [value for value in inner if makers[value] not in served]
            if mode.op_trace is not None:
                out = [one.tensor for one in self.results if one.is_returned]
                mode.op_trace.add_unit(self.site, rule, self.decision, self.arguments, out, self.first_row)
        tape.fresh.difference_update([root for root in tape.fresh if root >= self.first_value])
        for value in range(self.first_value, last):  # tensors that live on and that nothing can give again
            tensor = tape.refs[value]()
            if tensor is not None and roots[value] in scope.bad and tape.known(tensor) == value:
                is_part = tape.parts.get(id(tensor), (None, 0))[1] >= last  # to be taken out of a result of the unit
                if is_part or cast_of(tensor) is not None:  # or to be cast again: autocast keeps it
                    del tape.ids[id(tensor)]
                else:
                    tape.fresh.add(roots[value])
        for handle in self.handles.values():
            mode.decide_on(handle, handle.value)
        if inner:
            explained = [one.value for one in self.results if roots[one.value] not in self.wanted]
            _drop_kept(tape, inner, explained, scope.first)

    def _results(self, out: Any) -> list[_Result]:
        results = []
        for number, tensor in enumerate(tensors_in(out)):
            value = self.tape.known(tensor)
            results.append(_Result(True, number, tensor, self.mode.same_as(tensor) if value is None else value))
        return results + [_Result(False, number, one.value, one.position[0]) for number, one in self.handles.items()]

    def _written(self) -> set[int]:
        """Return the positions of the arguments that were written to where no op is seen to."""
        tape, facts = self.tape, self.facts
        written: set[int] = set()
        if self.scope.sums is not None:
            written = self._examined()
        elif facts is not None:
            written = {position for position in facts.written if position < len(self.reads)}
            if facts.strict:
                written |= self.aliased - facts.aliased
        else:
            written = set(self.aliased)
        # An argument that was uninitialised memory: the call fills it
        written |= {position for position, value in enumerate(self.reads) if tape.roots[value] in tape.fresh}
        for position in written:
            root = tape.roots[self.reads[position]]
            if tape.makers[root] < 0 and root not in tape.before and root not in tape.writers:
                reason = f"{self.site.name} writes to a tensor from outside where no op is seen to"
                tape.why_not = tape.why_not or reason
        return written

    def _examined(self) -> set[int]:
        """Look once more at results and arguments; note the facts, and return what was written to."""
        tape, scope = self.tape, self.scope
        scope.look(one.tensor for one in self.results)
        scope.look(self.arguments)
        at = {storage_address(tensor): position for position, tensor in reversed([*enumerate(self.arguments)])}
        written = {at[address] for address in scope.hidden if address in at}
        facts = self.mode.facts.setdefault(self.key, Facts())
        facts.aliased |= self.aliased
        facts.written |= written
        facts.strict = facts.strict or bool(scope.hidden)
        if scope.hidden:
            scope.strict = scope.strict or "hidden writes"
        fresh = {place for place, value in enumerate(self.reads) if tape.roots[value] in tape.fresh}
        for position in written | fresh:
            root = tape.roots[self.reads[position]]
            if root in self.copies:
                tape.before[root], tape.is_careful = self.copies[root], True
        return written

    def _add_unit(self, inner: list[int]) -> tuple[int, set[int]]:
        """Append the unit; return its first value, and the inner entries that are served when it runs again."""
        tape, roots = self.tape, self.tape.roots
        unit = len(tape.sites)
        tape.append(self.site, self.template, [*self.reads, *self._read_inside(unit)], {})
        tape.unit_of.update((entry, unit) for entry in tape.collectives if entry >= self.scope.first)
        served, saves = self._what_to_keep(unit, inner)
        rule = self.rule if self.decision.keeps else tape.rule_of[inner[0]] if inner else NO_RULE
        new_values: dict[int, int] = {}
        new_roots: dict[int, int] = {}
        described = []
        for result in self.results:
            root = roots[result.value]
            handle = None if result.is_returned else self.handles[result.number]
            if root not in self.wanted:
                if handle is not None and self._is_saved_after_a_write(root, handle):
                    handle.position = result.value, unit + 1
                continue
            if result.value not in new_values:
                new = new_values[result.value] = tape.add_value(result.tensor, new_roots.get(root, -1), unit)
                new_roots.setdefault(root, new)
                described.append((result.is_returned, result.number))
                if saves or (served and root in tape.kept_roots):
                    tape.kept[new] = detached(result.tensor)
                    tape.kept_roots.add(roots[new])
                    tape.rule_of[new] = rule
            if handle is not None:
                handle.position = new_values[result.value], unit + 1
        if len(described) != 1:
            tape.counts[unit] = len(described)
        self._move_writes(unit)
        if moved := advanced(self.states):
            tape.states[unit] = moved
        returned = [one.tensor for one in self.results if one.is_returned] if self.aliased else []
        dirty = {
            value
            for value, tensor in zip(self.reads, self.arguments, strict=True)
            if roots[value] in self.op_written or any(tensor is other for other in returned)
        }
        tape.units[unit] = Unit(
            self.site.name, self.call, described, self.needs, dirty, self.grad, self.autocast, self.key, served
        )
        if (self.mode.verifies or (self.facts is None and self.mode.probes)) and not self._sends():
            made = [(new_values[one.value], one.tensor) for one in self.results if one.value in new_values]
            made += [(self.reads[position], self.arguments[position]) for position in self.written]
            for value, tensor in made:
                if value not in tape.kept and not is_in_flight(tensor):
                    tape.units[unit].then.append((value, (tensor.shape, tensor.dtype), checksum(tensor)))
                    if self.mode.keeps_units and tape.makers[value] == unit:
                        tape.units[unit].spare[value] = detached(tensor)
        return tape.firsts[unit], set(served.values())

    def _is_saved_after_a_write(self, root: int, handle: Handle) -> bool:
        """Return whether autograd saved an argument with what the call has written to it."""
        if self.positions.get(root) in self.written:
            return True
        writers = self.tape.writers[root] if root in self.op_written else ()
        return any(self.scope.first <= entry < handle.position[1] for entry in writers)

    def _sends(self) -> bool:
        """Return whether the call communicates with other ranks."""
        return bool(self.tape.collectives) and self.tape.collectives[-1] >= self.scope.first

    def _read_inside(self, unit: int) -> list[int]:
        """Return the values from outside that ops of the call read and that are no arguments."""
        tape, first, first_value = self.tape, self.scope.first, self.first_value
        read = {value for entry in range(first, unit) for value in tape.reads[entry]}
        outside = {
            value
            for value in read
            if (value < first_value and tape.makers[tape.roots[value]] < first)
            or (value in tape.leaves and value >= first_value)
        }
        others = sorted(value for value in outside.difference(self.reads) if tape.roots[value] not in self.scope.opaque)
        arguments = {tape.roots[value] for value in self.reads}
        for value in others if self.site.is_named else ():  # it would hold the graph that leads to its region
            root, maker = tape.roots[value], tape.makers[tape.roots[value]]
            if maker < 0 or root in arguments:
                continue
            is_cast = tape.sites[maker].op is torch.ops.aten._to_copy.default and tape.reads[maker][0] in tape.leaves
            if not is_cast:  # by autocast, of a parameter
                name, op = self.site.name, site_name(tape.sites[maker])
                found = f"{name} reads a tensor that is not among its arguments and that {op} has computed"
                raise RegionError(Problem(self.mode.where, found, fix="pass it to the unit as an argument"))
        return others

    def _what_to_keep(self, unit: int, inner: list[int]) -> tuple[dict[tuple[int, int], int], bool]:
        """Decide how to keep from running the ops again that the policy saves.

        Their results are kept, and served when the function runs again; or the function's own results are kept. Return
        what is served, and whether the latter is cheaper in bytes, or a rule saves the unit.
        """
        tape, scope = self.tape, self.scope
        facts: Facts | None = self.mode.facts.get(self.key)
        if scope.sums is not None and facts is not None:
            hidden = (value for value in inner if storage_address(tape.kept[value]) in scope.hidden)
            facts.unservable |= {tape.makers[value] - scope.first for value in hidden}
        if self.decision.keeps or (facts is not None and facts.unsteady):
            return {}, True
        if not inner:
            return {}, False
        unservable = facts.unservable if facts is not None else set()
        calls: dict[int, int] = {}
        served: dict[tuple[int, int], int] = {}
        cost, kept = 0, set(inner)
        for entry in range(scope.first, unit):
            op = id(tape.sites[entry].op)
            number = calls[op] = calls.get(op, -1) + 1
            values = tape.results(entry)
            is_kept = all(value in kept and tape.roots[value] not in tape.writers for value in values)
            if values and is_kept and entry - scope.first not in unservable:
                served[op, number] = entry
                plain = [tape.kept[value] for value in values if type(tape.kept[value]) is Tensor]
                cost += sum(tensor.untyped_storage().nbytes() for tensor in plain)
        results = [(tape.roots[one.value], one.tensor) for one in self.results if not is_wrapper(one.tensor)]
        own = {root: tensor.untyped_storage().nbytes() for root, tensor in results if root in self.wanted}
        return ({}, True) if not served or sum(own.values()) <= cost else (served, False)

    def _move_writes(self, unit: int) -> None:
        """Make the unit the writer of what the call has written to, in place of its ops."""
        tape = self.tape
        for root in self.op_written:
            tape.writers[root] = [entry for entry in tape.writers[root] if entry < self.scope.first]
            position = self.positions.get(root)
            tape.wrote(self.reads[position] if position is not None else root, unit)
        for position in self.written:
            tape.wrote(self.reads[position], unit)


def _sum(tensor: Tensor) -> Any:
    if is_wrapper(tensor) or tensor.layout is not torch.strided:
        return ()
    with UnseenByModes():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return checksum(flat.set_(tensor.untyped_storage()))


def _unexplained(tape: Tape, scope: Scope, results: list[_Result]) -> set[int]:
    """Return the roots, of those made inside, of which the entries do not give the results again."""
    roots, makers, bad = tape.roots, tape.makers, set(scope.opaque)
    fresh: set[int] = set()
    for entry in range(scope.first, len(tape.sites)):
        site = tape.sites[entry]
        new = [roots[value] for value in tape.results(entry) if roots[value] == value]
        writes = tape.writes_of(entry)
        is_bad = bool(scope.strict) and not site.is_view
        if not (is_bad or site.is_view or site.traits.is_factory):
            read = {roots[value] for value in tape.reads[entry]}
            is_bad = bool(read & bad or (read & fresh).difference(writes))
        fresh.difference_update(writes)
        if is_bad:
            bad.update(new)
            bad.update(root for root in writes if makers[root] >= scope.first)
        elif site.traits.is_uninitialised:
            fresh.update(new)
    scope.bad = bad | fresh
    return {roots[one.value] for one in results} & scope.bad


def _drop_kept(tape: Tape, inner: list[int], waiting: list[int], first: int) -> None:
    """Drop kept values inside of a call that no explained result needs."""
    needed: set[int] = set()
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if value in seen or tape.makers[value] < first:
            continue
        seen.add(value)
        if value in tape.kept:
            needed.add(value)
            continue
        for entry in (tape.makers[value], *tape.writers.get(tape.roots[value], ())):
            if first <= entry < len(tape.reads):
                waiting += tape.reads[entry]
    for value in inner:
        if value not in needed:
            del tape.kept[value]
            tape.kept_roots.discard(tape.roots[value])


# -- Replay


class _Serving(TorchDispatchMode):
    """Serves results of ops inside of a function that runs again."""

    supports_higher_order_operators = True  # compiled flex attention whose backend runs the graph's ops

    def __init__(self, tape: Tape, unit: Unit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape, self.served = tape, unit.served
        self.calls: dict[int, int] = {}
        self.ops = {op for op, _ in unit.served}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function inside may be used under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, or return what it returned in forward."""
        op = id(func)
        if op in self.ops:
            number = self.calls[op] = self.calls.get(op, -1) + 1
            entry = self.served.get((op, number))
            if entry is not None:
                tape = self.tape
                set_states(tape.after.get(entry, []))
                results = [detached(fetch(tape.kept[value])) for value in tape.results(entry)]
                return tape.as_returned(entry, results)
        return func(*args, **(kwargs or {}))


def run_unit(tape: Tape, entry: int, values: dict[int, Any]) -> None:
    """Call a unit again and take its results; its graph is dropped at once."""
    unit: Unit = tape.units[entry]
    wanted = {number for is_returned, number in unit.results if not is_returned}
    saved: dict[int, Tensor] = {}
    count = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal count
        held = detached(tensor)  # an output would hold itself
        if count in wanted:
            saved[count] = held
        count += 1
        return held

    with ExitStack() as stack:
        stack.enter_context(without_mode())
        unit.autocast.enter_on(stack)
        set_states(tape.states.get(entry, []))
        stack.enter_context(torch.set_grad_enabled(unit.grad))
        stack.enter_context(saved_tensors_hooks(pack, lambda held: held))
        arguments = from_refs(tape.args[entry], _arguments(unit, values))
        stack.enter_context(_Serving(tape, unit) if unit.served else nullcontext())
        returned = dict(enumerate(tensors_in(unit.call(*arguments))))
    for value, (is_returned, number) in zip(tape.results(entry), unit.results, strict=True):
        results = returned if is_returned else saved
        if number not in results:
            raise DiffersError(f"{unit.name} returns or saves fewer tensors than in forward")
        values[value] = detached(results[number])


def differs(tape: Tape, entry: int, values: dict[int, Any], unneeded: set[int]) -> bool:
    """Return whether a unit has given other values than in the forward; use those of the forward if they are there."""
    unit: Unit = tape.units[entry]
    compared = [one for one in unit.then if one[0] not in unneeded]
    again = [values[value] for value, _, _ in compared]
    pairs = [(one[2], checksum(tensor)) for one, tensor in zip(compared, again, strict=True)]
    others = any(one[1] != (tensor.shape, tensor.dtype) for one, tensor in zip(compared, again, strict=True))
    is_other = (others or bool(find_different(pairs))) and not may_differ(tape, tape.reads[entry], again[0].device)
    for value, tensor in unit.spare.items() if is_other else ():
        if not tape.is_written(value):
            values[value] = tensor
    return is_other


def _arguments(unit: Unit, values: dict[int, Any]) -> dict[int, Any]:
    """Return the tensor arguments of a unit, which require grad as those of the forward."""
    arguments = {}
    for value, (requires_grad, is_parameter) in unit.needs.items():
        argument = values[value]
        if not is_parameter or argument.requires_grad is not requires_grad:
            argument = argument.detach().requires_grad_(requires_grad)
            if requires_grad and value in unit.dirty:
                argument = apply_function(NotLeaf, argument)
        arguments[value] = argument
    return arguments
