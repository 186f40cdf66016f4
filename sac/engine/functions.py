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
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling

from sac.checksums import checksum, find_different
from sac.engine.flags import Autocast
from sac.engine.handles import Handle
from sac.engine.objects import copied, tensors_in
from sac.engine.rng import advanced, set_states, states_of
from sac.engine.serve import Served
from sac.engine.table import NO_RULE, decide, site_name
from sac.engine.tape import DiffersError, Tape, as_refs, cast_of, from_refs
from sac.engine.tracker import active_mode, without_mode
from sac.engine.verify import may_differ
from sac.engine.wrappers import is_in_flight
from sac.errors import Problem, RegionError
from sac.ops.facts import OpTraits
from sac.policy.model import Decision
from sac.tensors import copy_of, detached, is_wrapper, storage_address, storage_bytes
from sac.torch_private import (
    FUNCTION_CLASSES,
    UnseenByModes,
    apply_function,
    compiler_is_tracing,
    not_leaf_of,
    transform_is_active,
    tree_flatten,
    tree_unflatten,
)

_COMPILED = "CompiledFunction"  # the class of AOTAutograd's Functions (torch 2.1 to 2.13, whatever the backend)


def install() -> None:
    """Have each call of an autograd Function come by here."""
    if "apply" not in vars(FUNCTION_CLASSES[0]):
        _called.__name__ = "apply"  # Dynamo reads it
        for owner in FUNCTION_CLASSES:
            owner.apply = classmethod(_called)


def _called(cls: Any, *args: Any, **kwargs: Any) -> Any:
    mode, active = _recorder(), active_mode()
    if active is not None and cls.__name__ == _COMPILED:
        active.compiled_graphs += 1
    if mode is None and active is not None and active.spans is not None:
        first = len(active.tape.sites)
        out = apply_function(cls, *args, **kwargs)
        active.spans.append((range(first, len(active.tape.sites)), f"function {cls.__qualname__}", active.path))
        return out
    # Those of torch.distributed are only ops, and wrappers around their results.
    if mode is None or cls.__module__.startswith("torch.distributed.") or (kwargs and [*tensors_in(kwargs)]):
        return apply_function(cls, *args, **kwargs)
    call = functools.partial(apply_function, cls, **kwargs)
    return UnitCall(mode, _site(mode, cls), (mode.path, cls), call, args).run(call, args, {})


def _site(mode: Any, op: Any, unit: str = "") -> UnitSite:
    site: UnitSite | None = mode.sites.get(op)
    if site is None:
        names = {"unit": unit} if unit else {"function": f"{op.__module__}.{op.__qualname__}"}
        site = mode.sites[op] = UnitSite(op, mode.path, mode.table.rules_of_unit(mode.path, **names))
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
        site = _site(mode, label, self.name)
        inner = getattr(self.function, "func", self.function)  # of a `partial`
        key = mode.path, label, getattr(inner, "__code__", type(inner))
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [*{id(tensor): tensor for tensor in tensors_in(leaves)}.values()]
        holes = [object() for _ in tensors]
        template = copied(leaves, {id(tensor): hole for tensor, hole in zip(tensors, holes, strict=True)})

        def again(*tensors: Tensor) -> Any:
            leaves = copied(template, {id(hole): tensor for hole, tensor in zip(holes, tensors, strict=True)})
            args, kwargs = tree_unflatten(leaves, spec)
            return self.function(*args, **kwargs)

        return UnitCall(mode, site, key, again, tensors).run(self.function, args, kwargs)


@dataclass(slots=True)
class Facts:
    """What calls of a function in a module have shown.

    ``strict``: hidden writes to what its ops made. ``written``: positions, among its tensor arguments, of those that
    it writes to where no op is seen to. ``aliased``: positions of those in whose storage a result was. ``is_unit``: not
    all calls were explained. ``is_kept``: its results are always kept, since a replay gave other values, or a kernel
    writes to what the policy saves inside.
    """

    strict: bool = False
    written: set[int] = field(default_factory=set)
    aliased: set[int] = field(default_factory=set)
    is_unit: bool = False
    is_kept: bool = False


