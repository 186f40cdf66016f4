"""The recorder of the replay engine: writes the tape of one forward and keeps the tensors that the policy saves."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from sac.checksums import Sums, checksum, find_different
from sac.errors import Problem, RegionError
from sac.ops.facts import FILLING, FILLING_PARTS
from sac.outer_hooks import active_hooks
from sac.policy.model import Decision
from sac.recompute.autocast import callers_autocast
from sac.recompute.evidence import GroupEvidence
from sac.recompute.fallback import PythonRecomputeMode, SavedCall, SavedCalls, structure_of
from sac.recompute.forward_state import WriteGuard
from sac.recompute.module_tracker import RegionMode, TrackedForward
from sac.recompute.op_trace import NO_RULE, OpTraceRecorder, SavedFigures
from sac.recompute.parameter_only import NOT_PARAMETERS, ParameterOnlyValues, is_large
from sac.recompute.rerun import LIFT_FRESH, generators_of, written_tensors
from sac.recompute.saved_results import tensors_within
from sac.recompute.schedule import ReplaySchedule, TapeLayout, Wanted, schedule_replay
from sac.recompute.table import CallSite, DecisionTable, ResolvedRule, decide, gathers, run_op
from sac.recompute.tape import SMALL_NUMEL, TENSOR_HOLE, Ref, Tape, cast_of, new_tensors, read_arguments
from sac.recompute.whole_modules import SavedModuleCall, SavedModules, SavingPass
from sac.region.frame import OTHER_VALUE, Handle, Handles, Progress, Recorder
from sac.region.inputs import RegionInputs
from sac.region.module_state import MOST_COPIED_BYTES_UNRECORDED, ModuleState, Spare, small_bytes
from sac.region.rng import RngSnapshot, States, state_of, states_of
from sac.region.settings import AUTO, Settings
from sac.stores.saved_tensor import Held, SavedResult, compact
from sac.tensors import (
    describe,
    detached,
    equal,
    is_plain,
    map_tensors,
    storage_address,
    storage_bytes,
    storage_sizes,
    storages_of,
    tell_of,
    tensor_parts,
    tensors_of,
    version_of,
    written_parts,
)

# -- Generator states before each random op of a tape

# A state of the CPU generator takes five kilobytes. An op needs no state of its own if it starts from the state that
# another op left and that op runs again too. Nor does it if it starts from the state at the start of the region: the
# frame holds that one.


class RandomOpStates:
    """Records the random draws of one region call for its tape."""

    __slots__ = ("_at_start", "_before", "_last", "_previous", "_tape")

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._at_start: RngSnapshot | None = None
        self._before: States = []  # generator states before the op that is running
        # By address, as Python may have several objects for one: a generator that was drawn from, the entry that drew
        # last (-1: none yet), the state that it left.
        self._last: dict[int, tuple[torch.Generator, int, torch.Tensor]] = {}
        self._previous: dict[int, tuple[int, ...]] = {}  # entry -> the entries that left each of its states; -1: none

    def begin(self, snapshot: RngSnapshot | None) -> None:
        """Start from ``snapshot``, the generator states at the start of the region; it is held until backward."""
        self._at_start = snapshot
        if snapshot is not None:
            self._tape.note_left(snapshot.states[0][1])

    def before(self, generators: list[torch.Generator]) -> None:
        """Record the states of ``generators``, from which the next op may draw."""
        self._before = states_of(generators)

    def drew(self, state: torch.Tensor) -> None:
        """Record that the op has drawn from the default generator of the CPU, which was in ``state`` before."""
        self._before = [(torch.default_generator, state)]

    def have_moved(self) -> bool:
        """Return whether the op has advanced one of its generators."""
        return any(not equal(generator.get_state(), state) for generator, state in self._before)

    def after(self, entry: int, *, runs_again: bool) -> None:
        """Record which generators the op of ``entry`` advanced, and their states before it if it ``runs_again``."""
        self.catch_up()
        before, self._before = self._before, []
        moved = ((generator, state, state_of(generator)) for generator, state in before)
        self._note(entry, [one for one in moved if not equal(one[1], one[2])], runs_again=runs_again)

    def catch_up(self) -> None:
        """Record the draws of the ops that the C++ library has recorded since the last call."""
        for entry, before, now in self._tape.take_draws():
            self._note(entry, [(torch.default_generator, tell_of(before), tell_of(now))], runs_again=True)

    def _note(
        self, entry: int, moved: list[tuple[torch.Generator, torch.Tensor, torch.Tensor]], *, runs_again: bool
    ) -> None:
        """Record that an op has advanced these generators, with their states before and after it."""
        if self._at_start is not None:
            self._last = {_address(generator): (generator, -1, state) for generator, state in self._at_start.states}
            self._at_start = None
        found: States = []
        left: States = []
        previous = []
        for generator, state, now in moved:
            _, last, known = self._last.get(_address(generator), (None, -1, None))
            left.append((generator, now))
            if known is not None and (known is state or equal(known, state)):
                found.append((generator, known))
                previous.append(last)
            else:
                found.append((generator, state))
                previous.append(-1)
            self._last[_address(generator)] = generator, entry, now
            if _address(generator) == _address(torch.default_generator):
                self._tape.note_left(now)
        if runs_again and found:
            self._tape.states[entry] = found
            self._previous[entry] = tuple(previous)
        elif found:
            self._tape.states_after[entry] = left

    def close(self, running: set[int], served: Container[int]) -> None:
        """End the forward: keep only the states that the entries need that will run again, or that will be served.

        ``running``: the entries of a replay; ``served``: those that Python, if it runs again, will not run.
        """
        self.catch_up()
        tape, every = self._tape, self._tape.states
        if not (every or tape.states_after):  # nothing was drawn
            self.drop()
            return
        tape.states = {}
        tape.states_after = {one: left if one in served else None for one, left in tape.states_after.items()}
        for entry, states in every.items():
            if entry not in running:
                continue
            previous = self._previous[entry]
            follows = tuple(one for one in previous if one in running and one in every)
            if follows:
                tape.draws_after[entry] = follows
            if held := [state for state, one in zip(states, previous, strict=True) if one not in follows]:
                tape.states[entry] = held
        self.drop()

    def drop(self) -> None:
        """Release everything."""
        self._at_start, self._last, self._previous, self._before = None, {}, {}, []


def _address(generator: torch.Generator) -> int:
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


# -- Bytes that one region call keeps for backward, for the report


def figures_of_tape(
    kept: Mapping[int, Tensor],
    held: Iterable[int],
    loose: Iterable[Handle],
    rule_of: Mapping[int, int],
    hits: Mapping[int, int],
) -> SavedFigures:
    """Count the bytes of each storage once, under its rule.

    ``kept``: values kept until the end of the forward; ``held``: those of them that stay until backward. ``loose``:
    handles that hold a value themselves. ``rule_of``: saved value -> index of its rule.
    """
    stays = {*held}
    sizes: dict[int, tuple[int, int]] = {}  # address of a storage -> bytes, rule
    rule_at: dict[int, int] = {}
    dead: dict[int, int] = {}
    for value, tensor in kept.items():
        rule = rule_of.get(value, NO_RULE)
        for part in tensor_parts(tensor):
            address = storage_address(part)
            rule_at[address] = rule
            if value in stays:
                sizes[address] = storage_bytes(part), rule
            elif value in rule_of:
                dead[address] = storage_bytes(part)
    for handle in loose:
        if (found := handle.on_device) is not None:
            rule = rule_at.get(handle.storage, NO_RULE)
            for part in tensor_parts(found):
                sizes.setdefault(storage_address(part), (storage_bytes(part), rule))
    rules = dict.fromkeys(rule_of.values(), 0)
    for size, rule in sizes.values():
        rules[rule] = rules.get(rule, 0) + size
    lost = sum(size for address, size in dead.items() if address not in sizes)
    return SavedFigures(sum(size for size, _ in sizes.values()), lost, rules, dict(hits))


def _sizes_of(kept: dict[int, Tensor], loose: Iterable[Handle], held: Mapping[int, Tensor]) -> Any:
    """Return what ``figures_of_tape`` depends on among calls with the same tape layout; None for unusual tensors."""
    tensors = [*kept.values()]
    if not {Tensor}.issuperset(map(type, tensors)):
        return None
    storages = storages_of(tensors)
    sizes = [size for _, size in storages]
    addresses = (address for address, _ in reversed(storages))
    places = dict(zip(addresses, reversed(kept), strict=True))  # the first value in each storage
    for handle in loose:
        place = places.get(handle.storage)
        if place is None or not isinstance(handle.value, Tensor):
            return None
        # A view of what is not held may become a copy, which has the size of the view.
        sizes.append(place if place in held else -handle.value.nbytes)
    return sizes


# -- Ops with a nondeterministic order of summation, which verification skips

# The ops that a forward can run from torch's list of nondeterministic kernels (`torch.use_deterministic_algorithms`,
# torch 2.13). CPU kernels are bitwise reproducible. A value computed from the result of such an op differs with it.
_ADDED_IN_ANY_ORDER = frozenset(
    "aten::" + name
    for name in (
        *("index_add", "index_reduce", "index_put", "_unsafe_index_put", "_index_put_impl", "put", "cumsum"),
        *("scatter", "scatter_add", "scatter_reduce", "histc", "bincount", "_embedding_bag", "_sparse_mm", "sspaddmm"),
        "nll_loss2d_forward",
    )
)


def nondeterministic_on(device: torch.device) -> frozenset[str]:
    """Return the names of such ops without the in-place underscore; none if all kernels on ``device`` repeat."""
    if device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return frozenset()
    return _ADDED_IN_ANY_ORDER


def may_differ(tape: Tape, value: int, names: frozenset[str]) -> bool:
    """Return whether an op in ``names`` contributed to ``value``."""
    makers: dict[int, int] = {}  # value -> entry
    for entry in range(tape.entry_count()):
        makers.update(dict.fromkeys(tape.results(entry), entry))
    known = {value}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        entries = list(tape.writers.get(tape.roots[one], ()))
        if one in makers and one not in tape.kept:
            entries.append(makers[one])
        for entry in entries:
            if _name(tape.sites[entry]) in names:
                return True
            more = set(tape.reads[entry]) - known
            known |= more
            waiting += more
    return False


def _name(site: object) -> str:
    schema = getattr(getattr(site, "op", None), "_schema", None)
    return str(schema.name).removesuffix("_") if schema is not None else ""


# -- The dispatch mode that writes the tape

_NO_REPLAY = frozenset({"fsdp", "streams"})  # namespaces of ops whose effect depends on more than tensors


class TapeMode(RegionMode):
    """Runs a region's forward: decides on each op, keeps saved results, and records how to recompute the rest."""

    def __init__(self, recorder: TapeRecorder, op_trace: OpTraceRecorder | None) -> None:
        super().__init__(recorder.table)
        self.region_path = recorder.path
        self.recorder = recorder
        self.tape = recorder.tape
        self.op_trace: OpTraceRecorder | SavedModuleCall | None = op_trace

    def whole_modules(self) -> SavingPass | None:
        """Return the pass that saves whole modules."""
        modules = self.recorder.modules
        return SavingPass(modules, lambda: 0, self) if modules is not None else None

    def passed_generators(self) -> list[torch.Generator]:
        """See ``Watcher``; a replay needs none."""
        return []

    @contextmanager
    def watches(self, call: SavedModuleCall) -> Iterator[None]:
        """See ``Watcher``. The first entry and the first value inside are noted."""
        call.begins = self.tape.entry_count(), self.tape.value_count()
        op_trace = self.op_trace
        self.op_trace = call if op_trace is not None else None
        try:
            with self.inside(call.call_key[0]):
                yield
        finally:
            self.op_trace = op_trace

    def returned(self, call: SavedModuleCall, forward: TrackedForward, given: list[Any], out: Any) -> None:
        """See ``Watcher``."""
        sizes = self.recorder.keep_module(call, given, tensors_within(out))
        if isinstance(self.op_trace, OpTraceRecorder):
            kept_bytes = sum({**call.inside, **sizes}.values())
            self.op_trace.add_module(
                call.call_key, call.rule, forward.module, out, kept_bytes=kept_bytes, flops=call.flops
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if get_ident() != self.thread and self.is_forked():
            return func(*args, **(kwargs or {}))
        site: CallSite | None = self.sites.get(id(func))
        tape, recorder = self.tape, self.recorder
        if site is None or not site.is_ordinary or tape.needs_attention or self.op_trace is not None:
            return self._run(site or recorder.table.add_site(func, self.path), func, args, kwargs or {})

        # The fast path, for ordinary ops: it skips every check that the call site has already answered. It does the
        # same as `_run`, with the methods of the tape inlined.
        ids, versions, roots, addresses = tape.ids, tape.versions, tape.roots, tape.addresses
        reads = []
        rest: Any = args
        try:
            for position in site.tensor_positions:
                if position >= len(args):
                    break
                value: Any = args[position]
                found = ids.get(id(value))
                if found is None or found[0]() is not value:
                    if not isinstance(value, Tensor):  # an omitted argument, or a number
                        continue
                    number = tape.register_unknown(value, func)
                else:
                    number = found[1]
                    if value._version != versions[number]:
                        number = tape.look_at_version(value, number)
                    elif (known := addresses[number]) and value.untyped_storage()._cdata != known:  # `has_moved`
                        number = tape.hold_current(value)
                reads.append(number)
                if rest is args:
                    rest = [*args]
                rest[position] = TENSOR_HOLE
        except RuntimeError:  # an inference tensor has no version counter
            return self._run(site, func, args, kwargs or {})
        if tape.needs_attention:  # the tape is not replayable
            return self._run(site, func, args, kwargs or {})
        out = site.run(*args, **kwargs) if kwargs else site.run(*args)
        if type(out) is not Tensor:
            recorder.finish(self, site, args, kwargs or {}, rest, reads, kwargs or {}, out)
            return out
        first = len(roots)
        if site.view_of >= 0 and reads:  # not a view of a number
            versions.append(versions[reads[0]])
            roots.append(roots[reads[0]])
            ids[id(out)] = ref(out), first
        else:  # always in new memory
            versions.append(0)
            roots.append(first)
            reference = ref(out)
            ids[id(out)] = reference, first
            tape.unsynced.append((first, reference))
        addresses.append(storage_address(out))
        if kwargs:
            tape.keywords[len(tape.sites)] = kwargs
        tape.sites.append(site)
        tape.arg_templates.append(rest)
        tape.reads.append(reads)
        tape.first_outputs.append(first)
        if site.has_decision:
            recorder.decide_on(site, args, kwargs or {}, out, first, reads)
        if recorder.recent:
            recorder.recent = []
        return out

    def _run(self, site: CallSite, func: Any, args: Any, kwargs: Any) -> Any:
        """Run any op, and record it."""
        recorder, tape = self.recorder, self.tape
        if site.is_unrecorded or recorder.paused:
            return self._run_silently(site, func, args, kwargs)
        if recorder.maybe_modified:
            recorder.resolve_maybe_modified()
        rest, keywords, reads = read_arguments(tape, site, args, kwargs)
        if tape.factories:
            recorder.read_factories(site, args, kwargs, reads)
        if site.writes:
            recorder.before_write(site, args, kwargs)
        if site.draws:
            recorder.draw(site, args, kwargs)
        if tape.not_replayable:
            recorder.note_gathered(args, kwargs)
        if site.is_custom_op:
            tape.autocast_states[tape.entry_count()] = callers_autocast(func, args)
        out = run_op(site, args, kwargs)
        recorder.finish(self, site, args, kwargs, rest, reads, keywords, out)
        return out

    def _run_silently(self, site: CallSite, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.recorder.paused:
            self.recorder.reads_values = self.recorder.reads_values or site.reads_value
            if site.traits.is_infrastructure and func.namespace in _NO_REPLAY:
                self.tape.fail(f"{func.namespace} ops run inside the region")
            if self.op_trace is not None:
                self.op_trace.add(site, None, Decision.RECOMPUTE, args, kwargs, None)
        return site.run(*args, **kwargs)


# -- The recorder's interface to the dispatch mode

UNSEEN_WRITE = "the forward wrote to a tensor that an op reads in a way that no mode sees (NumPy)"


class TapeRecorder:
    """The recorder's interface to ``TapeMode``; see Note [The tape]. ``ReplayRecorder`` adds that to the frame."""

    __slots__ = (
        "_being_written",
        "_gathered",
        "_in_order",
        "_inputs",
        "_kept_in",
        "_left",
        "_owners",
        "_parameter_only",
        "_parts",
        "_places",
        "_routing",
        "_routing_sums",
        "_rules",
        "_settings",
        "_structures",
        "_written_parameters",
        "_wrote_late",
        "alternations",
        "calls",
        "checksums",
        "compares_python",
        "evidence",
        "hits",
        "may_save",
        "maybe_modified",
        "modules",
        "path",
        "paused",
        "random_states",
        "reads_values",
        "recent",
        "snapshots",
        "table",
        "tape",
        "wrote_inputs",
    )

    def __init__(
        self,
        table: DecisionTable,
        path: str,
        owners: tuple[nn.Module, ...],
        settings: Settings,
        evidence: GroupEvidence,
        *,
        verifies: bool,
    ) -> None:
        self.table = table
        self.path = path  # of the region
        self.modules: SavedModules | None = None  # that are saved as a whole
        self.evidence = evidence
        self.tape = self.new_tape()
        self.paused = False  # True while a replay runs inside the region's own forward, which is not recorded
        self.snapshots = WriteGuard()
        # Of small tensors from outside: what the last op that wrote to one left, by the address of its storage, until
        # the forward is over; and those that the op at hand writes to.
        self._left: dict[int, bytes] = {}
        self._being_written: list[Tensor] = []
        self.checksums: dict[int, Sums] | None = {} if verifies else None  # missing handle -> checksum
        self.compares_python = False  # whether Python, if it runs again, has to save the same values
        self.may_save = False
        self.reads_values = False  # the value of a tensor was read, so the program may have branched on it
        self.calls: MutableMapping[CallSite, int] = defaultdict(int)
        self.alternations: MutableMapping[int, int] = defaultdict(int)
        self.hits: defaultdict[int, int] = defaultdict(int)
        self.recent: list[tuple[int, Tensor, int]] = []  # saved by autograd since the last op: handle, tensor, root
        self.maybe_modified: list[tuple[int, Tensor, int, int]] = []
        self.random_states = RandomOpStates(self.tape)
        self._settings = settings
        self._owners = owners
        self._parameter_only: ParameterOnlyValues | None = None  # made when something is first asked
        self._places: dict[int, tuple[int, int, int]] = {}  # missing handle -> value, number of the next entry, version
        self._kept_in = self.tape.kept_in
        self._in_order = False  # whether a value may come back with other strides
        self._routing_sums: dict[int, Sums] = {}  # if the call is verified: result of a must-save op -> its checksum
        self._rules: dict[int, int] = {}  # kept value -> index of its rule
        self._routing: list[tuple[CallSite, range]] = []  # calls of must-save ops, and their results
        self._written_parameters: set[int] = set()  # addresses of parameters that the region itself writes to
        self._gathered: set[int] = set()  # if not replayable: addresses of parameters that FSDP may have gathered here
        self._inputs: RegionInputs | None = None
        self.wrote_inputs = False
        self._wrote_late = False
        self._parts: set[int] = set()  # roots of which parts are kept, as results of saved modules
        self._structures: dict[int, Any] = {}  # first kept value of an op -> its result, if that is not one tensor

    def new_tape(self) -> Tape:
        """Return the tape of this call."""
        return Tape()

    def note_recent(self, handle: int, tensor: Tensor, root: int) -> None:
        """Record that autograd has saved ``tensor`` since the last op."""
        self.recent.append((handle, tensor, root))

    def forget_recent(self) -> None:
        """Release what autograd has saved since the last op: the forward has failed, and its graph holds this."""
        self.recent = []
        self.maybe_modified.clear()

    def note_gathered(self, args: Any, kwargs: Any) -> None:
        """Record which parameters an op reads in a call that is not replayable; see ``_gathered``."""
        for tensor in tensors_of([*args, *kwargs.values()]):
            if isinstance(tensor, nn.Parameter):
                self._gathered.update(map(storage_address, tensor_parts(tensor)))

    def read_factories(self, site: CallSite, args: Any, kwargs: Any, reads: list[int]) -> None:
        """Resolve those of ``reads``, the values that an op reads, that a factory made and no op has written to."""
        if site.is_view or (site.writes and _fills(site)):
            return
        tape = self.tape
        found = [value for value in reads if tape.roots[value] in tape.factories]
        if not found:
            return
        written = {id(tensor) for tensor in written_tensors(site, args, kwargs)} if _writes_parts(site) else ()
        for tensor in tensors_of([*args, *kwargs.values()]):
            value = tape.known(tensor)
            root = tape.roots[value] if value in found else -1
            if root not in tape.factories:
                continue
            if id(tensor) in written and tape.sites[tape.factories[root]].traits.is_uninitialised:
                continue
            self._explain(root, tensor, site.op)

    def before_write(self, site: CallSite, args: Any, kwargs: Any) -> None:
        """Copy or snapshot the memory that an op is about to write to, if its present content is still needed."""
        tape = self.tape
        tape.sync()
        roots = []
        for tensor in written_tensors(site, args, kwargs):
            for part in written_parts(tensor):
                if part.layout is not torch.strided:
                    tape.fail(f"{site.op} writes to a tensor without strides")
                    continue
                address = storage_address(part)
                root = tape.root_of_part(tensor, part)
                if root is not None and site.op._schema.name == "aten::set_":
                    tape.fail(f"{site.op} moves a tensor to another storage")
                if root in tape.unpacked_early:
                    tape.fail(f"{site.op} writes to memory that a gradient inside the region has read")
                if root in self._parts:  # other parts would not be written to
                    tape.fail(f"{site.op} writes to a part of what a saved module has made")
                if root in self._kept_in:
                    self._copy_kept(root)
                if root is None or tape.leaf(root) is not None:
                    self._check_unseen(address, part)
                    self._snapshot(root, address, part, site)
                    self._being_written.append(part)
                if root is not None:
                    roots.append(root)
        tape.add_write(tuple(roots))

    def draw(self, site: CallSite, args: Any, kwargs: Any) -> None:
        """Record the states of the generators from which the next op may draw."""
        if site.has_generator:
            self.snapshots.before_draw(args, kwargs)
        self.random_states.before(generators_of(args, kwargs))

    def finish(
        self,
        mode: TapeMode,
        site: CallSite,
        args: Any,
        kwargs: Any,
        rest: Any,
        reads: list[int],
        keywords: Any,
        out: Any,
    ) -> None:
        """Record an op that has run: add its entry to the tape, decide on its results, and keep the saved ones."""
        tape = self.tape
        entry, first = tape.entry_count(), tape.value_count()
        count = tape.add_entry(site, rest, keywords, reads, out)
        decision, rule, call = Decision.RECOMPUTE, None, None
        if site.has_decision:
            decision, rule, call = self.decide_on(site, args, kwargs, out, first, reads)
        if site.draws:
            self.random_states.after(entry, runs_again=not decision.keeps)
        if site.traits.is_factory and count:
            tape.factories[first] = entry
        elif site.op is LIFT_FRESH and (constant := tape.known(out)) is not None:
            self.keep(constant, out)  # made from Python numbers, which are not arguments of any op
            tape.constants.add(constant)
        if self._being_written:
            self._note_left()
        self._look_at_recent(entry)
        tape.needs_attention = bool(
            tape.not_replayable or tape.watches_factories() or self.maybe_modified or self.paused
        )
        if mode.op_trace is not None:
            mode.op_trace.add(site, rule, decision, args, kwargs, out, call=call)

    def decide_on(
        self, site: CallSite, args: Any, kwargs: Any, out: Any, first: int, reads: list[int]
    ) -> tuple[Decision, ResolvedRule | None, int | None]:
        """Decide on the result of an op, and keep it if it is saved; return the decision, the rule and the call."""
        decision, rule, call = Decision.RECOMPUTE, site.final_rule, None
        if site.may_save or site.conditional_rules:
            call = self.calls[site]
            decision, rule = decide(self, site, args, kwargs, out)
            if decision.keeps and not self._save(site, rule, call, first, out, reads):
                decision = Decision.RECOMPUTE
            self.may_save = self.may_save or site.may_save
        if rule is not None:
            self.hits[rule.index] += 1
        return decision, rule, call

    def _save(
        self, site: CallSite, rule: ResolvedRule | None, call: int, first: int, out: Any, reads: list[int]
    ) -> bool:
        """Keep the results of an op that the policy saves; return whether they can be kept."""
        roots = self.tape.roots
        count = len(roots) - first
        new = [first] if count == 1 else [*range(first, first + count)]
        if not count or min(roots[first:]) < first:  # it returned an argument, or a view of one
            new = [value for value in new if roots[value] >= first]
            if not new or site.must_save:
                return False
        is_known = (site, call) in self.evidence.calls_on_inputs
        if not (site.must_save or is_known) and self._is_of_parameters(site, call, out, reads):
            return False
        number = rule.index if rule is not None else NO_RULE
        tensors = (out,) if count == 1 and type(out) is Tensor else new_tensors(out)
        if type(out) is not Tensor:
            values = iter(range(first, first + count))
            self._structures[first] = map_tensors(out, lambda _: Ref(next(values)))
        for value in new:
            self._keep_routing(site, value, tensors[value - first])
            self._rules[value] = number
        if len(new) < count:  # a compiled graph returns arguments that its backward reads
            for value in range(first, first + count):
                if roots[value] < first:
                    self.tape.find_behind(tensors[value - first], roots[value])
        if site.must_save:
            self._routing.append((site, range(first, first + count)))
        return True

    def _is_of_parameters(self, site: CallSite, call: int, out: Any, reads: list[int]) -> bool:
        """Return whether a result is computed from parameters alone, and large."""
        if self._parameter_only is None:
            self._parameter_only = ParameterOnlyValues(self.tape, self._owners)
        made_of = self._parameter_only.all_of(reads)
        if made_of == NOT_PARAMETERS:
            self.evidence.calls_on_inputs.add((site, call))
        return is_large(out, made_of) and not (site.draws and self.random_states.have_moved())

    def keep(self, value: int, tensor: Tensor) -> None:
        """Keep the data of ``tensor`` as ``value``."""
        # `data` bypasses the dispatcher. It has its own version counter, but the mode sees writes anyway.
        self.tape.kept[value] = tensor.data if type(tensor) is Tensor else detached(tensor)
        self._kept_in.setdefault(self.tape.roots[value], []).append(value)

    def keep_module(self, call: SavedModuleCall, given: list[Any], results: list[Tensor]) -> dict[int, int]:
        """Keep the results of a module that is saved as a whole, and those arguments that it wrote to.

        Return the bytes of their storages, by address. Arguments that it returns, and views of them, are not kept.
        """
        tape, sizes = self.tape, dict[int, int]()
        first_entry, first_value = call.begins
        found = [] if tape.not_replayable else [(tape.find(one, "a saved module"), one) for one in results]
        written = [(tape.known(one), one) for one in given if isinstance(one, Tensor)]
        for value, tensor in (*sorted(found, key=lambda pair: pair[0]), *written):
            if value is None or tape.not_replayable:
                continue
            root = tape.roots[value]
            if tape.writers.get(root, (-1,))[-1] >= first_entry and root not in self._kept_in:
                value = tape.hold_current(tensor)
            elif root < first_value or root in tape.kept or tape.leaf(root) is not None:
                continue
            elif value not in tape.kept:
                self.keep(value, tensor)
                if value != root:
                    self._parts.add(root)
            self._rules[value] = call.rule.index
            sizes.update(storage_sizes(tensor))
        return sizes

    def _keep_routing(self, site: CallSite, value: int, tensor: Tensor) -> None:
        self.keep(value, tensor)
        if site.must_save and self.checksums is not None and not site.is_collective:  # its result is not complete yet
            self._routing_sums[value] = checksum(self.tape.kept[value])

    def sum_up(self, handle: int, tensor: Tensor) -> None:
        """If the call is verified: record the checksum of ``tensor``, which autograd saved as ``handle``."""
        if self.checksums is not None:
            self.checksums[handle] = checksum(tensor, in_order=self._in_order)

    def different(self, values: list[tuple[int, Any]]) -> list[tuple[int, Tensor]]:
        """Return the pairs of ``values`` (handle, value) whose value differs from what autograd saved in forward."""
        assert self.checksums is not None
        there = [(handle, value) for handle, value in values if isinstance(value, Tensor)]
        pairs = [(self.checksums[handle], checksum(value, in_order=self._in_order)) for handle, value in there]
        return [there[position] for position in find_different(pairs)]

    def _look_at_recent(self, entry: int) -> None:
        """Check whether the op that has run wrote to a tensor that autograd saved right before it."""
        if written := self.tape.writes.get(entry):
            for handle, tensor, root in self.recent:
                if root in written:
                    self._wrote_late = True
                    if handle in self._places:
                        self.maybe_modified.append((handle, tensor, self._places[handle][2], entry))
        self.recent = []

    def resolve_maybe_modified(self) -> None:
        """Resolve tensors that autograd saved and the next op wrote to: the write is legal if no version has moved."""
        for handle, tensor, version, entry in self.maybe_modified:
            if tensor._version == version:
                value, _, _ = self._places[handle]
                self._places[handle] = value, entry + 1, version
                self.sum_up(handle, tensor)
        self.maybe_modified.clear()

    def _explain(self, root: int, tensor: Tensor, op: Any) -> None:
        """Keep a factory's result that is read although no op has written to it, unless it is still a constant."""
        tape = self.tape
        entry = tape.factories.pop(root)
        site = tape.sites[entry]
        whole = tensor if tape.known(tensor) == root else tape.tensor_of(root)
        if whole is None:
            tape.fail(f"{op} reads memory that {site.op} made, and that no op has written to")
        elif site.traits.is_uninitialised or not self._is_constant(entry, whole):
            self.keep(root, whole)

    def _is_constant(self, entry: int, tensor: Tensor) -> bool:
        # During a save by autograd, the mode sees the ops of this check.
        tape = self.tape
        (was_paused, needed), self.paused, tape.needs_attention = (self.paused, tape.needs_attention), True, True
        try:
            return _is_constant(tape, entry, tensor, self.evidence)
        finally:
            self.paused, tape.needs_attention = was_paused, needed or bool(tape.not_replayable)

    def _copy_kept(self, root: int) -> None:
        kept = self.tape.kept
        for value in self._kept_in.pop(root):
            kept[value] = kept[value].clone()  # outer modes see the clone, among them those that measure memory

    def _snapshot(self, root: int | None, address: int, tensor: Tensor, site: CallSite) -> None:
        leaf = self.tape.leaf(root) if root is not None else None
        if leaf is not None and leaf.position >= 0:
            assert self._inputs is not None
            self._inputs.copy(address)
            self.wrote_inputs = True
        elif (leaf is not None and leaf.is_persistent) or isinstance(tensor, nn.Parameter):
            if gathers(site) or not (is_plain(tensor) or type(tensor) is nn.Parameter):
                self.tape.fail(f"{site.op} writes to a parameter")
            elif address not in self.snapshots:
                self._written_parameters.add(address)
                self.snapshots.before_write(address, tensor)
        elif site.traits.is_infrastructure:
            # FullyShardedDataParallel (FSDP1) gathers the parameters of a module inside the region and frees them.
            self.tape.fail(f"{site.op} writes to a tensor from outside the region")
        elif not self._settings.freeze_buffers:
            self.tape.fail(f"{site.op} writes to a tensor from outside the region, and freeze_buffers is off")
        else:
            self.snapshots.before_write(address, tensor)

    def _check_unseen(self, address: int, part: Tensor) -> None:
        """An op is about to write: what it finds has to be what the last one left, or what was there at the start."""
        found = small_bytes(part.untyped_storage())
        if found is None:
            return
        expected = self._left.get(address)
        if expected is None:
            before = self.snapshots.at_start(address)
            expected = small_bytes(before) if before is not None else None
        if expected is not None and len(expected) == len(found) and expected != found:
            self.tape.fail(UNSEEN_WRITE)

    def _note_left(self) -> None:
        for part in self._being_written:
            data = small_bytes(part.untyped_storage())
            if data is not None:
                self._left[storage_address(part)] = data
        self._being_written = []

    def check_left(self) -> None:
        """Fail if a small tensor from outside is not as the last op that wrote to it has left it."""
        for address, data in self._left.items():
            snapshot = self.snapshots.get(address)
            storage = snapshot.storage if snapshot is not None else None
            if storage is not None and small_bytes(storage) != data:
                self.tape.fail(UNSEEN_WRITE)


def _fills(site: CallSite) -> bool:
    """Return whether an op, as far as can be known, overwrites what it writes to completely, without reading it."""
    namespace, name = site.op._schema.name.split("::")
    return namespace != "aten" or name in FILLING or site.op._schema.overload_name.endswith("out")


def _writes_parts(site: CallSite) -> bool:
    """Return whether an op may be one of several that fill fresh memory part by part."""
    return site.writes and site.op._schema.name.split("::")[1] in FILLING_PARTS


def _is_constant(tape: Tape, entry: int, tensor: Tensor, evidence: GroupEvidence) -> bool:
    """Return whether ``tensor``, made by the factory op of ``entry``, still equals what that op makes.

    On a device this is checked only once per entry for a region group: the comparison synchronizes with the device,
    and a kernel that writes to such tensors unseen usually does so in every call.
    """
    if tensor.is_meta or tensor._is_zerotensor() or type(tensor).__name__ == "FakeTensor":
        return True  # no data
    site: CallSite = tape.sites[entry]
    shape, answer = evidence.constants.get((site, entry), (None, False))
    if shape != tensor.shape or tensor.is_cpu:
        rest, keywords = tape.call_of(entry)
        args = [tensor if one is TENSOR_HOLE else one for one in rest]
        answer = bool(torch.equal(site.run(*args, **keywords), tensor))
        evidence.constants[site, entry] = tensor.shape, answer
    return answer


# -- The recorder's interface to the frame


class ReplayRecorder(TapeRecorder, Recorder):
    """Applies a decision table to one region call that is replayed in backward; the ``Recorder`` of ``ReplayFrame``."""

    only_chooses = False
    __slots__ = (
        "_buffers",
        "_external",
        "_forgotten",
        "_found",
        "_keeps_persistent",
        "_maybe_external",
        "_persistent_roots",
        "_routed",
        "_routing_results",
        "_rule_at",
        "_served",
        "external_handles",
        "figures",
        "layout",
        "may_fall_back",
        "modified_after_save",
        "native_ops",
        "needs_mode",
        "offloads",
        "op_trace",
        "schedule",
        "serves",
    )

    def __init__(
        self,
        table: DecisionTable,
        path: str,
        owners: tuple[nn.Module, ...],
        settings: Settings,
        op_trace: OpTraceRecorder | None = None,
        *,
        verifies: bool = False,
        layout: TapeLayout | None = None,
        evidence: GroupEvidence | None = None,
    ) -> None:
        super().__init__(table, path, owners, settings, evidence or GroupEvidence(), verifies=verifies)
        self.op_trace = op_trace
        self.native_ops = 0  # recorded by the C++ library
        self.needs_mode = False
        self.figures: SavedFigures | None = None
        self.schedule: ReplaySchedule | None = None  # after the forward
        self.layout = layout  # of an earlier call with the same input signature; after the forward: of this call
        self.modified_after_save: dict[int, int] = {}  # handle that the region wrote to after the save -> saved version
        self.may_fall_back = settings.engine == AUTO  # falls back where replay is worse than rerun; see Note [Auto]
        self.offloads = table.offloads
        self._rule_at: dict[int, int] = {}  # after the forward, if a rule offloads: address of a storage -> rule
        self.external_handles: set[int] = set()  # handles of external tensors, which are kept as they are
        self._forgotten: set[int] = set()  # those that Python, which runs again, finds itself
        self._maybe_external: list[tuple[weakref.ref[Handle], weakref.ref[Tensor], int]] = []
        self._buffers: frozenset[int] | None = None  # ids of the owners' buffers, computed on first use
        self._routed: list[SavedCall] | None = None  # after the forward: what ``routed`` has returned
        # Whether Python, if it runs again, is served what is saved, and what it is served in the run at hand.
        self.serves = True
        self._served: SavedCalls | None = None
        self._found: dict[int, Sums] = {}  # of that run, by handle: checksums of what autograd saves
        self._routing_results: dict[int, Any] = {}  # after the forward: the results of must-save ops, by value
        self._keeps_persistent = True
        self._external: dict[int, Spare] = {}  # small external tensors that replay reads, by address of the storage
        # Roots of inputs and parameters, which the region or the model holds anyway.
        self._persistent_roots: set[int] = set()

    def begin(self, inputs: RegionInputs, leaves: list[Any]) -> None:
        """Prepare for a forward on ``inputs``, whose tensors are among ``leaves``."""
        self._inputs = inputs
        if self.modules is not None:
            self.modules.begin(inputs)
            self.modules.hits = self.hits
        self._in_order = active_hooks() is not None
        self._keeps_persistent = self._settings.early_stop and not self._in_order
        self.tape.persistent_roots = self._persistent_roots if self._keeps_persistent else set()
        for kept in inputs.tensors:
            self.tape.add_leaf(leaves[kept.position], kept.position, lasts=kept.stored is None)

    def unpack_early(self, handle: int, tensor: Tensor) -> None:
        """Record that a gradient inside the region's own forward reads ``tensor``, a replayed value, as ``handle``."""
        self.tape.recognise(tensor, self._places[handle][0])

    def set_start(self, module_state: ModuleState, handles: Handles) -> None:
        """See ``Recorder.set_start``."""
        self.snapshots.at_start = module_state.at_start

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the mode that writes the tape."""
        return TapeMode(self, self.op_trace)

    def pack(self, tensor: Tensor, handle: Handle) -> None:
        """Record which value autograd saves with ``tensor``; keep it if that is free or the tape does not know it."""
        tape = self.tape
        if self.paused:
            return
        value = tape.known(tensor)
        version = tensor._version
        if value is not None:
            if version != tape.version(value):
                value = tape.look_at_version(tensor, value)
            elif tape.has_moved(tensor, value):
                value = tape.hold_current(tensor)
        elif (
            tape.is_known(tensor)
            or cast_of(tensor) is not None
            or (tensor.grad_fn is not None and id(tensor) in tape.external_tensors)
        ):
            value = tape.find(tensor, "autograd")
        else:
            self._pack_external(tensor, handle)
            return
        root = tape.roots[value]
        if root in tape.factories and root not in tape.kept:
            self._explain(root, tensor, None)
        if root in self._kept_in:
            handle.keep(tensor)
            handle.storage = storage_address(tensor)
            self.note_recent(handle.index, tensor, root)
            return
        leaf = tape.leaf(root)  # None if FSDP has allocated the storage of a parameter inside the region
        is_written = root in tape.writers
        is_parameter = leaf is not None and leaf.position < 0 and leaf.is_persistent
        if (root in self._persistent_roots and not is_written) or (is_parameter and is_written):
            # Keep the tensor itself: it is one of the ancestors that autograd holds anyway. The same is true of a
            # parameter that the region has written to: if it is written to once more, backward sees that as usual.
            handle.is_kept = handle.is_external = True
            handle.version = version
            handle.value = handle.watched = tensor
            return
        self._places[handle.index] = value, tape.entry_count(), version
        self.note_recent(handle.index, tensor, root)
        self.sum_up(handle.index, tensor)

    def _pack_external(self, tensor: Tensor, handle: Handle) -> None:
        """Handle a saved tensor that no op of the region produced: an external tensor, or an unseen result."""
        handle.storage = storage_address(tensor)
        handle.is_external = isinstance(tensor, nn.Parameter) or self._is_buffer(tensor)
        if handle.is_external or not self.may_fall_back or tensor.numel() <= SMALL_NUMEL:
            handle.keep(tensor)
            if type(tensor) is not nn.Parameter:
                self.external_handles.add(handle.index)
        else:
            self._maybe_external.append((weakref.ref(handle), weakref.ref(tensor), version_of(tensor)))
            if tensor.grad_fn is not None:  # an unseen result
                self.sum_up(handle.index, tensor)

    def _is_buffer(self, tensor: Tensor) -> bool:
        if self._buffers is None:
            self._buffers = frozenset(id(buffer) for owner in self._owners for buffer in owner._buffers.values())
        return id(tensor) in self._buffers

    def hold_external(self) -> None:
        """Keep the external tensors that autograd has saved, which is free; if one was freed, replay is not possible.

        A tensor with a graph that no op produced is the result of an unseen kernel, and others may release it any time.
        """
        for handle_of, tensor_of, version in self._maybe_external:
            handle, tensor = handle_of(), tensor_of()
            if handle is None:
                continue
            if tensor is None or tensor.grad_fn is not None or version_of(tensor) != version:
                self.tape.fail("autograd saves a tensor that no op made")
                if tensor is not None and storage_bytes(tensor) and handle.index not in (self.checksums or ()):
                    self.sum_up(handle.index, tensor)
            else:
                handle.keep(tensor)
                handle.is_external = True
                self.external_handles.add(handle.index)
        self._maybe_external.clear()

    def forget_external(self, handles: Iterable[Handle]) -> None:
        """Release external tensors from ``handles``: Python runs again and finds them itself, advancing buffers."""
        for handle in handles:
            if handle.index in self.external_handles:
                handle.is_kept, handle.value, handle.watched = False, None, None
        self._forgotten |= self.external_handles
        self.external_handles.clear()

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """See ``end``; the frame of this recorder calls that."""
        raise AssertionError("a tape is closed by its own frame")

    def may_run_again(self, kept: list[Handle], missing: list[int]) -> bool:
        """Return whether backward may need to recompute: external tensors may change and then have to be read again."""
        if missing or not (self.may_fall_back and self.external_handles):
            return bool(missing)
        return not self.external_handles.isdisjoint(handle.index for handle in kept)

    def end(self, kept: list[Handle], missing: list[int]) -> None:
        """End the forward: compute the replay schedule, and release everything that it does not need."""
        tape = self.tape
        self.recent = []
        if self.maybe_modified:
            self.resolve_maybe_modified()
        if self._left:
            self.check_left()
            self._left = {}
        if self.snapshots:
            self.snapshots.forget_freed()
        self.needs_mode = self.may_save or bool(
            self.snapshots or self.snapshots.generators or self._wrote_late or self.wrote_inputs
        )
        if tape.writers and not tape.not_replayable:
            self._find_modified_after_save(missing)
        if not tape.not_replayable:
            layout = self.layout
            if layout is None or not layout.matches(tape, self._places, missing):
                layout = TapeLayout(tape, self._places, missing, self.schedule_of(missing))
            self.layout = layout
            self.schedule = layout.schedule
            self._check_leaves()
            self._check_kept()
            if self.may_fall_back:
                self._check_unsaved(kept)
        served: list[int] = []
        if tape.not_replayable:
            self.schedule = self.layout = None
            for address in self._gathered - self._written_parameters:
                self.snapshots.pop(address, None)
            if self.may_run_again(kept, missing):
                self.forget_external(kept)
                kept[:] = [handle for handle in kept if handle.is_kept]
                served = self._needed_by_python(kept, missing)
        self._hold_routing()
        if self.offloads:
            self._rule_at = {
                storage_address(part): self._rules[value]
                for value in tape.kept.keys() & self._rules.keys()
                for part in tensor_parts(tape.kept[value])
            }
        held = {address for tensor in tape.kept.values() for address in storage_sizes(tensor)} if self.modules else ()
        self._release(kept, served)
        if self.modules is not None and self.figures is not None:
            self.modules.close(0, held)
            self.figures = self.figures.with_more(self.modules.evidence.bytes_inside)
        tape.close()

    def _needed_by_python(self, kept: list[Handle], missing: list[int]) -> list[int]:
        """Return the entries whose saved results Python may be served; see Note [What is kept, and what is not]."""
        tape, early_stop = self.tape, self._settings.early_stop
        missing = sorted({*missing, *self._forgotten})
        place = self._places.get(missing[-1]) if early_stop else None
        last = place[1] if place is not None else tape.entry_count()
        in_handles = {handle.storage for handle in kept}
        saved, read = self._saved_entries(), set[int]()
        for entry, site in enumerate(tape.sites):
            if type(site) is CallSite and entry not in saved and not site.is_view:
                read.update(tape.roots[value] for value in tape.reads[entry])

        def is_needed(entry: int) -> bool:
            site, values = tape.sites[entry], tape.results(entry)
            if site.must_save or not site.is_cheap or entry in tape.states_after:
                return True
            if any(tape.roots[value] in read or tape.roots[value] not in self._kept_in for value in values):
                return True
            return any(not in_handles.isdisjoint(storage_sizes(tape.kept[value])) for value in values)

        return [entry for entry in saved if entry < last and is_needed(entry)]

    def _saved_entries(self) -> dict[int, CallSite]:
        """Return the entries of which all results are held, and are as their ops have returned them."""
        tape, held = self.tape, self._rules.keys() & self.tape.kept.keys() - self.tape.overwritten
        return {
            entry: site
            for entry, site in enumerate(tape.sites)
            if type(site) is CallSite
            and not site.is_inside
            and (values := tape.results(entry))
            and held.issuperset(values)
            and tape.states_after.get(entry, ()) is not None
            and self._structure_of(site, values) is not None
        }

    def _structure_of(self, site: CallSite, values: Sequence[int]) -> Any:
        known = self._structures.get(values[0]) if values else None
        return known if known is not None else structure_of(site.op, values[0], len(values)) if values else None

    def begin_serving(self, waiting: Iterable[int]) -> bool:
        """Let the next run of the region's Python be served what is saved; return whether it is.

        It is not if there is nothing, or if it could not be compared whether the handles ``waiting`` get what autograd
        saved in the forward.
        """
        self._served = None
        compared = self.checksums is None or self._forgotten.union(self.checksums).issuperset(waiting)
        if not (self.serves and self.evidence.serves and compared):
            return False
        tape, calls = self.tape, dict[int, SavedCall]()
        known = {id(one.outputs[0]): one for one in self.routed() if one.outputs}
        for entry, site in self._saved_entries().items():
            values = tape.results(entry)
            outputs = [self._saved_result(value) for value in values]
            call = known.get(id(outputs[0])) or SavedCall(site, outputs, self._structure_of(site, values))
            call.states_after = tape.states_after.get(entry) or []
            calls[entry] = call
        if any(not call.site.must_save for call in calls.values()):
            self._served = SavedCalls.of(tape, calls)
        return self._served is not None

    def _note_found(self, index: int, tensor: Tensor) -> None:
        self._found[index] = checksum(tensor, in_order=self._in_order)

    def found_different(self, handles: Mapping[int, Handle]) -> list[tuple[int, Tensor]]:
        """Return those of ``handles``, with their values, that a served run has not given what autograd saved.

        The present data counts too: an op or NumPy may have written to it after autograd saved it.
        """
        if self.checksums is None:
            return []
        compared = [index for index in handles if index in self.checksums and index in self._found]
        pairs = [(self.checksums[index], self._found[index]) for index in compared]
        values = ((compared[number], handles[compared[number]].value) for number in find_different(pairs))
        suspects = [(index, value) for index, value in values if isinstance(value, Tensor)]
        gone = [one for one in suspects if not storage_bytes(one[1])]  # gathered parameters that FSDP has freed
        found = gone + self.different([one for one in suspects if storage_bytes(one[1])])
        return [(index, value) for index, value in found if not self.may_differ(index, value.device)]

    def end_serving(self) -> None:
        """Serve nothing but results of routing ops from now on."""
        self.serves, self._served = False, None

    def _saved_result(self, value: int) -> SavedResult:
        kept = self.tape.kept
        found: SavedResult | Tensor = kept[value]
        if isinstance(found, Tensor):
            found = kept[value] = SavedResult(found)
        return found

    def _hold_routing(self) -> None:
        """Hold the results of must-save ops, whether or not replay starts from them."""
        kept = self.tape.kept
        self._routing_results = {value: kept[value] for _, values in self._routing for value in values}

    def routed(self) -> list[SavedCall]:
        """Return the calls of must-save ops with their results: Python, if it runs again, does not choose anew."""
        if not self._routing_results:  # of a forward that runs, too
            return []
        if self._routed is None:
            kept, results = self.tape.kept, self._routing_results
            for value, one in results.items():
                if isinstance(one, Tensor):
                    results[value] = saved = SavedResult(one)
                    saved.written = self.tape.roots[value] not in self._kept_in
                if value in kept:
                    kept[value] = results[value]
            self._routed = []
            for site, values in self._routing:
                sums = tuple(total for value in values for total in self._routing_sums.get(value, ()))
                outputs = [results[value] for value in values]
                self._routed.append(SavedCall(site, outputs, self._structure_of(site, values), sums=sums))
        return self._routed

    def wanted(self, handles: list[int]) -> list[Wanted]:
        """Return what the tape knows of these handles, without those that were modified after the save."""
        saved_at = self._places
        return [Wanted(handle, *saved_at[handle][:2]) for handle in handles if handle not in self.modified_after_save]

    def schedule_of(self, handles: list[int]) -> ReplaySchedule:
        """Return the replay schedule for these handles."""
        return schedule_replay(
            self.tape, self.wanted(handles), early_stop=self._settings.early_stop, whole=self.schedule
        )

    def held(self) -> Held:
        """See ``Recorder.held``. Rules that offload let the results of routing ops stay, as plans expect."""
        self.routed()
        kept, routed = self.tape.kept, self._routing_results
        for value, one in kept.items():
            if isinstance(one, Tensor):
                kept[value] = SavedResult(one)
        for value, saved in {**kept, **routed}.items():
            if not (self.offloads and value in routed):
                yield saved, self._rules.get(value)
        if self.modules is not None:
            yield from self.modules.held()

    def rule_of(self, handle: Handle) -> int | None:
        """See ``Recorder.rule_of``."""
        return self._rule_at.get(handle.storage)

    def recompute_mode(self, inputs: list[tuple[int, Tensor]], progress: Progress) -> AbstractContextManager[Any]:
        """Return the context in which the region's Python runs again if the tape cannot be replayed."""
        if self.compares_python:
            progress.verify = self._check_filled
        served, self._served = self._served, None
        if served is not None:
            self._found = {}
            progress.verify = self._note_found if self.checksums is not None else None
        return PythonRecomputeMode(
            self.table, self.path, self.snapshots, self.routed(), progress, self.modules, served, inputs
        )

    def drop(self) -> None:
        """Release every kept value."""
        self.tape.drop()
        self.schedule = None
        self.snapshots.drop()
        self._places, self._left, self._external = {}, {}, {}
        self._routing, self._routing_results, self._routed = [], {}, None
        self.checksums = None

    @property
    def has_collectives(self) -> bool:
        """Whether other ranks take part in a replay: in a collective on the tape, or in an op on a DTensor."""
        return self.tape.has_meshes or any(getattr(site, "is_collective", False) for site in self.tape.sites)

    def _check_filled(self, index: int, tensor: Tensor) -> None:
        """Raise ``RegionError`` if Python has saved another value than autograd saved as ``index`` in the forward."""
        summed = self.checksums is not None and index in self.checksums
        if summed and self.different([(index, tensor)]) and not self.may_differ(index, tensor.device):
            found = f"saved tensor {index} was another value in forward than in recomputation, {describe(tensor)}"
            raise RegionError(Problem(self.path or "region", found, fix=OTHER_VALUE))

    def may_differ(self, handle: int, device: torch.device) -> bool:
        """Return whether what autograd saved as ``handle`` depends on ops that are nondeterministic on ``device``."""
        names = nondeterministic_on(device)
        return bool(names) and handle in self._places and may_differ(self.tape, self._places[handle][0], names)

    def _find_modified_after_save(self, missing: list[int]) -> None:
        """Find saved tensors written to after the save: backward reads the new data, raises, or replay is given up."""
        tape = self.tape
        found = self.written_after_save(missing)
        alive = tape.alive() if found else {}
        for handle in found:
            value, _, version = self._places[handle]
            tensor = alive.get(value)
            if tensor is not None and tensor._version == version:
                self._places[handle] = value, tape.entry_count(), version
                self.sum_up(handle, tensor)
            elif tensor is None or self.may_fall_back:
                # Autograd's own GRU cells write to one output of `unsafe_chunk` after they have saved another.
                writer = tape.sites[tape.writers[tape.roots[value]][-1]].op
                tape.fail(f"{writer} writes to memory in which autograd saved a tensor before")
            else:
                self.modified_after_save[handle] = version

    def written_after_save(self, missing: list[int]) -> list[int]:
        """Return those of the handles ``missing`` in whose memory an op wrote after autograd had saved them."""
        roots, writers = self.tape.roots, self.tape.writers
        saved_at = ((handle, *self._places[handle][:2]) for handle in missing)
        return [handle for handle, value, time in saved_at if writers.get(roots[value], (-1,))[-1] >= time]

    def leaves_to_look_at(self, leaves: list[int]) -> Sequence[int]:
        """Return those of ``leaves`` that may be gone, or small enough to be copied."""
        return leaves

    def _check_leaves(self) -> None:
        """Check that the leaves still exist; nothing holds them, so one freed by now is missing in backward."""
        assert self.schedule is not None
        tape = self.tape
        for value in self.leaves_to_look_at(self.schedule.leaves):
            leaf = tape.leaf(value)
            assert leaf is not None
            if leaf.position < 0 and leaf.tensor() is None:
                reader = next(
                    (tape.sites[one.number] for one in self.schedule.steps if value in tape.reads[one.number]), None
                )
                name = getattr(reader, "op", "autograd")
                tape.fail(f"{name} reads a tensor that no op made, and that nothing keeps alive")
            elif leaf.position < 0 and not leaf.is_persistent:
                self._copy_small(leaf.tensor())

    def _copy_small(self, tensor: Tensor) -> None:
        """Copy an external tensor that replay reads, if it is small: it may be written to before the replay."""
        if is_plain(tensor) and tensor.layout is torch.strided and not tensor.is_inference():
            storage = tensor.untyped_storage()
            if storage._cdata not in self.snapshots and storage.nbytes() <= MOST_COPIED_BYTES_UNRECORDED:
                self._external[storage._cdata] = Spare(detached(tensor), MOST_COPIED_BYTES_UNRECORDED)

    @property
    def has_external(self) -> bool:
        """Whether replay reads small external tensors."""
        return bool(self._external)

    def changed_external(self) -> dict[int, torch.UntypedStorage]:
        """Return the forward's data of small external tensors that were written to since, by address of the storage."""
        changed = ((address, one.copy) for address, one in self._external.items() if one.was_changed)
        return {address: copy for address, copy in changed if copy is not None}

    def _check_kept(self) -> None:
        """Check that no unseen write has modified a saved result: the policy's results are kept without a copy."""
        assert self.schedule is not None
        for value in self.schedule.kept:
            if value in self.tape.overwritten:
                self.tape.fail(
                    f"a result that the policy saves ({describe(self.tape.kept[value])}) was modified, but not by an op"
                )

    def _check_unsaved(self, kept: list[Handle]) -> None:
        """Fall back if replay would keep large values that the policy does not save, which rerun would recompute."""
        assert self.schedule is not None
        large = [value for value in self.tape.kept.keys() - self._rules.keys() if self._is_large(value)]
        if large:
            in_handles = {handle.storage for handle in kept}
            for value in large:
                tensor = self.tape.kept[value]
                if value in self.schedule.kept or any(
                    storage_address(part) in in_handles for part in tensor_parts(tensor)
                ):
                    self.tape.fail(f"replay would hold what the policy does not save ({describe(tensor)})")

    def _is_large(self, value: int) -> bool:
        return bool(self.tape.kept[value].numel() > SMALL_NUMEL)

    def _release(self, kept: list[Handle], served: list[int]) -> None:
        """Keep only the values that replay starts from, or the results of the entries ``served``; count their bytes."""
        tape, layout = self.tape, self.layout
        kept_values: Iterable[int] = (value for entry in served for value in tape.results(entry))
        if self.schedule is not None:
            kept_values = self.schedule.kept
        held: dict[int, Any] = {value: tape.kept[value] for value in kept_values}
        loose = [handle for handle in kept if not handle.is_external]
        parts: dict[int, SavedResult] = {}
        if self._parts:
            parts = {value: SavedResult(held[value]) for value in held if tape.roots[value] in self._parts}
        sizes: Any = None
        alone: Iterable[Handle]  # handles in whose storage no value stays
        found = self.look_at_kept(held, loose) if layout is not None and not parts else None
        if found is not None:
            sizes, alone = found
        else:
            if layout is not None:
                sizes = _sizes_of(tape.kept, loose, held)
            whole = (tensor for value, tensor in held.items() if value not in parts)
            addresses = {storage_address(part) for tensor in whole for part in tensor_parts(tensor)} if loose else ()
            alone = (handle for handle in loose if handle.storage not in addresses)
        if small := [*parts.values(), *alone]:
            compact(small)
            tape.kept.update((value, one.on_device) for value, one in parts.items() if one.on_device is not None)
        if layout is not None and sizes is not None and layout.sizes == sizes:
            self.figures = layout.figures
        else:
            stays = [*held, *self._routing_results]
            self.figures = figures_of_tape(tape.kept, stays, loose, self._rules, self.hits)
            if layout is not None:
                layout.sizes, layout.figures = sizes, self.figures
        tape.kept = held | parts
        self.random_states.close(
            {step.number for step in self.schedule.steps} if self.schedule is not None and tape.states else set(),
            {*served},
        )

    def look_at_kept(self, held: dict[int, Any], loose: list[Handle]) -> tuple[Any, list[Handle]] | None:
        """Return what ``_sizes_of`` does, and the handles in whose storage no value of ``held`` lies.

        None: it is not known; the C++ library knows it for plain tensors.
        """
        return None
