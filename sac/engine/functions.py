"""Calls of Python autograd functions as entries of the tape, so that replay repeats kernels that the dispatcher does not see.

The ops that run inside of a call are entries as always. At its end each tensor that it returned or saved is *explained* (the
ops that were seen give it again) or not; all that are not become results of one more entry, the *unit*, whose replay is
another ``apply``. A call of which everything is explained has no unit: rules for ops apply inside. See NOTE_functions.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sac.checksums import checksum, find_different
from sac.engine.tape import Tape, as_refs, from_refs
from sac.engine.tracker import _ACTIVE
from sac.policy.model import Decision
from sac.tensors import copy_of, detached, equal, is_wrapper, placed_on, storage_address, tensors_of
from sac.torch_private import TorchDispatchMode, UnseenByModes, tree_leaves

_Single = torch.autograd.function._SingleLevelFunction
_apply = torch._C._FunctionBase.__dict__["apply"]  # passes `cls` on: `_apply(cls, *args)`
_in_functorch = torch._C._are_functorch_transforms_active


def install() -> None:
    """Have ``Function.apply``, which ends in ``super().apply``, come by here; the class and Dynamo's tests stay as they are."""
    if "apply" not in vars(_Single):
        _Single.apply = classmethod(_called)


def _called(cls: Any, *args: Any) -> Any:
    mode = _ACTIVE.mode
    if mode is None or not mode.takes_functions or mode.paused or mode.tape.scope is not None or _in_functorch():
        return _apply(cls, *args)
    return _record(mode, cls, args)


@dataclass(slots=True)
class Facts:
    """What calls of a function in a module have shown: hidden writes to what its ops made (``strict``), to arguments
    (``written``: places among its tensors), and arguments in whose storage a result was (``aliased``)."""

    strict: bool = False
    written: set[int] = field(default_factory=set)
    unservable: set[int] = field(default_factory=set)  # entries, counted from its first, whose results a kernel wrote to
    unsteady: bool = False  # a replay gave other values: it is saved
    aliased: set[int] = field(default_factory=set)


class FunctionSite:
    """Stands for a call site in the tape. ``rule``: the policy's rule that names the function."""

    is_flat = is_view = is_inplace_view = is_custom_op = is_collective = may_save = has_decision = writes = False

    def __init__(self, cls: Any, path: str, table: Any) -> None:
        self.op, self.path = cls, path
        self.rule = None
        self.is_compiled = cls.__name__ == "CompiledFunction" and hasattr(cls, "compiled_fw")


@dataclass(slots=True)
class Unit:
    """How to repeat a call. ``results``: per result whether it is returned, and its number among these; ``needs``: argument
    -> (whether it requires grad, whether it is a parameter); ``dirty``: arguments that the function returned."""

    cls: Any
    results: list[tuple[bool, int]]
    needs: dict[int, tuple[bool, bool]]
    dirty: Any
    grad: bool
    autocast: Any
    key: Any = None  # of its facts
    served: dict[tuple[int, int], int] = field(default_factory=dict)  # (op, n-th call of it) -> entry whose results are kept


class Scope:
    """A call that is running: what its ops have left in each storage, if that is examined (``sums``)."""

    def __init__(self, first: int, sums: dict[int, Any] | None) -> None:
        self.first, self.sums = first, sums
        self.strict = ""  # why nothing that was made inside is explained
        self.opaque: set[int] = set()  # roots of unknown origin
        self.saved: list[Any] = []  # weak references to the handles: graphs made and used inside are gone at the end
        self.hidden: set[int] = set()  # addresses of storages that a kernel has written to

    def look(self, tensors: Any) -> None:
        """Notice storages that have changed since an op left them."""
        for one in tensors:
            address = storage_address(one)
            then = self.sums.get(address)
            if then is not None and address not in self.hidden and find_different([(then, _sum(one))]):
                self.hidden.add(address)

    def note(self, tensors: Any, *, is_fresh: bool = False) -> None:
        """Note what an op has left; nothing if its memory is uninitialised, since then a kernel is expected."""
        for one in tensors:
            address = storage_address(one)
            self.hidden.discard(address) if address not in self.sums else None
            self.sums[address] = None if is_fresh else _sum(one)


def _sum(tensor: Tensor) -> Any:
    if is_wrapper(tensor) or tensor.layout is not torch.strided:
        return ()
    guard = UnseenByModes()
    try:
        return checksum(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()))
    finally:
        del guard


def _states() -> list[Any]:
    from sac.engine.recorder import default_generators

    guard = UnseenByModes()
    try:
        return [(one, one.get_state()) for one in default_generators()]
    finally:
        del guard


def _autocast() -> Any:
    from sac.engine.state import _autocast_states

    return _autocast_states()