class UnitSite:
    """Stands for a call site in the tape. ``op``: the class of a Function, or the label of a named piece.

    ``name``: in messages; ``rule_name``: the same with the module of the class, as a rule names it.
    """

    is_ordinary = is_view = is_inplace_view = is_custom_op = is_collective = may_save = has_decision = writes = False
    must_save, savable_if, traits = False, None, OpTraits()
    final_decision, final_rule = Decision.RECOMPUTE, None

    def __init__(self, op: Any, path: str, rules: Any) -> None:
        self.op, self.path, self.conditional_rules = op, path, rules
        self.is_named = isinstance(op, str)
        self.name = op if self.is_named else f"function {op.__qualname__}"
        module = "" if self.is_named or op.__module__ == "__main__" else f"{op.__module__}."
        self.rule_name = op if self.is_named else f"function {module}{op.__qualname__}"


@dataclass(slots=True)
class Unit:
    """How to repeat a call: ``call``, with the arguments of the entry.

    ``results``: per result whether it is returned, and its number among these. ``needs``: argument -> whether it
    requires grad. ``inside``: the entries of its ops, of which the values ``served`` are kept.
    ``then``, if the first replay compares: values that the call made or wrote to, with metadata and checksum.
    ``given``: arguments, with checksum. ``spare``: results that are used if those of ``then`` differ.
    """

    call: Any
    results: list[tuple[bool, int]]
    needs: dict[int, bool]
    grad: bool
    autocast: Autocast
    facts: Facts
    inside: range
    served: set[int]
    then: Sequence[tuple[int, Any, Any]] = ()
    given: Sequence[tuple[int, Any]] = ()
    spare: Sequence[tuple[int, Any]] = ()


