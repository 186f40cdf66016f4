"""The recorder: the dispatch mode of a forward that writes the tape and keeps what the policy saves."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sac.checksums import checksum, sums_of
from sac.engine.flags import callers_autocast
from sac.engine.handles import EXTERNAL, KEPT, Handle
from sac.engine.op_trace import OpTraceRecorder
from sac.engine.rng import GeneratorStates, advanced, default_generators
from sac.engine.table import NO_RULE, CallSite, DecisionTable, ResolvedRule, decide, gathers, run_op
from sac.engine.tape import HOLE, Tape, as_refs
from sac.engine.tracker import RegionMode
from sac.engine.wrappers import is_in_flight, same_memory
from sac.ops.facts import FILLING
from sac.policy.model import Decision
from sac.tensors import detached, equal, is_wrapper, layout_key, storage_address, tensors_of
from sac.torch_private import HigherOrderOperator

_NO_REPLAY = frozenset({"fsdp", "streams"})  # namespaces of ops whose effect depends on more than tensors


class TapeMode(RegionMode):
    """Runs the ops of a forward, decides on each, and records it.

    ``calls`` and ``alternations`` count for rules; ``hits``: rule -> ops that it matched.
    """

    takes_functions = True
    where = ""  # the region's name in messages

    def __init__(self, table: DecisionTable, tape: Tape, op_trace: OpTraceRecorder | None) -> None:
        super().__init__(table)
        self.tape = tape
        self.op_trace = op_trace
        self.calls: MutableMapping[CallSite, int] = defaultdict(int)
        self.alternations: MutableMapping[int, int] = defaultdict(int)
        self.hits: dict[int, int] = {}
        self.keeps_units = False  # until they are verified
        self.verifies = False  # whether checksums of what is kept are taken
        self.facts: dict[Any, Any] = {}  # (path, autograd function) -> what its calls have shown
        self.last_draw: tuple[int, GeneratorStates] = -1, []  # its entry, the states after it
        self.sums: dict[int, Any] | None = None  # of what will be replayed
        self.probes = False  # whether calls are examined for writes that no op is seen to make
        self.paused = False  # ops of a recomputation that backward asks for before the forward is over

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record an op; look for unseen writes if the call of an autograd function is examined."""
        scope = self.tape.scope
        if scope is None or scope.sums is None or self.paused:
            return self._dispatch(func, args, kwargs or {})
        scope.look(tensors_of(args))
        out = self._dispatch(func, args, kwargs or {})
        site = self.sites[id(func)]
        results, tape = tensors_of(out), self.tape
        is_fresh = site.traits.is_uninitialised or site.is_collective  # it may not have come yet
        scope.note(
            results, is_fresh=is_fresh or (site.is_view and any(tape.is_in_flight(tape.find(one)) for one in results))
        )
        if site.writes:
            scope.note(written_tensors(site, args, kwargs or {}), is_fresh=site.is_collective)
        return out

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        site = self.sites.get(id(func))
        if site is None:
            site = self.table.add_site(func, self.path, self.unit_rule)
        if self.paused:
            return run_op(site, args, kwargs)
        if site.is_unrecorded:
            return self._run_unrecorded(site, args, kwargs)
        tape = self.tape
        reads: list[int] = []
        if site.is_flat:
            ids, template = tape.ids, []
            for argument in args:
                if isinstance(argument, Tensor):
                    known = ids.get(id(argument))
                    is_known = known is not None and known[0]() is argument
                    reads.append(known[1] if known is not None and is_known else tape.find(argument, site))
                    template.append(HOLE)
                else:
                    template.append(argument)
            keywords = kwargs
        else:
            find = partial(tape.find, reader=site)
            template, keywords = as_refs(args, find, reads), as_refs(kwargs, find, reads)
        if not site.is_ordinary or site.is_collective:
            return self._run_special(site, func, args, kwargs, template, keywords, reads)
        if tape.fresh:  # `baddbmm(torch.empty(…), …, beta=0)` does not read its first argument
            self._check_fresh(site, reads[kwargs.get("beta", 1) == 0 :], ())
        out = site.run(*args, **kwargs)
        entry = tape.append(site, template, reads, keywords)
        if isinstance(out, Tensor):
            tape.add_value(out, tape.roots[reads[0]] if site.is_view else -1, entry)
            if type(out) is not Tensor:
                tape.has_collectives = True  # ops on a DTensor may communicate
        else:
            self._add_results(site, entry, args, out)
        if site.has_decision:
            self._decide(site, entry, args, kwargs, out)
        elif self.op_trace is not None:
            self.op_trace.add(site, None, Decision.RECOMPUTE, args, kwargs, out)
        return out

    def _run_unrecorded(self, site: CallSite, args: Any, kwargs: Any) -> Any:
        """Run a profiler mark, or an op that reads a size, a stride or a number."""
        tape = self.tape
        if site.reads_value:  # another call may branch to other ops
            tape.is_careful = True
            if tape.fresh:
                self._check_fresh(site, [tape.find(tensor, site) for tensor in tensors_of(args)], ())
        return run_op(site, args, kwargs)

    def _run_special(
        self, site: CallSite, func: Any, args: Any, kwargs: Any, template: Any, keywords: Any, reads: list[int]
    ) -> Any:
        """Run an op that writes, draws, makes fresh memory, belongs to the infrastructure or to a library."""
        tape = self.tape
        if isinstance(func, HigherOrderOperator):
            tape.fail(f"{func} is a higher-order op")
        elif getattr(func, "namespace", "") in _NO_REPLAY:
            tape.fail(f"{func} depends on more than tensors")
        elif any(isinstance(argument, torch.UntypedStorage) for argument in args):
            tape.fail(f"{func} takes a storage")
            template = [None if isinstance(one, torch.UntypedStorage) else one for one in template]  # frees its memory
        if site.is_inplace_view:
            return self._run_inplace_view(site, args, kwargs, template, keywords, reads)
        written = self._will_write(site, args, kwargs, reads)
        if tape.fresh:
            self._check_fresh(site, reads, written)
        states = self._states_before(args, kwargs) if site.draws else []
        out = run_op(site, args, kwargs)
        entry = tape.append(site, template, reads, keywords)
        if site.is_custom_op:
            tape.autocast[entry] = callers_autocast(func, args)
        self._add_results(site, entry, args, out)
        if site.is_collective:
            tape.has_collectives = True
            tape.collectives.append(entry)
            if _is_wait(site):
                tape.waits.add(entry)
        for value in written:
            tape.wrote(value, entry)
        if site.traits.is_uninitialised and any(tensor.numel() for tensor in tensors_of(out)):
            tape.fresh.update(tape.roots[value] for value in tape.results(entry))
        if moved := advanced(states):
            self._note_draw(entry, moved)
        if site.has_decision:
            self._decide(site, entry, args, kwargs, out)
        elif self.op_trace is not None:
            self.op_trace.add(site, None, Decision.RECOMPUTE, args, kwargs, out)
        return out

    def _will_write(self, site: CallSite, args: Any, kwargs: Any, reads: list[int]) -> list[int]:
        """Return the values that an op writes to; copy those from outside first."""
        if _is_wait(site):  # it returns its argument, whose contents are there only now
            return reads
        if not site.writes:
            return []
        tape = self.tape
        written = [tape.find(tensor, site) for tensor in written_tensors(site, args, kwargs)]
        for value in written:
            if not gathers(site) or tape.roots[value] in tape.input_roots:
                tape.will_write(value)
            elif site.traits.is_infrastructure and tape.makers[tape.roots[value]] < 0:  # as FSDP1 does, unnoticed by us
                tape.fail(f"{site.op} writes to a tensor from outside the region")
        return written

    def _run_inplace_view(
        self, site: CallSite, args: Any, kwargs: Any, template: Any, keywords: Any, reads: list[int]
    ) -> Any:
        """Run an op that changes a tensor's layout: to the tape it makes a view, which that tensor is from now on."""
        tape, address = self.tape, storage_address(args[0])
        out = site.run(*args, **kwargs)
        if storage_address(out) != address:
            tape.fail(f"{site.op} gives a tensor other memory")
        tape.add_value(out, tape.roots[reads[0]], tape.append(site, template, reads, keywords))
        return out

    def _add_results(self, site: CallSite, entry: int, args: Any, out: Any) -> None:
        tape = self.tape
        results = tensors_of(out)
        new = [] if all(tape.known(tensor) is not None for tensor in results) else results
        sources: dict[int, int] = {}
        if new and (site.is_view or site.is_custom_op or site.writes):
            sources = {storage_address(tensor): tape.find(tensor) for tensor in reversed(tensors_of(args))}
        for tensor in new:
            base = sources.get(storage_address(tensor)) if sources else None
            tape.add_value(tensor, -1 if base is None else tape.roots[base], entry)
        if len(new) != 1:
            tape.counts[entry] = len(new)

    def _check_fresh(self, site: CallSite, reads: Iterable[int], written: Iterable[int]) -> None:
        """Fail if an op reads fresh memory to which only a kernel that the dispatcher does not see can have written."""
        tape = self.tape
        if site.is_view or site.traits.is_factory or tape.scope is not None:
            return
        filled = {tape.roots[value] for value in written} if site.writes and _fills(site) else ()
        if any(tape.roots[value] in tape.fresh and tape.roots[value] not in filled for value in reads):
            tape.fail(f"{site.op} reads memory that no op has written to")

    def _states_before(self, args: Any, kwargs: Any) -> GeneratorStates:
        own = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Generator)]
        for generator in own:
            self.tape.is_careful = True
            if id(generator) not in self.tape.generators:
                self.tape.generators[id(generator)] = generator, generator.get_state()
        return [(generator, generator.get_state()) for generator in own or default_generators()]

    def _note_draw(self, entry: int, moved: GeneratorStates) -> None:
        """Note the states of the generators before a draw; nothing is held twice if it follows the last one at once."""
        tape, (previous, after) = self.tape, self.last_draw
        tape.states[entry] = moved
        if len(moved) == len(after) == 1 and moved[0][0] is after[0][0] and equal(moved[0][1], after[0][1]):
            tape.states[entry] = after
            tape.follows[entry] = previous
        self.last_draw = entry, [(generator, generator.get_state()) for generator, _ in moved]

    def _decide(self, site: CallSite, entry: int, args: Any, kwargs: Any, out: Any) -> None:
        tape = self.tape
        decision, rule = decide(self, site, args, kwargs, out)
        if decision.keeps and site.is_custom_op:
            arguments = {storage_address(tensor) for tensor in tensors_of(args)}
            if any(storage_address(tensor) in arguments for tensor in tensors_of(out)):
                decision = Decision.RECOMPUTE  # its schema does not say that it gives back an argument
        index = NO_RULE if rule is None else rule.index
        if rule is not None:
            self.hits[index] = self.hits.get(index, 0) + 1
        if decision.keeps:
            for value, tensor in zip(tape.results(entry), tensors_of(out), strict=False):
                tape.kept[value] = detached(tensor)  # without the graph, which holds the frame
                tape.kept_roots.add(tape.roots[value])
                tape.rule_of[value] = index
            tape.metadata[entry] = metadata_of(args)
            if isinstance(out, (tuple, list)) and not all(isinstance(one, (Tensor, list, tuple)) for one in out):
                tape.returned[entry] = [HOLE if isinstance(one, Tensor) else one for one in out]
            if self.verifies and type(out) is Tensor and not site.is_collective:
                tape.sums[entry] = sums_of(out)
            tape.is_careful = tape.is_careful or site.must_save
            if entry in tape.states:
                tape.after[entry] = self.last_draw[1]
        if self.op_trace is not None:
            self.op_trace.add(site, rule, decision, args, kwargs, out)

    def decide_on_unit(self, site: Any, args: Any, out: Any) -> tuple[Decision, ResolvedRule | None]:
        """Return the decision of the rules on the results of a unit, and the rule that matched."""
        decision, rule = decide(self, site, args, {}, out)
        if rule is not None:
            self.hits[rule.index] = self.hits.get(rule.index, 0) + 1
        return decision, rule

    def pack(self, tensor: Tensor, handle: Handle) -> None:
        """Decide what the handle of a tensor that autograd saves now holds."""
        tape = self.tape
        value = tape.known(tensor)
        if value is None:  # a parameter is saved before the op that reads it runs
            value = tape.find(tensor) if type(tensor) is Parameter else self.same_as(tensor)
        handle.position = value, len(tape.sites)
        if tape.scope is not None:  # decided at the end of the call; until then its own forward may use it
            tape.scope.saved.append(weakref.ref(handle))
            handle.hold(tensor, KEPT)
            return
        self.decide_on(handle, tensor)

    def decide_on(self, handle: Handle, tensor: Tensor) -> None:
        """Decide what the handle of a tensor holds; take the checksum of one that will be replayed."""
        tape = self.tape
        handle.release()
        root = tape.roots[handle.position[0]]
        if tape.makers[root] < 0 and root not in tape.of_unknown_origin:
            handle.hold(tensor, EXTERNAL)
        elif root in tape.kept_roots:
            handle.hold(tensor, KEPT)
        elif self.sums is not None and not (self._may_be_in_flight(root, tensor) or self._is_seed(handle)):
            self.sums[handle.index] = checksum(tensor)

    def _may_be_in_flight(self, root: int, tensor: Tensor) -> bool:
        return (self.tape.has_collectives and self.tape.is_in_flight(root)) or is_in_flight(tensor)

    def _is_seed(self, handle: Handle) -> bool:
        """Return whether a handle is that of a seed or offset, which an attention without dropout leaves undefined."""
        dtype = handle.metadata[1]
        if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
            return False
        maker = self.tape.makers[handle.position[0]]
        return maker >= 0 and "attention" in str(self.tape.sites[maker].op)

    def same_as(self, tensor: Tensor) -> int:
        """Return the value of a tensor that autograd has made of one on the tape."""
        tape, key = self.tape, layout_key(tensor)
        is_same = same_memory if is_wrapper(tensor) else _same_storage
        for value in reversed(range(len(tape.refs))):
            other = tape.refs[value]()
            if other is not None and is_same(other, tensor) and layout_key(other) == key:
                return value
        return tape.find(tensor)


def _same_storage(left: Tensor, right: Tensor) -> bool:
    return storage_address(left) == storage_address(right)


def written_tensors(site: CallSite, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a call writes to."""
    traits = site.traits
    positional = [args[position] for position in traits.mutated_args if position < len(args)]
    return tensors_of([*positional, *(kwargs[name] for name in traits.mutated_kwargs if name in kwargs)])


def _is_wait(site: CallSite) -> bool:
    return site.is_collective and site.op._schema.name.endswith("wait_tensor")


def _fills(site: CallSite) -> bool:
    """Return whether an op, as far as can be known, fills what it writes to, or parts of it, without reading it."""
    namespace, name = site.op._schema.name.split("::")
    return namespace != "aten" or name in FILLING or site.op._schema.overload_name.endswith("out")


def metadata_of(args: Any) -> Sequence[Any]:
    """Return shape and dtype of the tensors among the arguments of a call."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors_of(args)]