def _record(mode: Any, cls: Any, args: Any) -> Any:
    tape: Tape = mode.tape
    site = mode.sites.get(id(cls))
    if site is None or site.op is not cls:
        site = mode.sites[id(cls)] = FunctionSite(cls, mode.path, mode.table)
    reads: list[int] = []
    template = as_refs(args, tape.find, reads)
    facts, key = mode.facts.get((mode.path, cls)), (mode.path, cls)
    probes = mode.probes and (facts is None or mode.verifies) and not site.is_compiled
    arguments = tensors_of(args)
    copies: dict[int, Any] = {}
    scope = Scope(len(tape.sites), {} if probes else None)
    if probes:
        for value, one in zip(reads, arguments):
            root = tape.roots[value]
            if tape.makers[root] < 0 and not tape.leaves[root].is_parameter and root not in tape.before and root not in copies:
                if not is_wrapper(one) and one.layout is torch.strided:
                    copies[root] = detached(one), _copied(one)
            if not (one.is_leaf and one.requires_grad):
                scope.note([one], is_fresh=root in tape.fresh)
    elif facts is not None:
        for place in facts.written:
            if place < len(reads):
                tape.will_write(reads[place])
    if site.rule is not None or site.is_compiled:
        scope.strict = "named"
    elif facts is None and not probes:
        scope.strict = "not examined"
    elif facts is not None and facts.strict:
        scope.strict = "a kernel writes to what an op made"
    grad, autocast, states, value = torch.is_grad_enabled(), _autocast(), _states(), len(tape.roots)
    needs = {v: (one.requires_grad, v in tape.leaves and tape.leaves[v].is_parameter) for v, one in zip(reads, arguments)}
    tape.scope = scope
    try:
        out = _apply(cls, *args)
        _end(mode, site, scope, args, arguments, template, reads, out, value, facts, copies, (needs, grad, autocast), states)
    finally:
        tape.scope = None
    if probes and facts is None:
        mode.facts.setdefault(key, Facts())
    return out


def _copied(tensor: Tensor) -> Any:
    guard = UnseenByModes()
    try:
        return copy_of(tensor.untyped_storage())
    finally:
        del guard