class UnitCall:
    """One call of an autograd Function or of a named piece under the recorder. ``key``: of its facts.

    While it runs: what its ops have left in each storage, ``sums``, if it ``examines`` them. ``strict``: nothing that
    was made inside is explained. ``opaque``: roots of unknown origin. ``saved``: weak references to the handles, since
    graphs made and used inside are gone at the end. ``hidden``: addresses of storages that a kernel has written to.
    """

    def __init__(self, mode: Any, site: Any, key: Any, call: Any, args: Any) -> None:
        self.mode, self.site, self.key, self.call, self.args = mode, site, key, call, args
        self.tape: Tape = mode.tape
        self.reads: list[int] = []
        self.arguments: list[Tensor] = []
        self.needs: dict[int, bool] = {}
        self.template = as_refs(args, self._find, self.reads)
        known: Facts | None = mode.facts.get(key)
        self.examines = mode.probes and (known is None or mode.verifies)
        self.facts = known or Facts(strict=not mode.probes)
        self.first, self.strict = len(self.tape.sites), site.is_named or self.facts.strict
        self.opaque: set[int] = set()
        self.hidden: set[int] = set()
        self.saved: list[weakref.ref[Handle]] = []
        self.copies: dict[int, Any] = {}  # root -> an argument, its contents before the call
        # Where all calls were explained, and no rule decides, none are taken; the first that is not keeps its results.
        self.states = states_of(mode.generators) if known is None or known.is_unit or site.conditional_rules else None

    def _find(self, tensor: Tensor) -> int:
        """Return the value of an argument, and note the argument."""
        value = self.tape.find(tensor)
        self.needs[value] = tensor.requires_grad
        self.arguments.append(tensor)
        return value

    def look(self, tensors: Iterable[Tensor]) -> None:
        """Notice storages that have changed since an op left them."""
        for tensor in tensors:
            address = storage_address(tensor)
            then = self.sums.get(address)
            if then is not None and address not in self.hidden and find_different([(then, _sum(tensor))]):
                self.hidden.add(address)

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note what an op has left; nothing if a kernel or a collective is still to fill the memory."""
        for tensor in tensors:
            address, value = storage_address(tensor), self.tape.known(tensor)
            if address not in self.sums:
                self.hidden.discard(address)
            is_fresh = value is not None and (value in self.tape.fresh or self.tape.is_in_flight(value))
            self.sums[address] = None if is_fresh else _sum(tensor)

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``function``, the call itself; add a unit if there are results that the ops inside do not explain."""
        mode, tape, rules = self.mode, self.tape, self.site.conditional_rules
        if self.examines:
            self._examine_arguments()
        elif self.facts.written:
            for root in self._roots_at(self.facts.written):
                tape.will_write(root)
        self.first_value, self.first_row = len(tape.roots), len(mode.op_trace.rows) if mode.op_trace else 0
        tape.scope, outer = self, mode.sites
        first = rules[0].resolved if rules else None
        if first is not None and first.rule.matches_each_call and not first.saves:  # it decides on the ops inside, too
            mode.unit_rule, mode.sites = first, mode.table.sites_of(mode.path, first)
        try:
            out = function(*args, **kwargs)
            if not self._is_explained(out):
                self._end(out)
        finally:
            tape.scope = None
            mode.unit_rule, mode.sites = None, outer
        mode.facts[self.key] = self.facts
        return out

    def _roots_at(self, positions: set[int]) -> set[int]:
        return {self.tape.roots[value] for position, value in enumerate(self.reads) if position in positions}

    def _positions_of(self, roots: set[int]) -> set[int]:
        return {position for position, value in enumerate(self.reads) if self.tape.roots[value] in roots}

    def _examine_arguments(self) -> None:
        """Note what is in the arguments, and copy those from outside to which the call might write."""
        tape, self.sums = self.tape, dict[int, Any]()
        self.pairs = [*zip(self.reads, self.arguments, strict=True)]
        for value, tensor in self.pairs:
            root = tape.roots[value]
            is_outside = tape.makers[root] < 0 and not tape.leaves[root].is_parameter
            is_plain = not is_wrapper(tensor) and tensor.layout is torch.strided
            if is_outside and is_plain and root not in tape.before and root not in self.copies:
                self.copies[root] = detached(tensor), copy_of(tensor.untyped_storage())
            if not (tensor.is_leaf and tensor.requires_grad):
                self.note([tensor])
        self.sums_before = {**self.sums}

    def _is_explained(self, out: Any) -> bool:
        """Return whether it is plain that ops explain all, and nothing else is to be decided; decide on what it saved.

        These are most calls of a Function that only runs ops, at a fraction of the time of ``_end``.
        """
        tape, mode, facts = self.tape, self.mode, self.facts
        is_other = self.examines or self.strict or facts.written or facts.is_kept or self.opaque or tape.fresh
        is_other = is_other or self.site.conditional_rules or mode.op_trace is not None
        keeps = tape.kept and next(reversed(tape.kept)) >= self.first_value
        if is_other or keeps or not all(site.is_ordinary for site in tape.sites[self.first :]):
            return False
        if None in map(tape.known, tensors_in(out)):
            return False
        for reference in self.saved:
            if (handle := reference()) is not None:
                mode.decide_on(handle, handle.value)
        return True

    def _end(self, out: Any) -> None:
        """Decide what is explained; add the unit."""
        tape, mode = self.tape, self.mode
        roots, makers = tape.roots, tape.makers
        self.results = []  # whether returned and which of these, tensor, value
        for number, tensor in enumerate(tensors_in(out)):
            value = tape.known(tensor)
            self.results.append(((True, number), tensor, mode.same_as(tensor) if value is None else value))
        self.handles = []
        for number, reference in enumerate(self.saved):
            if (handle := reference()) is not None:
                self.handles.append(handle)
                self.results.append(((False, number), handle.value, handle.position[0]))
        entries = range(self.first, len(tape.sites)) if tape.writers else ()
        writing = [entry for entry in entries if tape.sites[entry].writes]
        op_written = {root for entry in writing for root in tape.writes_of(entry) if makers[root] < self.first}
        written = self._written(op_written)
        self.sends = bool(tape.collectives) and tape.collectives[-1] >= self.first
        self.decision, rule = self.site.final_decision, None
        if self.site.conditional_rules:
            self.decision, rule = decide(mode, self.site, self.args, {}, out)
            self.strict = self.strict or self.decision.keeps
        given = {roots[value] for _, _, value in self.results}
        bad = _unexplained(tape, self)
        wanted = bad & given
        is_unit = bool(wanted or written or (self.opaque and op_written))
        if is_unit and (op_written or written or self.sends) and not self.strict:  # it must write or communicate once
            self.strict = True
            bad = _unexplained(tape, self)
            wanted = bad & given
        # Under `verify: never` most Functions are units, whose ops a rerun on another rank would send again.
        is_new, self.facts.is_unit = self.states is None, self.facts.is_unit or is_unit
        if is_unit and rule is None:
            is_kept = is_new or self.facts.is_kept or (self.sends and mode.probes)
            self.decision = Decision.SAVE if is_kept else mode.table.default
        inner = {value for value in range(self.first_value, len(roots)) if value in tape.kept}
        last = len(roots)
        if is_unit:
            inner -= self._add_unit(inner, wanted, written | op_written, NO_RULE if rule is None else rule.index)
            last = tape.firsts[-1]
            if mode.op_trace is not None:
                returned = [tensor for (is_returned, _), tensor, _ in self.results if is_returned]
                mode.op_trace.add_unit(self.site, rule, self.decision, self.arguments, returned, self.first_row)
        tape.fresh = {root for root in tape.fresh if root < self.first_value}
        for value in range(self.first_value, last):  # tensors that live on and that nothing can give again
            living = tape.refs[value]() if roots[value] in bad else None
            if living is not None and tape.known(living) == value:
                is_part = tape.parts.get(id(living), (None, 0))[1] >= last  # to be taken out of a result of the unit
                if is_part or cast_of(living) is not None:  # or to be cast again: autocast keeps it
                    del tape.ids[id(living)]
                else:
                    tape.fresh.add(roots[value])
        for handle in self.handles:
            mode.decide_on(handle, handle.value)
        if inner:
            self._drop_kept(inner, {value for _, _, value in self.results if roots[value] not in wanted})

    def _drop_kept(self, inner: set[int], needed: set[int]) -> None:
        """Drop those of the kept values ``inner`` from which no value of ``needed`` is made again."""
        tape = self.tape
        for entry in reversed(range(self.first, len(tape.sites))):
            writes = tape.writes_of(entry) if tape.writers else ()
            makes = any(value in needed and value not in tape.kept for value in tape.results(entry))
            if makes or (writes and any(tape.roots[value] in writes for value in needed)):
                needed.update(tape.reads[entry])
        for value in inner - needed:
            del tape.kept[value]
            tape.kept_roots.discard(tape.roots[value])

    def _written(self, op_written: set[int]) -> set[int]:
        """Return the roots of the arguments that were written to where no op is seen to."""
        tape, facts = self.tape, self.facts
        read = {tape.roots[value] for value in self.reads}
        written = read & tape.fresh  # what was uninitialised memory: the call fills it
        if not (self.examines or facts.strict or facts.written or written):
            return written
        aliased = read.intersection(tape.roots[value] for (is_returned, _), _, value in self.results if is_returned)
        if self.examines:  # look once more at results and arguments
            self.look([tensor for _, tensor, _ in self.results])
            for value, tensor in self.pairs:
                if tape.roots[value] not in op_written:  # nor by ops on an alias that the tape does not know
                    self.sums[storage_address(tensor)] = self.sums_before.get(storage_address(tensor))
            self.look(self.arguments)
            hidden = {tape.roots[value] for value, tensor in self.pairs if storage_address(tensor) in self.hidden}
            facts.aliased |= self._positions_of(aliased)
            facts.written |= self._positions_of(hidden)
            facts.strict = facts.strict or bool(self.hidden)
            self.strict = self.strict or bool(self.hidden)
        written |= self._roots_at(facts.written)
        if facts.strict:  # a kernel writes to memory: each new alias is written to
            written |= aliased - self._roots_at(facts.aliased)
        for root in written:
            if root in self.copies:
                tape.before[root], tape.is_careful = self.copies[root], True
            elif tape.makers[root] < 0 and root not in tape.before and root not in tape.writers:
                reason = f"{self.site.name} writes to a tensor from outside where no op is seen to"
                tape.why_not = tape.why_not or reason
        return written

    def _add_unit(self, inner: set[int], wanted: set[int], written: set[int], rule: int) -> set[int]:
        """Append the unit; return the values in ``inner`` that are served when it runs again."""
        tape, roots, first, unit = self.tape, self.tape.roots, self.first, len(self.tape.sites)
        tape.append(self.site, self.template, [*self.reads, *self._read_inside(unit)], {})
        if self.sends:
            tape.collectives = [*(entry for entry in tape.collectives if entry < first), unit]
        served, saves = self._what_to_keep(inner, wanted)
        if not self.decision.keeps:
            rule = tape.rule_of[min(inner)] if inner else NO_RULE
        new_values: dict[int, int] = {}
        new_roots: dict[int, int] = {}
        described = []
        for which, tensor, value in self.results:
            root = roots[value]
            if root not in wanted or value in new_values:
                continue
            new = new_values[value] = tape.add_value(tensor, new_roots.get(root, -1), unit)
            new_roots.setdefault(root, new)
            described.append(which)
            if saves or (served and root in tape.kept_roots):
                tape.kept[new] = detached(tensor)
                tape.kept_roots.add(roots[new])
                tape.rule_of[new] = rule
        if len(described) != 1:
            tape.counts[unit] = len(described)
        for handle in self.handles:  # of what the call has written to, autograd saves what it has left there
            value = handle.position[0]
            if value in new_values or roots[value] in written:
                handle.position = new_values.get(value, value), unit + 1
        for root in written:  # by the unit, in place of its ops
            tape.writers[root] = [entry for entry in tape.writers.get(root, ()) if entry < first]
            tape.wrote(root, unit)
        if moved := advanced(self.states or []):
            tape.states[unit] = moved
        now, inside = self.mode.autocast.now(), range(first, unit)
        new_unit = Unit(self.call, described, self.needs, torch.is_grad_enabled(), now, self.facts, inside, served)
        tape.units[unit] = new_unit
        if self.examines and not self.sends:
            made = [(new_values[value], tensor) for _, tensor, value in self.results if value in new_values]
            made += [pair for pair in self.pairs if roots[pair[0]] in written]
            read = (pair for pair in self.pairs if tape.makers[roots[pair[0]]] >= 0 and roots[pair[0]] not in written)
            new_unit.given = [(value, checksum(tensor)) for value, tensor in read if not is_in_flight(tensor)]
            made = [(value, one) for value, one in made if value not in tape.kept and not is_in_flight(one)]
            new_unit.then = [(value, (one.shape, one.dtype), checksum(one)) for value, one in made]
            if self.mode.keeps_units:
                new_unit.spare = [(value, detached(one)) for value, one in made if tape.makers[value] == unit]
        return served

    def _read_inside(self, unit: int) -> list[int]:
        """Return the values from outside that ops of the call read and that are no arguments."""
        tape = self.tape
        read = {value for reads in tape.reads[self.first : unit] for value in reads}.difference(self.reads)
        read = {value for value in read if value < self.first_value or value in tape.leaves}
        for value in read if self.site.is_named else ():  # it would hold the graph that leads to its region
            maker = tape.makers[tape.roots[value]]
            if maker < 0 or tape.roots[value] in {tape.roots[argument] for argument in self.reads}:
                continue
            is_cast = tape.sites[maker].op is torch.ops.aten._to_copy.default and tape.reads[maker][0] in tape.leaves
            if not is_cast:  # by autocast, of a parameter
                name, op = self.site.name, site_name(tape.sites[maker])
                found = f"{name} reads a tensor that is not among its arguments and that {op} has computed"
                raise RegionError(Problem(tape.where, found, fix="pass it to the unit as an argument"))
        return sorted(read)

    def _what_to_keep(self, inner: set[int], wanted: set[int]) -> tuple[set[int], bool]:
        """Decide how to keep from running the ops again that the policy saves.

        Their results are kept, and served when the function runs again; or the function's own results are kept. Return
        what is served, and whether the latter is cheaper in bytes, or a rule saves the unit.
        """
        tape, facts = self.tape, self.facts
        facts.is_kept = facts.is_kept or any(storage_address(tape.kept[value]) in self.hidden for value in inner)
        if self.decision.keeps or facts.is_kept or not inner:
            return set(), self.decision.keeps or facts.is_kept
        served = {value for value in inner if tape.roots[value] not in tape.writers}
        sizes = {tape.roots[value]: storage_bytes(tape.kept[value]) for value in served}
        own = {tape.roots[value]: storage_bytes(tensor) for _, tensor, value in self.results}
        is_cheaper = sum(own[root] for root in wanted) <= sum(sizes.values())
        return (set(), True) if not served or is_cheaper else (served, False)


