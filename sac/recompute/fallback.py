"""The rerun of a region's Python if its tape cannot be replayed, which is served what the tape holds of the forward."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sac.checksums import Sums, same, sums_of
from sac.errors import Problem, RegionError
from sac.recompute.forward_state import WriteGuard
from sac.recompute.module_tracker import RegionMode
from sac.recompute.rerun import LIFT_FRESH, overwritten_problem, written_tensors
from sac.recompute.table import CallSite, DecisionTable, run_op
from sac.recompute.tape import CAST, TENSOR_HOLE, Ref, Tape, first_address, read_arguments
from sac.recompute.value_ids import NUMBERS, number_key
from sac.recompute.whole_modules import SavedModules, ServingPass
from sac.region.frame import OTHER_KIND, NoEarlyStop, Progress
from sac.region.rng import States
from sac.region.undo import UndoStack
from sac.stores.saved_tensor import AtHand, SavedResult, copied, fetch_recomputed
from sac.tensors import describe, detached, is_plain, map_tensors, tensors_of, written_parts
from sac.torch_private import OpOverload

# -- Signatures: which calls of two tapes are the same

# Note [What a fallback is served]
#
# A tape that cannot be replayed is still a record of the forward. When the region's Python runs again, a second tape
# records that run, and an op whose call is on the first tape, with a result that is held, is served that result instead
# of running. Two calls are the same if they have the same signature, and as many calls before them had it:
#
#   signature of a call = hash(op and module, arguments); a tensor argument stands for the signature of its value
#   signature of a value = that of the call that made it (with its index), and of the writes to its root since then
#   signature of a leaf = the position of an input; the identity of a parameter, or of a tensor that is there in both
#                         runs; of any other the order in which such leaves are read
#
# This is computed from the tape, and only if a fallback comes. Serving is not trusted: the run is compared with the
# forward, as a replay is, by the checksums of what autograd saved (docs/engines.md). If a value differs (NumPy wrote to
# a saved result, say), or the run fails, the region's Python runs once more, and is served nothing but the results of
# routing ops. So it is from the start if values could not be compared: an external tensor has changed, or autograd
# saved what no mode saw. With `verify: never` served results are trusted, as they are under rerun. Python gets copies:
# what it writes to them changes nothing that is held.
#
# Results of routing ops are found by call site and order if their calls differ: they must not be chosen anew.
#
# Example. The policy saves `mm`; the region runs `h = up(x)` and `down((h * h).sin())`, and a kernel without a
# dispatcher changes `h * h` before the `sin`. Replay computes another `sin` than autograd has saved. So Python runs
# again. The first `mm` reads input 0 and the view `t` of a parameter, as in the forward: a copy of h is served. The
# kernel runs again too, and what autograd saves is what it saved in the forward.
#
# If the kernel changes h itself, after an op has read it, then h is held as the kernel left it. Served, it is changed a
# second time, and autograd saves another `sin`. Then Python runs once more, and the first `mm` too.

_PLAIN = frozenset({type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis)})
_TO_COPY = torch.ops.aten._to_copy.default
_CONSTANT_NUMEL = 16


class TapeSignatures:
    """The signatures of the calls and values of a tape; see Note [What a fallback is served].

    ``outside``: the leaves of the forward's tape that exist now, by signature; None for that tape itself.
    """

    def __init__(self, tape: Tape, outside: Mapping[Any, Tensor] | None = None) -> None:
        self._tape = tape
        self._known = outside
        self.outside: dict[Any, Tensor] = {}
        self._made: dict[int, int] = {}  # value -> signature without later writes
        self._written: dict[int, int] = {}  # root -> signature of the writes to it
        self._draws = Counter[Any]()
        self._strangers = 0
        self._next = 0  # the first entry that has not been signed

    def sign_up_to_now(self) -> list[int]:
        """Sign the entries that have been added since the last call; return their signatures."""
        tape, found = self._tape, []
        for entry in range(self._next, tape.entry_count()):
            signature = self.of_call(tape.sites[entry], *tape.arguments(entry), tape.reads[entry])
            self.add(signature)
            found.append(signature)
        return found

    def add(self, signature: int) -> None:
        """Give the next entry this signature."""
        tape, entry = self._tape, self._next
        self._next = entry + 1
        for index, value in enumerate(tape.results(entry)):
            self._made[value] = hash((signature, index))
        for index, root in enumerate(tape.writes.get(entry, ())):
            self._written[root] = hash((self._written.get(root), signature, "written", index))

    def of_call(self, site: Any, rest: Any, keywords: Any, reads: Iterable[int]) -> int:
        """Return the signature of a call, or of what else makes a value."""
        tape, reads = self._tape, [*reads]
        if type(site) is not CallSite:
            name = site.name
            if site is CAST:
                rest, name = [TENSOR_HOLE, rest[0]], "cast"
            return hash((name, _plain(rest), *map(self.of, reads)))
        if site.op is LIFT_FRESH and (numbers := _numbers(tape, reads)) is not None:
            return hash(("numbers", numbers))
        arguments = _arguments(site.op, rest, keywords)
        if site.op is _TO_COPY and (cast := _cast_of(arguments)) is not None:
            return hash(("cast", cast, *map(self.of, reads)))
        number = 0
        if site.is_random:
            number = self._draws[site.op] = self._draws[site.op] + 1
        return hash((site, number, arguments, *map(self.of, reads)))

    def of(self, value: int) -> int:
        """Return the present signature of a value."""
        made = self._made.get(value)
        if made is None:
            made = self._made[value] = self._of_leaf(value)
        written = self._written.get(self._tape.roots[value])
        return made if written is None else hash((made, written))

    def _of_leaf(self, value: int) -> int:
        tape = self._tape
        before = tape.unseen.get(value)
        if before is not None:
            return hash(("unseen", self.of(before)))
        leaf = tape.leaf(value)
        if leaf is None:
            return self._of_stranger(())
        if leaf.position >= 0:
            return hash(("input", leaf.position))
        tensor = leaf.tensor()
        if tensor is None:
            return self._of_stranger(leaf.shape)
        key = "outside", id(tensor) if leaf.is_persistent else first_address(tensor), leaf.shape
        if self._known is None:
            self.outside[key] = tensor
        elif key not in self._known:
            return self._of_stranger(leaf.shape)
        return hash(key)

    def _of_stranger(self, shape: Any) -> int:
        self._strangers += 1
        return hash(("stranger", self._strangers, tuple(shape)))


def _numbers(tape: Tape, reads: list[int]) -> Any:
    """Return Python's numbers, if ``lift_fresh`` has made a small tensor of them that nothing writes to."""
    leaf = tape.leaf(reads[0]) if reads else None
    tensor = leaf.tensor() if leaf is not None and leaf.position < 0 else None
    if tensor is None or not is_plain(tensor) or not tensor.is_cpu or tensor.numel() > _CONSTANT_NUMEL:
        return None
    return None if tape.roots[reads[0]] in tape.writers else (str(tensor.dtype), str(tensor.tolist()))


