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
from torch.overrides import has_torch_function

from sac.checksums import checksum, sums_of
from sac.engine.flags import Autocast, callers_autocast
from sac.engine.handles import EXTERNAL, KEPT, Handle
from sac.engine.op_trace import OpTraceRecorder
from sac.engine.rng import GeneratorStates, advanced, default_generators, states_of
from sac.engine.table import NO_RULE, CallSite, DecisionTable, decide, gathers, run_op
from sac.engine.tape import Tape, as_refs
from sac.engine.tracker import RegionMode
from sac.engine.wrappers import is_in_flight
from sac.ops.facts import FILLING
from sac.policy.model import Decision
from sac.tensors import detached, equal, layout_key, storage_address, tensors_of
from sac.torch_private import HigherOrderOperator, OpOverload

_NO_REPLAY = frozenset({"fsdp", "streams"})  # namespaces of ops whose effect depends on more than tensors


class TapeMode(RegionMode):
    """Runs the ops of a forward, decides on each, and records it.

    ``calls`` and ``alternations`` count for rules; ``hits``: rule -> ops that it matched.
    """

    takes_functions = True

    def __init__(self, table: DecisionTable, tape: Tape, op_trace: OpTraceRecorder | None) -> None:
        super().__init__(table)
        self.tape = tape
        self.op_trace = op_trace
        self.calls: MutableMapping[CallSite, int] = defaultdict(int)
        self.alternations: MutableMapping[int, int] = defaultdict(int)
        self.hits: dict[int, int] = defaultdict(int)
        self.keeps_units = False  # until they are verified
        self.verifies = False  # whether checksums of what is kept are taken
        self.facts: dict[Any, Any] = {}  # (path, autograd function) -> what its calls have shown
        self.generators = default_generators()
        self.first_states: GeneratorStates = []  # at the start, held in any case
        self.autocast: Autocast  # at the start
        self.sums: dict[int, Any] | None = None  # of what will be replayed
        self.probes = False  # whether calls are examined for writes that no op is seen to make
        self.paused = False  # ops of a recomputation that backward asks for before the forward is over

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record an op."""
        tape, kwargs = self.tape, kwargs or {}
        site = self.sites.get(id(func))
        if site is None:
            site = self.table.add_site(func, self.path, self.unit_rule)
        if self.paused:
            return run_op(site, args, kwargs)
        if tape.scope is not None and tape.scope.examines:
            return self._examine(site, func, args, kwargs)
        if not site.is_ordinary:
            return self._run_other(site, func, args, kwargs)
        reads: list[int] = []
        ids, count, last = tape.ids, len(args), -1
        for position in site.tensor_positions:
            if position >= count:
                break
            argument = args[position]
            known = ids.get(id(argument))
            if known is not None and known[0]() is argument:
                reads.append(known[1])
            elif isinstance(argument, Tensor):
                reads.append(tape.find(argument, site))
            else:
                continue
            last = position
        template = args[len(reads) :] if last < len(reads) else as_refs([*args], tape.find, [])
        if tape.fresh:  # `baddbmm(torch.empty(…), …, beta=0)` does not read its first argument
            self._check_fresh(site, reads[kwargs.get("beta", 1) == 0 :], ())
        out = (site.run if has_torch_function(args) else site.bound)(*args, **kwargs)
        entry = tape.append(site, template, reads, kwargs)
        if isinstance(out, Tensor):
            tape.add_value(out, tape.roots[reads[0]] if site.is_view else -1, entry)
            if type(out) is not Tensor:
                tape.has_collectives = True  # ops on a DTensor may communicate
            if site.is_uninitialised and out.numel():
                tape.fresh.add(tape.roots[-1])
        else:
            self._add_results(site, entry, args, out)
        if site.has_decision or self.op_trace is not None:
            self._decide(site, entry, args, kwargs, out)
        return out

    def _examine(self, site: CallSite, func: Any, args: Any, kwargs: Any) -> Any:
        """Look for unseen writes around an op, since the call of an autograd function is examined."""
        scope = self.tape.scope
        scope.look(tensors_of(args))
        scope.examines = False
        try:
            out = self.__torch_dispatch__(func, (), args, kwargs)
        finally:
            scope.examines = True
        scope.note([*tensors_of(out), *written_tensors(site, args, kwargs)])
        return out

    def _run_other(self, site: CallSite, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that is not ordinary."""
        if site.is_unrecorded:
            return self._run_unrecorded(site, args, kwargs)
        reads: list[int] = []
        find = partial(self.tape.find, reader=site)
        template, keywords = as_refs([*args], find, reads), kwargs and as_refs(kwargs, find, reads)
        return self._run_special(site, func, args, kwargs, template, keywords, reads)

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
        """Run an op that writes, draws, belongs to the infrastructure or to a library."""
        tape, traits = self.tape, site.traits
        if type(func) is not OpOverload and isinstance(func, HigherOrderOperator):
            tape.fail(f"{func} is a higher-order op")
        elif getattr(func, "namespace", "") in _NO_REPLAY:
            tape.fail(f"{func} depends on more than tensors")
        elif torch.UntypedStorage in map(type, args):
            tape.fail(f"{func} takes a storage")
            template = [None if isinstance(one, torch.UntypedStorage) else one for one in template]  # frees its memory
        if site.is_inplace_view:
            return self._run_inplace_view(site, args, kwargs, template, keywords, reads)
        written = self._will_write(site, args, kwargs, reads)
        if tape.fresh:
            self._check_fresh(site, reads, written)
        draws = traits.may_draw and (traits.chance < 0 or any(args[traits.chance : traits.chance + 1]))
        states = self._states_before(args, kwargs) if draws else []
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
        if site.is_uninitialised and any(tensor.numel() for tensor in tensors_of(out)):  # of a library
            tape.fresh.update(tape.roots[value] for value in tape.results(entry))
        if moved := advanced(states):
            (generator, state), *others = moved
            is_first = not others and any(generator is one and equal(state, then) for one, then in self.first_states)
            tape.states[entry] = self.first_states if is_first else moved
        if site.has_decision or self.op_trace is not None:
            self._decide(site, entry, args, kwargs, out)
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
        new = [] if None not in map(tape.known, results) else results
        bases: dict[int, int] = {}
        if new and (site.is_view or site.is_custom_op or site.writes):
            bases = {storage_address(tensor): tape.roots[tape.find(tensor)] for tensor in reversed(tensors_of(args))}
        for tensor in new:
            tape.add_value(tensor, bases.get(storage_address(tensor), -1) if bases else -1, entry)
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
        return states_of(own or self.generators)

    def _decide(self, site: CallSite, entry: int, args: Any, kwargs: Any, out: Any) -> None:
        tape = self.tape
        decision, rule = decide(self, site, args, kwargs, out)
        if decision.keeps and site.is_custom_op:
            makers = {tape.makers[tape.roots[tape.find(tensor)]] for tensor in tensors_of(out)}
            if makers != {entry}:  # its schema does not say that it gives back an argument
                decision = Decision.RECOMPUTE
        if decision.keeps:
            index = NO_RULE if rule is None else rule.index
            for value, tensor in zip(tape.results(entry), tensors_of(out), strict=False):
                tape.kept[value] = detached(tensor)  # without the graph, which holds the frame
                tape.kept_roots.add(tape.roots[value])
                tape.rule_of[value] = index
            tape.metadata[entry] = metadata_of(args)
            if not isinstance(out, Tensor):
                tape.returned[entry] = as_refs(out, tape.find, [])
            if self.verifies and type(out) is Tensor and not site.is_collective:
                tape.sums[entry] = sums_of(out)
            tape.is_careful = tape.is_careful or site.must_save
            if drawn := tape.states.get(entry):
                tape.after[entry] = states_of(generator for generator, _ in drawn)
        if self.op_trace is not None:
            self.op_trace.add(site, rule, decision, args, kwargs, out)

    def pack(self, tensor: Tensor, handle: Handle) -> None:
        """Decide what the handle of a tensor that autograd saves now holds."""
        tape = self.tape
        known = tape.ids.get(id(tensor))
        if known is not None and known[0]() is tensor:
            value = known[1]
        else:  # a parameter is saved before the op that reads it runs
            value = tape.find(tensor) if type(tensor) is Parameter else self.same_as(tensor)
        handle.position = value, len(tape.sites)
        if tape.scope is None:
            self.decide_on(handle, tensor)
        else:  # decided at the end of the call; until then its own forward may use it
            tape.scope.saved.append(weakref.ref(handle))
            handle.hold(tensor, KEPT)

    def decide_on(self, handle: Handle, tensor: Tensor) -> None:
        """Decide what the handle of a tensor holds; take the checksum of one that will be replayed."""
        tape = self.tape
        root = tape.roots[handle.position[0]]
        if tape.makers[root] < 0 and root not in tape.of_unknown_origin:
            handle.hold(tensor, EXTERNAL)
        elif root in tape.kept_roots:
            handle.hold(tensor, KEPT)
        else:
            handle.release()
            if self.sums is None or tape.is_in_flight(root) or is_in_flight(tensor):
                return
            if tensor.numel() > 2 or tensor.is_floating_point():  # attention without dropout leaves its seed undefined
                self.sums[handle.index] = checksum(tensor)

    def same_as(self, tensor: Tensor) -> int:
        """Return the value of a tensor that autograd has made of one on the tape."""
        key = layout_key(tensor)
        values = (value for value, other in self.tape.in_memory_of(tensor) if layout_key(other) == key)
        value = next(values, None)
        return self.tape.find(tensor) if value is None else value


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