def _sum(tensor: Tensor) -> Any:
    if is_wrapper(tensor) or tensor.layout is not torch.strided:
        return ()
    with UnseenByModes():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return checksum(flat.set_(tensor.untyped_storage()))


def _unexplained(tape: Tape, call: UnitCall) -> set[int]:
    """Return the roots, of those made inside, whose contents the entries do not give again."""
    roots, makers, bad = tape.roots, tape.makers, {*call.opaque}
    fresh: set[int] = set()
    for entry, site in enumerate(tape.sites[call.first :], call.first):
        writes = tape.writes_of(entry) if tape.writers else []
        is_bad = call.strict and not site.is_view
        if not (is_bad or site.is_view or site.traits.is_factory):
            read = {roots[value] for value in tape.reads[entry]}
            is_bad = bool(read & bad or (read & fresh).difference(writes))
        if writes:
            fresh.difference_update(writes)
        if is_bad:
            bad.update(value for value in tape.results(entry) if roots[value] == value)
            bad.update(root for root in writes if makers[root] >= call.first)
        elif site.traits.is_uninitialised:
            fresh.update(tape.results(entry))  # of which all are roots
    return bad | fresh


# -- Replay


def run_unit(tape: Tape, entry: int, values: dict[int, Any]) -> None:
    """Call a unit again and take its results; its graph is dropped at once."""
    unit: Unit = tape.units[entry]
    again: dict[tuple[bool, int], Tensor] = {}
    numbers = count()

    def pack(tensor: Tensor) -> Tensor:
        held, which = detached(tensor), (False, next(numbers))  # an output would hold itself
        if which in unit.results:
            again[which] = held
        return held

    hooks = saved_tensors_hooks(pack, lambda held: held)
    with without_mode(), torch.set_grad_enabled(unit.grad), hooks, ExitStack() as stack:
        unit.autocast.enter_on(stack)
        set_states(tape.states.get(entry) or [])
        arguments = from_refs(tape.args[entry], _arguments(tape, unit, values))
        if unit.served:
            stack.enter_context(Served(tape, unit.inside, tape.sites[entry].path))
        results = tensors_in(unit.call(*arguments))
        again.update(((True, number), detached(result)) for number, result in enumerate(results))
    for value, which in zip(tape.results(entry), unit.results, strict=True):
        if which not in again:
            raise DiffersError(f"{tape.sites[entry].name} returns or saves fewer tensors than in forward")
        values[value] = again[which]


