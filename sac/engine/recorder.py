"""The recorder: the dispatch mode of a forward that writes the tape and keeps what the policy saves."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from sac.checksums import checksum, sums_of
from sac.engine.handles import EXTERNAL, KEPT, Handle
from sac.engine.tape import HOLE, Tape, as_refs
from sac.engine.tracker import RegionMode
from sac.policy.model import Decision
from sac.recompute.autocast import callers_autocast
from sac.recompute.op_trace import NO_RULE, OpTraceRecorder
from sac.recompute.table import CallSite, DecisionTable, decide, run_op
from sac.tensors import detached, equal, layout_key, storage_address, tensors_of
from sac.torch_private import HigherOrderOperator

_NO_REPLAY = frozenset({"fsdp", "streams", "c10d"})  # namespaces of ops whose effect depends on more than tensors


class TapeMode(RegionMode):
    """Runs the ops of a forward, decides on each, and records it.

    ``calls`` and ``alternations`` count for rules; ``hits``: rule -> ops that it matched.
    """

    def __init__(self, table: DecisionTable, tape: Tape, op_trace: OpTraceRecorder | None) -> None:
        super().__init__(table)
        self.tape = tape
        self.op_trace = op_trace
        self.calls: dict[CallSite, int] = defaultdict(int)
        self.alternations: dict[int, int] = defaultdict(int)
        self.hits: dict[int, int] = {}
        self.verifies = False  # whether checksums of what is kept are taken
        self.facts: dict[Any, Any] = {}  # (path, autograd function) -> what its calls have shown
        self.sums: dict[int, Any] | None = None  # of what will be replayed
        self.probes = False  # whether calls are examined for writes that no op is seen to make
        self.paused = False  # ops of a recomputation that backward asks for before the forward is over

    takes_functions = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scope = self.tape.scope
        if scope is None or scope.sums is None or self.paused:
            return self._dispatch(func, args, kwargs)
        scope.look(tensors_of(args))
        out = self._dispatch(func, args, kwargs)
        site = self.sites[id(func)]
        scope.note(tensors_of(out), is_fresh=site.traits.is_uninitialised)
        if site.writes:
            scope.note(written_tensors(site, args, kwargs or {}))
        return out

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        site = self.sites.get(id(func))
        if site is None:
            site = self.table.add_site(func, self.path)
        kwargs = kwargs or {}
        if self.paused:
            return run_op(site, args, kwargs)
        tape = self.tape
        if site.is_unrecorded:
            if site.reads_value:  # another call may branch to other ops
                tape.is_careful = True
            if tape.fresh:
                self._check_initialised(site, [tape.find(one, site) for one in tensors_of(args)], ())
            return run_op(site, args, kwargs)

        # What it reads
        reads: list[int] = []
        if site.is_flat:
            ids, template = tape.ids, []
            for argument in args:
                if isinstance(argument, Tensor):
                    found = ids.get(id(argument))
                    reads.append(found[1] if found is not None and found[0]() is argument else tape.find(argument, site))
                    template.append(HOLE)
                else:
                    template.append(argument)
            keywords = kwargs
        else:
            find = lambda tensor: tape.find(tensor, site)  # noqa: E731
            template, keywords = as_refs(args, find, reads), as_refs(kwargs, find, reads)
        if not site.is_ordinary or site.is_collective:
            return self._run_special(site, func, args, kwargs, template, keywords, reads)
        if tape.fresh:
            self._check_initialised(site, reads, ())
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
        if self.op_trace is not None and not site.has_decision:
            self.op_trace.add(site, None, Decision.RECOMPUTE, args, kwargs, out)
        return out

    def _run_special(
        self, site: CallSite, func: Any, args: Any, kwargs: Any, template: Any, keywords: Any, reads: list[int]
    ) -> Any:
        """Run an op that writes, draws, makes fresh memory, belongs to the infrastructure or to a library."""
        tape, traits = self.tape, site.traits
        if isinstance(func, HigherOrderOperator):
            tape.fail(f"{func} is a higher-order op")
        elif getattr(func, "namespace", "") in _NO_REPLAY:
            tape.fail(f"{func} depends on more than tensors")
        if site.is_inplace_view:
            return self._run_inplace_view(site, args, kwargs, template, keywords, reads)
        written = [tape.find(one, site) for one in written_tensors(site, args, kwargs)] if site.writes else ()
        tape.has_collectives = tape.has_collectives or site.is_collective
        if "wait_tensor" in str(func):  # it returns its argument, whose contents are there only now
            written = reads
        elif not gathers(site):
            for value in written:
                tape.will_write(value)
        if tape.fresh:
            self._check_initialised(site, reads, written)
        states = self._states_before(site, args, kwargs) if site.draws else ()
        out = run_op(site, args, kwargs)
        entry = tape.append(site, template, reads, keywords)
        if site.is_custom_op:
            tape.autocast[entry] = callers_autocast(func, args)
        self._add_results(site, entry, args, out)
        for value in written:
            tape.wrote(value, entry)
        if traits.is_uninitialised:
            tape.fresh.update(tape.roots[value] for value in tape.results(entry))
        if moved := [one for one in states if not equal(one[0].get_state(), one[1])]:
            tape.states[entry] = moved
        if site.has_decision:
            self._decide(site, entry, args, kwargs, out)
        elif self.op_trace is not None:
            self.op_trace.add(site, None, Decision.RECOMPUTE, args, kwargs, out)
        return out

    def _run_inplace_view(
        self, site: CallSite, args: Any, kwargs: Any, template: Any, keywords: Any, reads: list[int]
    ) -> Any:
        """Run an op that changes the layout of a tensor: to the tape it makes a view, which that tensor is from now on."""
        tape, address = self.tape, storage_address(args[0])
        out = site.run(*args, **kwargs)
        if storage_address(out) != address:
            tape.fail(f"{site.op} gives a tensor other memory")
        tape.add_value(out, tape.roots[reads[0]], tape.append(site, template, reads, keywords))
        return out

    def _add_results(self, site: CallSite, entry: int, args: Any, out: Any) -> None:
        tape = self.tape
        found = tensors_of(out)
        new = [] if all(tape.known(tensor) is not None for tensor in found) else found
        may_alias = site.is_view or site.is_custom_op or site.writes
        sources = {storage_address(one): tape.find(one) for one in reversed(tensors_of(args))} if new and may_alias else {}
        for tensor in new:
            base = sources.get(storage_address(tensor)) if sources else None
            tape.add_value(tensor, -1 if base is None else tape.roots[base], entry)
        if len(new) != 1:
            tape.counts[entry] = len(new)

    def _check_initialised(self, site: CallSite, reads: Any, written: Any) -> None:
        """Fail if an op reads fresh memory that no op has written to: a kernel that the dispatcher does not see has."""
        tape = self.tape
        if site.is_view or site.traits.is_factory or tape.scope is not None:
            return
        fills = {tape.roots[value] for value in written}
        for value in reads:
            root = tape.roots[value]
            if root in tape.fresh and root not in fills:
                tape.fail(f"{site.op} reads memory that no op has written to")

    def _states_before(self, site: CallSite, args: Any, kwargs: Any) -> list[tuple[torch.Generator, Tensor]]:
        own = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)]
        for generator in own:
            self.tape.is_careful = True
            if id(generator) not in self.tape.generators:
                self.tape.generators[id(generator)] = generator, generator.get_state()
        return [(one, one.get_state()) for one in own or default_generators()]

    def _decide(self, site: CallSite, entry: int, args: Any, kwargs: Any, out: Any) -> None:
        tape = self.tape
        decision, rule = decide(self, site, args, kwargs, out)
        index = NO_RULE if rule is None else rule.index
        if rule is not None:
            self.hits[index] = self.hits.get(index, 0) + 1
        if decision.keeps:
            for value, tensor in zip(tape.results(entry), tensors_of(out)):
                tape.kept[value] = detached(tensor)  # without the graph, which holds the frame
                tape.kept_roots.add(tape.roots[value])
                tape.rule_of[value] = index
            tape.metadata[entry] = metadata_of(args)
            if self.verifies and type(out) is Tensor and not site.is_collective:
                tape.sums[entry] = sums_of(out)
            tape.is_careful = tape.is_careful or site.must_save
            if entry in tape.states:
                tape.after[entry] = [(one, one.get_state()) for one, _ in tape.states[entry]]
        if self.op_trace is not None:
            self.op_trace.add(site, rule, decision, args, kwargs, out)

    def pack(self, tensor: Tensor, handle: Handle) -> None:
        """Decide what the handle of a tensor that autograd saves now holds."""
        tape = self.tape
        value = tape.known(tensor)
        if value is None:
            value = self._same_as(tensor)
        handle.place = value, len(tape.sites)
        if tape.scope is not None:  # decided at the end of the call; until then its own forward may use it
            tape.scope.saved.append(weakref.ref(handle))
            handle.hold(tensor, KEPT)
            return
        self.decide_on(handle, tensor)

    def decide_on(self, handle: Handle, tensor: Tensor) -> None:
        """Decide what the handle of a tensor holds; take the checksum of one that will be replayed."""
        tape = self.tape
        handle.release()
        root = tape.roots[handle.place[0]]
        if tape.makers[root] < 0:
            handle.hold(tensor, EXTERNAL)
        elif root in tape.kept_roots:
            handle.hold(tensor, KEPT)
        elif self.sums is not None:
            self.sums[handle.index] = checksum(tensor)

    def _same_as(self, tensor: Tensor) -> int:
        """Return the value of a tensor that autograd has made of one on the tape."""
        tape, key = self.tape, layout_key(tensor)
        address = storage_address(tensor)
        for value in reversed(range(len(tape.refs))):
            found = tape.refs[value]()
            if found is not None and storage_address(found) == address and layout_key(found) == key:
                return value
        return tape.find(tensor)


_GATHERING = frozenset({"aten::split_with_sizes_copy", "aten::set_", "aten::resize_"})  # the ops with which FSDP gathers


def gathers(site: CallSite) -> bool:
    """Return whether an op fills parameters from their shards, so that its writes are not the region's own."""
    return site.traits.is_infrastructure or site.is_collective or site.op.name().partition(".")[0] in _GATHERING


def default_generators() -> list[torch.Generator]:
    """Return the default generators of the CPU and of the current device, if one is in use."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def written_tensors(site: CallSite, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a call writes to."""
    traits = site.traits
    positional = [args[position] for position in traits.mutated_args if position < len(args)]
    return tensors_of([*positional, *(kwargs[name] for name in traits.mutated_kwargs if name in kwargs)])


def metadata_of(args: Any) -> Any:
    """Return shape and dtype of the tensors among the arguments of a call."""
    return [(one.shape, one.dtype) for one in tensors_of(args)]