def _returned(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [one for one in tree_leaves(out) if isinstance(one, Tensor)]


def _end(
    mode: Any, site: Any, scope: Scope, args: Any, arguments: list[Tensor], template: Any, reads: list[int], out: Any,
    first_value: int, facts: Facts | None, copies: dict[int, Any], call: Any, states: Any,
) -> None:
    tape, first, roots, makers = mode.tape, scope.first, mode.tape.roots, mode.tape.makers
    results = []  # (is returned, number, tensor, value)
    for number, one in enumerate(_returned(out)):
        value = tape.known(one)
        results.append((True, number, one, mode._same_as(one) if value is None else value))
    handles = {number: handle for number, reference in enumerate(scope.saved) if (handle := reference()) is not None}
    results += [(False, number, handle.value, handle.place[0]) for number, handle in handles.items()]
    places = {roots[value]: place for place, value in reversed([*enumerate(reads)])}
    aliased = {places[roots[value]] for returned, _, _, value in results if returned and roots[value] in places}

    # What has been written to where no op is seen to
    written: set[int] = set()
    if scope.sums is not None:
        scope.look(one for _, _, one, _ in results)
        scope.look(arguments)
        at = {storage_address(one): place for place, one in reversed([*enumerate(arguments)])}
        written = {at[address] for address in scope.hidden if address in at}
        found = mode.facts.setdefault((mode.path, site.op), Facts())
        found.aliased |= aliased
        found.written |= written
        found.strict = found.strict or bool(scope.hidden)
        if scope.hidden:
            scope.strict = scope.strict or "hidden writes"
        for place in (*written, *(place for place in range(len(reads)) if roots[reads[place]] in tape.fresh and roots[reads[place]] in places)):
            root = roots[reads[place]]
            if root in copies:
                tape.before[root], tape.is_careful = copies[root], True
    elif facts is not None:
        written = {place for place in facts.written if place < len(reads)}
        written |= aliased - facts.aliased if facts.strict else set()
    elif not site.is_compiled:
        written = aliased
    # An argument that was uninitialised memory: the call fills it
    written |= {place for place, value in enumerate(reads) if roots[value] in tape.fresh}
    for place in written:
        root = roots[reads[place]]
        if makers[root] < 0 and root not in tape.before and root not in tape.writers:
            tape.why_not = tape.why_not or f"{site.op.__name__} writes to a tensor from outside where no op is seen to"

    inside = range(first, len(tape.sites))
    made_by_ops = {root for entry in inside if tape.sites[entry].writes for root in tape.writes_of(entry) if makers[root] < first and root not in scope.opaque}
    wanted = _unexplained(tape, scope, results)
    is_unit = bool(wanted or written)
    if is_unit and (made_by_ops or written) and not scope.strict:
        scope.strict = "writes to arguments"
        wanted = _unexplained(tape, scope, results)
    inner = [value for value in range(first_value, len(roots)) if value in tape.kept]
    if is_unit:
        unit = len(tape.sites)
        extra = {value for entry in range(first, unit) for value in tape.reads[entry] if makers[roots[value]] < first and roots[value] not in scope.opaque and value < first_value or value in tape.leaves and value >= first_value}
        needs, grad, autocast = call
        tape.append(site, template, [*reads, *sorted(extra.difference(reads))], {})
        mapped, new_root, described = dict[int, int](), dict[int, int](), []
        served: dict[tuple[int, int], int] = {}
        facts = mode.facts.get((mode.path, site.op))
        if scope.sums is not None:
            facts.unservable |= {tape.makers[v] - first for v in inner if storage_address(tape.kept[v]) in scope.hidden}
        if site.rule is not None:
            saves = site.rule.saves
        elif facts is not None and facts.unsteady:
            saves = True
        else:
            served, saves = _cheaper(tape, inner, first, unit, facts, [(one, roots[v]) for _, _, one, v in results if roots[v] in wanted])
        index = site.rule.index if site.rule is not None else (tape.rule_of[inner[0]] if inner else -1)
        if site.rule is not None:
            mode.hits[index] = mode.hits.get(index, 0) + 1
        for returned, number, one, value in results:
            root = roots[value]
            if root not in wanted:
                if not returned and roots[value] in places and places[roots[value]] in written:
                    handles[number].place = value, unit + 1
                continue
            if value not in mapped:
                mapped[value] = new = tape.add_value(one, new_root.get(root, -1), unit)
                new_root.setdefault(root, new)
                described.append((returned, number))
                if saves or (served and root in tape.kept_roots):
                    tape.kept[new] = detached(one)
                    tape.kept_roots.add(roots[new])
                    tape.rule_of[new] = index
            if not returned:
                handle = handles[number]
                handle.place = mapped[value], unit + 1
        if len(described) != 1:
            tape.counts[unit] = len(described)
        for root in made_by_ops:
            tape.writers[root] = [entry for entry in tape.writers[root] if entry < first]
            place = places.get(root)
            tape.wrote(reads[place] if place is not None else root, unit)
        for place in written:
            tape.wrote(reads[place], unit)
        if moved := [one for one in states if not equal(one[0].get_state(), one[1])]:
            tape.states[unit] = moved
        dirty = {reads[place] for place, one in enumerate(arguments) if any(returned and one is other for returned, _, other, _ in results)} if aliased else ()
        tape.units[unit] = Unit(site.op, described, needs, dirty, grad, autocast, (mode.path, site.op), served)
        last = tape.firsts[unit]
        inner = [v for v in inner if tape.makers[v] not in served.values()]
    else:
        last = len(roots)
    tape.fresh.difference_update([root for root in tape.fresh if root >= first_value])
    for value in range(first_value, last):  # tensors that live on and that nothing can give again
        one = tape.refs[value]()
        if one is not None and (roots[value] in scope.bad) and tape.ids.get(id(one), (None, -1))[1] == value:
            tape.fresh.add(roots[value])
    for number, handle in handles.items():
        mode.decide_on(handle, handle.value)
    if inner:
        _drop_kept(tape, inner, [value for _, _, _, value in results if roots[value] not in wanted], first)


def _unexplained(tape: Tape, scope: Scope, results: Any) -> set[int]:
    """Return the roots, of those made inside, of which the entries do not give the results again."""
    roots, makers, bad, fresh = tape.roots, tape.makers, set(scope.opaque), set[int]()
    for entry in range(scope.first, len(tape.sites)):
        site = tape.sites[entry]
        made = [roots[value] for value in tape.results(entry) if roots[value] == value]
        writes = tape.writes_of(entry)
        is_bad = bool(scope.strict) and not site.is_view
        if not (is_bad or site.is_view or site.traits.is_factory):
            is_bad = any(roots[value] in bad or (roots[value] in fresh and roots[value] not in writes) for value in tape.reads[entry])
        fresh.difference_update(writes)
        if is_bad:
            bad.update(made)
            bad.update(root for root in writes if makers[root] >= scope.first)
        elif site.traits.is_uninitialised:
            fresh.update(made)
    bad |= fresh
    scope.bad = bad
    return {roots[value] for _, _, _, value in results if roots[value] in bad}


def _cheaper(tape: Tape, inner: list[int], first: int, unit: int, facts: Any, results: Any) -> tuple[dict[tuple[int, int], int], bool]:
    """Decide how to keep from running the ops again that the policy saves: keep their results and serve them when the
    function runs again, or keep the function's own results. Return what is served, and whether the latter is cheaper."""
    if not inner:
        return {}, False
    calls: dict[int, int] = {}
    served, cost, kept = dict[tuple[int, int], int](), 0, set(inner)
    for entry in range(first, unit):
        op = id(tape.sites[entry].op)
        number = calls[op] = calls.get(op, -1) + 1
        values = tape.results(entry)
        if values and all(v in kept and tape.roots[v] not in tape.writers for v in values):
            if facts is None or entry - first not in facts.unservable:
                served[op, number] = entry
                cost += sum(tape.kept[v].untyped_storage().nbytes() for v in values if type(tape.kept[v]) is Tensor)
    own = {root: one.untyped_storage().nbytes() for one, root in results if not is_wrapper(one)}
    if not served or sum(own.values()) <= cost:
        return {}, True
    return served, False


class _Serving(TorchDispatchMode):
    """Serves results of ops inside of a function that runs again."""

    def __init__(self, tape: Tape, unit: Unit) -> None:
        super().__init__()
        self.tape, self.served, self.calls = tape, unit.served, dict[int, int]()
        self.ops = {op for op, _ in unit.served}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = id(func)
        if op in self.ops:
            number = self.calls[op] = self.calls.get(op, -1) + 1
            entry = self.served.get((op, number))
            if entry is not None:
                tape = self.tape
                for generator, state in tape.after.get(entry, ()):
                    generator.set_state(state)
                found = [detached(tape.kept[v]) for v in tape.results(entry)]
                return found[0] if tape.counts.get(entry, 1) == 1 and not tape.is_list(entry) else tuple(found)
        return func(*args, **(kwargs or {}))


def _drop_kept(tape: Tape, inner: list[int], waiting: list[int], first: int) -> None:
    """Drop kept values inside of a call that no explained result needs."""
    needed, seen = set(), set()
    while waiting:
        value = waiting.pop()
        if value in seen or tape.makers[value] < first:
            continue
        seen.add(value)
        if value in tape.kept:
            needed.add(value)
            continue
        for entry in (tape.makers[value], *tape.writers.get(tape.roots[value], ())):
            if entry >= first and entry < len(tape.reads):
                waiting += tape.reads[entry]
    for value in inner:
        if value not in needed:
            del tape.kept[value]
            tape.kept_roots.discard(tape.roots[value])


# -- Replay


class _NotLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return placed_on(tensor.untyped_storage(), tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError


COUNTS: dict[str, int] = {}


def run_unit(tape: Tape, entry: int, values: dict[int, Any]) -> None:
    """Run ``apply`` again and take its results; its graph is dropped at once."""
    unit = tape.units[entry]
    COUNTS[unit.cls.__name__] = COUNTS.get(unit.cls.__name__, 0) + 1
    wanted = {number for is_returned, number in unit.results if not is_returned}
    saved: dict[int, Tensor] = {}
    count = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal count
        found = detached(tensor)  # an output would hold itself
        if count in wanted:
            saved[count] = found
        count += 1
        return found

    outer, _ACTIVE.mode = _ACTIVE.mode, None
    contexts = [torch.autocast(device, **then) for device, then in unit.autocast.items()]
    for one in contexts:
        one.__enter__()
    try:
        for generator, state in tape.states.get(entry, ()):
            generator.set_state(state)
        with torch.set_grad_enabled(unit.grad), saved_tensors_hooks(pack, lambda found: found):
            again = {}
            for value, (requires_grad, is_parameter) in unit.needs.items():
                one = values[value]
                if not is_parameter or one.requires_grad is not requires_grad:
                    one = one.detach().requires_grad_(requires_grad)
                    if requires_grad and value in unit.dirty:
                        one = _apply(_NotLeaf, one)
                again[value] = one
            arguments = from_refs(tape.args[entry], again)
            if unit.served:
                with _Serving(tape, unit):
                    out = _apply(unit.cls, *arguments)
            else:
                out = _apply(unit.cls, *arguments)
    finally:
        for one in reversed(contexts):
            one.__exit__(None, None, None)
        _ACTIVE.mode = outer
    returned = _returned(out)
    for value, (is_returned, number) in zip(tape.results(entry), unit.results):
        of = dict(enumerate(returned)) if is_returned else saved
        if number not in of:
            from sac.engine.replay import CannotReplay

            raise CannotReplay(f"{unit.cls.__name__} returns or saves fewer tensors than in forward")
        values[value] = detached(of[number])


__all__ = ["Decision", "Facts", "FunctionSite", "Scope", "Unit", "install", "run_unit"]