def differs(tape: Tape, entry: int, values: dict[int, Any], unneeded: set[int]) -> bool:
    """Return whether a unit has given other values than in the forward; use those of the forward if they are there."""
    unit: Unit = tape.units[entry]
    if not unit.then:
        return False
    compared = [one for one in unit.then if one[0] not in unneeded]
    again = [values[value] for value, _, _ in compared]
    pairs = [(one[2], checksum(tensor)) for one, tensor in zip(compared, again, strict=True)]
    others = any(one[1] != (tensor.shape, tensor.dtype) for one, tensor in zip(compared, again, strict=True))
    is_other = (others or bool(find_different(pairs))) and not may_differ(tape, tape.reads[entry], again[0].device)
    if is_other and find_different([(then, checksum(values[value])) for value, then in unit.given]):
        raise DiffersError(f"an argument of {tape.sites[entry].name} is replayed with other values than in forward")
    for value, tensor in unit.spare if is_other else ():
        if tape.last_write(value) < 0:
            values[value] = tensor
    return is_other


def _arguments(tape: Tape, unit: Unit, values: dict[int, Any]) -> dict[int, Any]:
    """Return the tensor arguments of a unit, which require grad as those of the forward."""
    arguments = {}
    for value, requires_grad in unit.needs.items():
        argument, leaf = values[value], tape.leaves.get(value)
        if leaf is None or not leaf.is_parameter or argument.requires_grad is not requires_grad:
            argument = argument.detach().requires_grad_(requires_grad)
            if requires_grad and not is_wrapper(argument):
                argument = not_leaf_of(argument)  # the call may write to it
        arguments[value] = argument
    return arguments