@cache
def _defaults(op: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (one.name, one.default_value if one.has_default_value() else TENSOR_HOLE) for one in op._schema.arguments
    )


def _arguments(op: Any, rest: Any, keywords: Any) -> Any:
    """Return what is plain in the arguments of an op, alike whether defaults are given or left out."""
    if type(op) is not OpOverload:
        return _plain(rest), _plain(keywords)
    given = []
    for position, (name, default) in enumerate(_defaults(op)):
        value = rest[position] if position < len(rest) else keywords.get(name, Ellipsis)
        found = _plain(value)
        given.append(Ellipsis if value is not TENSOR_HOLE and found == _plain(default) else found)
    return tuple(given)


def _cast_of(arguments: Any) -> Any:
    """Return what a cast to a dtype and nothing else hashes, from the arguments of `_to_copy`."""
    tensor, dtype, *others = arguments
    return (tensor, dtype) if dtype is not Ellipsis and others == [Ellipsis] * len(others) else None


def _plain(value: Any) -> Any:
    cls = type(value)
    if value is TENSOR_HOLE or cls is Ref:
        return TENSOR_HOLE
    if cls in _PLAIN:
        return value
    if cls in NUMBERS:
        return number_key(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if cls is dict:
        return tuple((key, _plain(value[key])) for key in sorted(value, key=str))
    return cls  # a Generator, a process group, a graph module: its type must do


# -- The calls that are served


@dataclass(slots=True, eq=False)
class SavedCall:
    """A call whose results the forward has kept.

    ``outputs``: the tensors of its result, ``structure``: the result with a ``Ref`` in place of each, or None if it is
    not known. ``states_after``: the generators that it advanced, as it left them. ``sums``: for a routing op, checksums
    of the results if the call is verified.
    """

    site: CallSite
    outputs: list[SavedResult]
    structure: Any = None
    states_after: States = field(default_factory=list)
    sums: Sums = ()


def structure_of(op: Any, first: int, count: int) -> Any:
    """Return the result of an op that returns ``count`` tensors, from ``first`` on, or None if the schema leaves that
    open.
    """
    if type(op) is not OpOverload:
        return Ref(first) if count == 1 else None
    kinds = [str(one.type) for one in op._schema.returns]
    values = tuple(map(Ref, range(first, first + count)))
    if kinds == ["Tensor"] and count == 1:
        return values[0]
    if kinds == ["List[Tensor]"]:
        return [*values]
    return values if kinds == ["Tensor"] * count else None


@dataclass(frozen=True, slots=True)
class SavedCalls:
    """What a fallback is served: the forward's calls by signature and number, and those leaves that exist."""

    calls: Mapping[tuple[int, int], SavedCall]
    outside: Mapping[Any, Tensor]

    @classmethod
    def of(cls, tape: Tape, calls: Mapping[int, SavedCall]) -> SavedCalls:
        """Sign the ``calls``, by entry, of a tape."""
        signatures = TapeSignatures(tape)
        seen = Counter[int]()
        signed = {}
        for entry, signature in enumerate(signatures.sign_up_to_now()):
            if entry in calls:
                signed[signature, seen[signature]] = calls[entry]
            seen[signature] += 1
        return cls(signed, signatures.outside)


class _Matching:
    """Records one run of a region's Python on a tape of its own, and finds the calls of the forward."""

    def __init__(self, saved: SavedCalls, inputs: Iterable[tuple[int, Tensor]]) -> None:
        self.waiting = {**saved.calls}
        self._tape = Tape()
        for position, tensor in inputs:
            self._tape.add_leaf(tensor, position)
        self._signatures = TapeSignatures(self._tape, saved.outside)
        self._seen = Counter[int]()

    def find(self, site: CallSite, args: Any, kwargs: Any) -> SavedCall | None:
        """Record that a call begins; return the same call of the forward if its result is held."""
        tape, signatures = self._tape, self._signatures
        rest, keywords, reads = read_arguments(tape, site, args, kwargs)
        if site.writes:
            tape.sync()
            parts = ((one, part) for one in written_tensors(site, args, kwargs) for part in written_parts(one))
            roots = (tape.root_of_part(one, part) for one, part in parts if part.layout is torch.strided)
            tape.add_write(tuple(root for root in roots if root is not None))
        signatures.sign_up_to_now()
        signature = signatures.of_call(site, rest, keywords, reads)
        self._call, self._signature = (site, rest, keywords, reads), signature
        number = self._seen[signature]
        self._seen[signature] += 1
        return self.waiting.pop((signature, number), None)

    def add(self, out: Any) -> None:
        """Record that the call has returned ``out``."""
        self._tape.add_entry(*self._call, out)
        self._signatures.add(self._signature)


# -- The mode


class PythonRecomputeMode(RegionMode):
    """Runs a region again from its start, and serves what the forward has saved; see Note [What a fallback is served].

    ``routed``: the calls of routing ops. ``saved``: all that is served, or None if nothing else is.
    """

    def __init__(
        self,
        table: DecisionTable,
        path: str,
        snapshots: WriteGuard,
        routed: list[SavedCall],
        progress: Progress,
        modules: SavedModules | None,
        saved: SavedCalls | None,
        inputs: list[tuple[int, Tensor]],
    ) -> None:
        super().__init__(table)
        self._region = path
        self.progress = progress
        self._modules = modules
        self._snapshots, self._undo = snapshots, UndoStack()
        self._routed: defaultdict[Any, deque[SavedCall]] = defaultdict(deque)
        for one in routed:
            self._routed[one.site].append(one)
        self._matching = _Matching(saved, inputs) if saved is not None else None

    def whole_modules(self) -> ServingPass | None:
        """Return the pass that runs modules that are saved as a whole, unseen by the hooks of the region."""
        return ServingPass(self._modules, {}, self._undo, self) if self._modules is not None else None

    def __enter__(self) -> PythonRecomputeMode:
        calls = [call for waiting in self._routed.values() for call in waiting]
        served = [*self._matching.waiting.values()] if self._matching is not None else []
        held = {id(one): one for call in (*calls, *served) for one in call.outputs}
        self._fetched = fetch_recomputed((one, None) for one in held.values())
        self._snapshots.enter_on(self._undo, (generator for call in served for generator, _ in call.states_after))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.progress = NoEarlyStop()
        self._matching = None
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        site: CallSite | None = self.sites.get(id(func))
        if site is None:
            site = self.table.add_site(func, self.path)
        if site.is_unrecorded:
            return site.run(*args, **kwargs)
        if self.progress.done and not site.is_bookkeeping:
            self.progress.stop_before(written_tensors(site, args, kwargs) if site.writes else ())
        matching = self._matching
        call = matching.find(site, args, kwargs) if matching is not None else None
        out = self._serve(call) if call is not None else None
        if out is None:
            out = run_op(site, args, kwargs)
            if self._routed.get(site):
                out = in_place_of(self._region, self._routed[site].popleft(), out, self._fetched)
        if matching is not None:
            matching.add(out)
        if not site.is_bookkeeping:
            self.progress.after_op()
        return out

    def _serve(self, call: SavedCall) -> Any:
        """Return a copy of the result of ``call``; None if it is known that something has written to it unseen."""
        tensors = [one.fetch(self._fetched) for one in call.outputs]
        if call.sums and not same(call.sums, sums_of(tensors)):
            self._fetched.update(zip(map(id, call.outputs), tensors, strict=True))
            return None
        if self._routed.get(call.site) and call in self._routed[call.site]:
            self._routed[call.site].remove(call)
        for generator, state in call.states_after:
            generator.set_state(state)
        storages: dict[int, torch.UntypedStorage] = {}
        data = iter([copied(detached(one), storages) for one in tensors])
        return map_tensors(call.structure, lambda _: next(data), Ref)


def in_place_of(region: str, one: SavedCall, out: Any, fetched: AtHand) -> Any:
    """Return the saved results of ``one`` in place of ``out``, the present result; ``region`` is the region's name.

    ``fetched``: the result of ``fetch_recomputed``.
    """
    saved = [result.fetch(fetched) for result in one.outputs]
    # The op has run, so that generators have advanced as in forward; its result of the forward replaces the new one.
    for found, kept in zip(tensors_of(out), saved, strict=True):
        if found.shape != kept.shape or found.dtype != kept.dtype:
            raise RegionError(
                Problem(
                    region or "region",
                    f"{one.site.op} gave {describe(kept)} in forward and gives {describe(found)} in recomputation",
                    fix=OTHER_KIND,
                )
            )
    if one.sums and not same(one.sums, sums_of(saved)):
        if not same(one.sums, sums_of(out)):
            raise RegionError(overwritten_problem(region, one.site.op))
        return out
    storages: dict[int, torch.UntypedStorage] = {}
    outputs = iter(zip(one.outputs, saved, strict=True))

    def own(_: Tensor) -> Tensor:
        result, data = next(outputs)
        return result.own(detached(data), storages)

    return map_tensors(out, own)
