"""The replay engine with the optional native library: ordinary ops are recorded and replayed in C++."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from sac.checksums import checksum
from sac.policy.model import Decision
from sac.recompute.module_tracker import RegionMode
from sac.recompute.op_trace import NO_RULE
from sac.recompute.recorder import ReplayRecorder, TapeMode, _fills, _writes_parts
from sac.recompute.replay import Before, Filled, ReplayFrame, generators_kept, leaf_as_then, run_unusual, wait
from sac.recompute.rerun import LIFT_FRESH
from sac.recompute.schedule import ReplaySchedule
from sac.recompute.table import CallSite, gathers
from sac.recompute.tape import SMALL_NUMEL, TENSOR_HOLE, Held, Leaf, Tape
from sac.region.frame import Handle
from sac.region.module_state import MOST_COPIED_BYTES_UNRECORDED
from sac.region.native_frame import WithNativeHandles
from sac.stores.saved_tensor import compact
from sac.torch_private import OpOverload

# Note [The native recorder]
#
# The library changes time only. An op is *ordinary* if it is one of torch's own that writes to at most one argument,
# which it returns, is no collective, and if no rule looks at its arguments (`is_run_natively`). While a `NativeMode` is
# on top of the stack of dispatch modes, torch's interpreter table, which the library has wrapped, records an ordinary
# op on the tape without a trip into Python. It does what `TapeMode` does, in the same place: below autograd, the mode
# off the stack. Every other op goes to `NativeMode.__torch_dispatch__` as if there were no library. So does an ordinary
# op if the tape needs attention, or if Python has to look at one of its tensors: a tensor subclass, one that something
# unseen has written to, fresh memory that it reads, one to be written to that no op of the region has made.
#
# There is one tape. Its values and entries are in C++, and `NativeTape` gives Python the methods and lists of `Tape` on
# them. What only some entries have is in Python's dictionaries, as without the library.
#
# Two steps have a short way, which a call takes if nothing about it is unusual. A tape with the layout of the last one
# is closed with few questions (`_ends_as_before`). A replay is one call of the library, which loads, runs, compares and
# fills the handles (`_replay_at_once`). Each decides before it changes or runs anything, and else leaves all of the
# step to the code that it is short for. A replay leaves that code the comparison, too, if a value is not as it was, or
# has no checksum of the library's.
#
# Example. A region runs `h = up(x); h = dropout(h); down(h)`. `t`, `mm`, and `empty_like`, `bernoulli_`, `div_` and
# `mul` of the dropout are recorded in C++. So are the generator's states around `bernoulli_`, of which Python is told
# when the forward ends (`RandomOpStates.catch_up`). With a generator of the user, or on a GPU, Python would run it and
# append its entry to the same tape. An `mm` that a rule saves asks Python whether it is computed from parameters alone;
# from the second call of the region on, the library knows. In backward, the library runs the schedule without the GIL,
# and takes it to put the generator where `bernoulli_` found it.

_IN_CPP = (
    *("known", "has_moved", "number", "entry_count", "value_count", "append", "version", "set_version", "root_at"),
    *("record_storage", "sync", "tensor_of", "alive", "layout", "has_layout", "forget_tensors", "take_draws"),
    "note_left",
)


class NativeTape(Tape):
    """A tape whose values and entries are in C++; see Note [The native recorder]."""

    __slots__ = ("_leaves", "_lists", "native")

    def __init__(self, library: Any) -> None:
        self.native: Any = library.Tape()
        super().__init__()

    def begin(self) -> None:
        """Make the lists in which Python reads the entries."""
        self.native.drop()
        self._lists: tuple[list[Any], ...] = [], [], [], [], []

    def arguments(self, entry: int) -> tuple[Any, Any]:
        """See ``Tape``."""
        found = self.native.arguments(entry, TENSOR_HOLE)
        return (found, {}) if found is not None else super().arguments(entry)

    def call_of(self, entry: int) -> tuple[Any, Any]:
        """See ``Tape``."""
        rest, keywords = self.arguments(entry)
        if keywords or self.native.arguments(entry, TENSOR_HOLE) is None:
            return rest, keywords
        schema = self.sites[entry].op._schema.arguments
        named = [one.kwarg_only for one in schema]
        return (
            [one for one, is_named in zip(rest, named, strict=True) if not is_named],
            {argument.name: one for argument, one in zip(schema, rest, strict=True) if argument.kwarg_only},
        )

    def watch(self, value: int, tensor: Tensor) -> None:
        """See ``Tape``."""
        self.native.watch(value)

    def watches_factories(self) -> bool:
        """The library leaves an op that reads what a factory has made to Python."""
        return False

    @property
    def factories(self) -> MutableMapping[int, int]:
        """See ``Tape``."""
        return _Factories(self.native)

    @factories.setter
    def factories(self, value: MutableMapping[int, int]) -> None:
        assert not value  # a new tape has none, and `forget_tensors` releases them

    # Parameters that the library has met are leaves too; Python is told of them when it looks.

    @property
    def leaves(self) -> dict[int, Leaf]:
        """The leaves, by value."""
        if told := self.native.tell_parameters():
            roots = self.roots
            for value, parameter, version, shape in told:
                reference = weakref.ref(parameter) if parameter is not None else _gone
                self._leaves[value] = _ParameterLeaf(-1, reference, version, torch.Size(shape), True)
                self.persistent_roots.add(roots[value])
        return self._leaves

    @leaves.setter
    def leaves(self, value: dict[int, Leaf]) -> None:
        self._leaves = value

    def leaf(self, value: int) -> Leaf | None:
        """See ``Tape``."""
        return self._leaves.get(value) or self.leaves.get(value)

    def set_leaf(self, value: int, leaf: Leaf) -> None:
        """See ``Tape``."""
        self._leaves[value] = leaf

    def add_leaf(self, tensor: Tensor, position: int = -1, *, lasts: bool = True) -> int:
        """See ``Tape``."""
        value: int | None = self.native.add_input(tensor) if position >= 0 else None
        if value is None:
            return super().add_leaf(tensor, position, lasts=lasts)
        self._leaves[value] = Leaf(position, weakref.ref(tensor), tensor._version, tensor.shape, lasts)
        if lasts:
            self.persistent_roots.add(self.native.root_of(value))
        return value

    def add_external(self, tensor: Tensor, value: int, version: int) -> None:
        """Add the leaf of a plain tensor from outside that has no graph; see ``add_leaf``."""
        is_held = tensor.numel() <= SMALL_NUMEL or id(tensor) in self.external_tensors
        held = Held(tensor) if is_held else weakref.ref(tensor)
        self._leaves[value] = Leaf(-1, held, version, tensor.shape, False)

    def leaf_positions(self) -> list[tuple[int, int]]:
        """Return each leaf with its position, except for those that ``has_layout`` compares."""
        return [(value, leaf.position) for value, leaf in self._leaves.items() if type(leaf) is Leaf]

    def leaf_ids(self, values: Sequence[int]) -> frozenset[int]:
        """See ``Tape``."""
        return super().leaf_ids(self.native.leaves_to_check(values)) | self.native.parameter_ids(values)  # type: ignore[no-any-return]

    # Each list grows when it is read.

    @property
    def sites(self) -> list[Any]:  # type: ignore[override]
        """The call site of each entry."""
        return self.native.sites(self._lists[0])  # type: ignore[no-any-return]

    @property
    def arg_templates(self) -> list[Any]:  # type: ignore[override]
        """The arguments of each entry that Python wrote; None for the others."""
        return self.native.templates(self._lists[1])  # type: ignore[no-any-return]

    @property
    def reads(self) -> list[Sequence[int]]:  # type: ignore[override]
        """The values that each entry reads."""
        return self.native.reads(self._lists[2])  # type: ignore[no-any-return]

    @property
    def first_outputs(self) -> list[int]:  # type: ignore[override]
        """The number of each entry's first result."""
        return self.native.first_outputs(self._lists[3])  # type: ignore[no-any-return]

    @property
    def roots(self) -> list[int]:  # type: ignore[override]
        """The root of each value."""
        return self.native.roots(self._lists[4])  # type: ignore[no-any-return]

    @property
    def needs_attention(self) -> bool:
        """Whether the next op needs the slow path."""
        return self.native.needs_attention  # type: ignore[no-any-return]

    @needs_attention.setter
    def needs_attention(self, value: bool) -> None:
        self.native.needs_attention = value


for _name in _IN_CPP:  # so that a tape need not hold them
    setattr(NativeTape, _name, property(attrgetter(f"native.{_name}")))


class _Factories(MutableMapping[int, int]):
    """The roots that factories have made, which the library has."""

    __slots__ = ("_native",)

    def __init__(self, native: Any) -> None:
        self._native = native

    def __len__(self) -> int:
        return self._native.factory_count()  # type: ignore[no-any-return]

    def __iter__(self) -> Any:
        raise TypeError("factories are looked up by root")

    def __getitem__(self, root: int) -> int:
        entry = self._native.factory(root)
        if entry is None:
            raise KeyError(root)
        return entry  # type: ignore[no-any-return]

    def __setitem__(self, root: int, entry: int) -> None:
        self._native.add_factory(root, entry)

    def __delitem__(self, root: int) -> None:
        self._native.remove_factory(root)


class _ParameterLeaf(Leaf):
    """A leaf that the library has met."""

    __slots__ = ()


def _gone() -> None:
    """Stand for a weak reference to a tensor that is gone."""


class _Counts(MutableMapping[Any, int]):
    """Counts of the library by call site, or by rule."""

    __slots__ = ("_get", "_put")

    def __init__(self, get: Any, put: Any) -> None:
        self._get, self._put = get, put

    def __getitem__(self, key: Any) -> int:
        return self._get(key)  # type: ignore[no-any-return]

    def __setitem__(self, key: Any, value: int) -> None:
        self._put(key, value)

    def __delitem__(self, key: Any) -> None:
        raise TypeError("counts are not deleted")

    def __iter__(self) -> Any:
        raise TypeError("counts are looked up by key")

    def __len__(self) -> int:
        raise TypeError("counts are looked up by key")


class NativeReplayRecorder(ReplayRecorder):
    """A recorder of which the library runs the ordinary part."""

    __slots__ = ("library",)
    tape: NativeTape

    def __init__(self, library: Any, *args: Any, **more: Any) -> None:
        self.library = library
        super().__init__(*args, **more)
        native = self.tape.native
        self._places = library.Places()
        if self.checksums is not None:
            self.checksums = library.Checksums()
        self.calls = _Counts(native.calls, native.set_calls)
        self.alternations = _Counts(native.alternations, native.set_alternations)

    def new_tape(self) -> Tape:
        """See ``TapeRecorder``."""
        return NativeTape(self.library)

    @property
    def recent(self) -> list[tuple[int, Tensor, int]]:
        """What autograd has saved since the last op."""
        return self.tape.native.recent()  # type: ignore[no-any-return]

    @recent.setter
    def recent(self, value: list[Any]) -> None:
        assert not value
        self.tape.native.clear_recent()

    def note_recent(self, handle: int, tensor: Tensor, root: int) -> None:
        """See ``TapeRecorder``."""
        self.tape.native.note_recent(handle, tensor, root)

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the mode that writes the tape."""
        return _mode_type(self.library)(self)  # type: ignore[no-any-return]

    def finish_native(
        self, site: CallSite, out: Any, first: int, count: int, reads: list[int], drawn_from: Tensor | None
    ) -> bool:
        """Finish an op that the library has recorded as the last entry; see ``TapeRecorder.finish``.

        ``drawn_from``: the state of the default generator before the op, if the op has drawn from it. Return whether
        the op's result is known to depend on more than parameters.
        """
        entry = self.tape.entry_count() - 1
        call = self.calls[site]
        if count != 1:
            self.tape.output_counts[entry] = count
        if drawn_from is not None:
            self.random_states.drew(drawn_from)
        decision = Decision.RECOMPUTE
        if site.has_decision:
            decision, _, _ = self.decide_on(site, (), {}, out, first, reads)
        if drawn_from is not None:
            self.random_states.after(entry, runs_again=not decision.keeps)
        return (site, call) in self.evidence.calls_on_inputs

    def tables(self) -> tuple[Any, ...]:
        """Return the tables that the library reads and writes during the forward."""
        tape = self.tape
        return (
            *(tape.kept, tape.kept_in, tape.persistent_roots, tape.output_counts, tape.writers, tape.writes),
            *(tape.seen_at, tape._leaves, tape.unpacked_early, self._rules, self._parts, self._routing),
            self._routing_sums if self.checksums is not None else None,
        )

    def note_late_write(self, entry: int) -> None:
        """Check what autograd has saved right before the op of ``entry``, which has just run; see ``finish``."""
        tape = self.tape
        self._look_at_recent(entry)
        tape.needs_attention = bool(tape.not_replayable or self.maybe_modified or self.paused)

    def sum_up_routing(self, value: int) -> None:
        """Record the checksum of a result of a must-save op, which the library does not compute."""
        self._routing_sums[value] = checksum(self.tape.kept[value])

    def different(self, values: list[tuple[int, Any]]) -> list[tuple[int, Tensor]]:
        """See ``TapeRecorder``."""
        found, others = self.library.find_different(values, self.checksums, self._in_order)
        return found + super().different(others) if others else found  # type: ignore[no-any-return]

    def look_at_kept(self, held: dict[int, Any], loose: list[Handle]) -> tuple[Any, list[Handle]] | None:
        """See ``ReplayRecorder``."""
        return self.library.look_at_kept(self.tape.kept, held, loose)  # type: ignore[no-any-return]

    def leaves_to_look_at(self, leaves: list[int]) -> Sequence[int]:
        """See ``ReplayRecorder``."""
        tape = self.tape
        return self.library.leaves_to_look_at(tape.native, tape._leaves, leaves, MOST_COPIED_BYTES_UNRECORDED)  # type: ignore[no-any-return]

    def written_after_save(self, missing: list[int]) -> list[int]:
        """See ``ReplayRecorder``."""
        tape = self.tape
        return self.library.written_after_save(self._places, tape.native, tape.writers, missing)  # type: ignore[no-any-return]

    def end(self, kept: list[Handle], missing: list[int]) -> None:
        """See ``ReplayRecorder``."""
        native = self.tape.native
        self.random_states.catch_up()
        for rule, count in native.hits().items():
            self.hits[rule] += count
        self.may_save = self.may_save or native.may_save
        self.native_ops = native.recorded
        if not self._ends_as_before(kept, missing):
            super().end(kept, missing)

    def _ends_as_before(self, kept: list[Handle], missing: list[int]) -> bool:
        """Do what ``end`` does if nothing on this tape is unusual, and the last one had its layout; return whether."""
        tape, layout, snapshots = self.tape, self.layout, self.snapshots
        if (
            layout is None
            or layout.figures is None
            or tape.not_replayable
            or tape.overwritten
            or tape.states_after
            or self.maybe_modified
            or self.wrote_inputs
            or snapshots
            or snapshots.generators
            or self._left
            or self._parts
            or self.offloads
            or self.modules is not None
            or (self.may_fall_back and tape.kept.keys() != self._rules.keys())
        ):
            return False
        if tape.writers:
            self._find_modified_after_save(missing)
        if self.modified_after_save or not layout.matches(tape, self._places, missing):
            return False
        self.schedule = schedule = layout.schedule
        self._check_leaves()
        if tape.not_replayable:
            return False
        held = {value: tape.kept[value] for value in schedule.kept}
        found = self.library.look_at_kept(tape.kept, held, [one for one in kept if not one.is_external])
        if found is None or found[0] != layout.sizes:
            return False
        if found[1]:
            compact(found[1])
        self.needs_mode = self.may_save or self._wrote_late
        self.figures = layout.figures
        self._hold_routing()
        tape.kept = held
        self.random_states.close({step.number for step in schedule.steps} if tape.states else set(), ())
        tape.close()
        return True


class NativeReplayFrame(WithNativeHandles, ReplayFrame):
    """A frame whose hooks and whose replay are in C++."""

    recorder: NativeReplayRecorder

    @property
    def runner(self) -> _NativeRunner:  # type: ignore[override]
        """See ``ReplayFrame``."""
        return _runner(self._library)

    def _saved_tensor_hooks(self) -> tuple[Any, Any]:
        recorder, tape = self.recorder, self.recorder.tape
        hooks = self._library.Hooks(
            tape.native,
            self._handles,
            self._handle_type,
            self,
            recorder,
            recorder._places,
            tape.kept_in,
            tape.writers,
            recorder._persistent_roots,
            recorder.checksums,
            recorder._in_order,
            recorder._keeps_persistent,
        )
        return hooks.pack, hooks.unpack

    def _replay_at_once(self, task: int) -> bool:
        """See ``ReplayFrame``. What is unusual is left to Python, before anything runs."""
        recorder, ambient = self.recorder, self.ambient
        schedule, tape, module_state = recorder.schedule, recorder.tape, ambient.module_state
        if (
            schedule is None
            or not self._forward_over
            or recorder.external_handles
            or recorder.modified_after_save
            or recorder.snapshots
            or not module_state.is_known_to_be_same()
            or (self.settings.checks_metadata and not module_state.has_same_versions())
            or (recorder.has_external and recorder.changed_external())
            or not ambient.flags.are_set()
            or self._given_up()
        ):
            return False
        if schedule.written and any(tape.roots[value] in schedule.written for value in schedule.kept):
            return False  # those are copied first
        inputs = self.inputs.unchanged()
        if inputs is None:
            return False
        values = self._library.Values(tape.value_count())
        python = _PythonSteps(schedule, tape, values, inputs)
        program = schedule.orders or self.runner.program(schedule)
        with generators_kept(schedule, tape):
            found = program.replay(
                tape.native,
                self._handles,
                task,
                tape.kept,
                tape.writers,
                tape._leaves,
                inputs,
                recorder.checksums,
                recorder._in_order,
                python,
                values,
            )
        if isinstance(found, list):  # Python has to look at what the handles get
            python.wait()
            if recorder.checksums is not None:
                self._verify(found)
            self._handles.fill(found)
        return found is not None


class _PythonSteps:
    """What the library leaves to Python in a replay. ``inputs``: position -> tensor; not needed if all is loaded."""

    __slots__ = ("_inputs", "_schedule", "_tape", "_values", "_works")

    def __init__(self, schedule: ReplaySchedule, tape: Tape, values: Any, inputs: Any = None) -> None:
        self._schedule, self._tape, self._values, self._inputs = schedule, tape, values, inputs
        self._works: list[Any] = []

    def load(self, value: int) -> Tensor | None:
        """Return the tensor of a leaf; None if it is not certain that it is what the forward read."""
        return leaf_as_then(self._tape, self._inputs, value)

    def unusual(self, entry: int) -> bool:
        """Run a step; return whether communication is in flight."""
        run_unusual(self._schedule, self._tape, entry, self._values, self._works)
        return bool(self._works)

    def wait(self) -> None:
        """Wait for all communication."""
        wait(self._works)

    def set_states(self, entry: int) -> None:
        """Put the generators that an entry draws from where they were, unless the entry before it leaves them there."""
        for generator, state in self._tape.states.get(entry, ()):
            generator.set_state(state)


class _NativeRunner:
    """Runs ordinary steps in C++, without the GIL."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def below(self) -> Any:
        """See ``Runner``."""
        return self._library.Below()

    def new_values(self, count: int) -> Any:
        """See ``Runner``."""
        return self._library.Values(count)

    def load(self, schedule: ReplaySchedule, tape: Tape, before: Before, values: Any) -> Sequence[int]:
        """See ``Runner``."""
        assert isinstance(tape, NativeTape)
        return self._library.load_parameters(values, tape.native, schedule.leaves, before, tape.writers)  # type: ignore[no-any-return]

    def program(self, schedule: ReplaySchedule) -> Any:
        """Make, keep and return the form in which the library runs a schedule."""
        schedule.steps_by_number = {step.number: step for step in schedule.steps}
        schedule.orders = self._library.Program(
            [(step.number, step.outputs, step.fills, step.frees) for step in schedule.steps],
            schedule.fills,
            schedule.kept,
            schedule.leaves,
            sorted(schedule.handles),
        )
        return schedule.orders

    def run(self, schedule: ReplaySchedule, tape: Tape, values: Any) -> Filled:
        """See ``Runner``."""
        assert isinstance(tape, NativeTape)
        filled: Filled = [(handle, values[value]) for handle, value in schedule.fills]
        python = _PythonSteps(schedule, tape, values)
        filled += self._library.run(schedule.orders or self.program(schedule), tape.native, values, python)
        python.wait()
        return filled


_runner = cache(_NativeRunner)


_Memory = {"new": 0, "view": 1, "unsure": 2}
_OnTape = {"only rerun": 1, "factory": 2, "uninitialised": 4, "fills": 8, "fills parts": 16}
_Verdict = {"recompute": 0, "save": 1, "alternate": 2, "ask": 3}


def on_tape(site: CallSite) -> int:
    """Return what a tape has to know of an op that the library can run."""
    traits, found = site.traits, 0
    if site.writes and (gathers(site) or torch.Tag.inplace_view in site.op.tags):
        found |= _OnTape["only rerun"]  # it changes the tensor, not only what is in its memory
    if traits.is_factory:
        found |= _OnTape["factory"]
    if traits.is_uninitialised:
        found |= _OnTape["uninitialised"]
    if site.writes and _fills(site):
        found |= _OnTape["fills"]
    if _writes_parts(site):
        found |= _OnTape["fills parts"]
    return found


def is_run_natively(site: CallSite) -> bool:
    """Return whether the library can run an op under rerun; see Note [Native value ids]."""
    traits = site.traits
    if (
        traits.is_infrastructure
        or site.is_unrecorded
        or site.is_custom_op
        or site.is_collective
        or site.op is LIFT_FRESH
        or type(site.op) is not OpOverload
        or site.op.namespace not in ("aten", "prims")
        or site.savable_if is not None
        or site.must_save_condition is not None
        or any(one.condition is not None for one in site.conditional_rules)
        or (site.writes and _written_argument(site) < 0)
    ):
        return False
    kinds = {str(argument.type) for argument in site.op._schema.arguments}
    return all("Tensor" not in kind or kind in _KINDS for kind in kinds) and kinds.isdisjoint({"Any", "t"})


def _written_argument(site: CallSite) -> int:
    """Return the index of the argument that an op writes to, if it is the only one and what the op returns; else -1."""
    traits, schema = site.traits, site.op._schema
    if len(traits.mutated_args) != 1 or traits.mutated_kwargs or len(schema.returns) != 1:
        return -1
    (index,) = traits.mutated_args
    argument, result = schema.arguments[index], schema.returns[0]
    is_result = result.alias_info is not None and result.alias_info.is_write
    return index if is_result and str(argument.type) == str(result.type) == "Tensor" else -1


def tell(library: Any, mode: RegionMode, site: CallSite) -> None:
    """Tell the library of a call site in the module that runs now, if it can run the op."""
    site.is_told = True
    if is_run_natively(site):
        verdict, rule = verdict_on(site)
        schema = site.op._schema
        sites = mode.table.native(library)
        names = schema.name, schema.overload_name
        written = _written_argument(site) if site.writes else -1
        must_save = site.must_save and not site.conditional_rules
        traits = memory_of(site), verdict, rule, site.draws, site.is_random, must_save, on_tape(site), written
        sites.add(mode.sites, site, *names, *traits)


def memory_of(site: CallSite) -> int:
    """Return where the results of an op lie."""
    if not site.is_view:
        return _Memory["new"]
    return _Memory["view" if site.traits.view_of >= 0 else "unsure"]


def verdict_on(site: CallSite) -> tuple[int, int]:
    """Return what becomes of the results of an op, and the rule that matches, or -1."""
    rule = site.final_rule.index if site.final_rule is not None else NO_RULE
    if not (site.may_save or site.conditional_rules):
        return _Verdict["recompute"], rule
    if site.must_save:
        return _Verdict["ask"], rule
    if not site.conditional_rules:
        return _Verdict["save"], rule
    first = site.conditional_rules[0]
    if first.alternates and first.resolved.rule.matches_each_call and first.resolved.rule.keeps_turn(0):
        return _Verdict["alternate"], first.resolved.index
    return _Verdict["ask"], NO_RULE


_KINDS = frozenset({"Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]"})


@cache
def _mode_type(library: Any) -> Any:
    """Return the mode that derives from the library's."""

    class NativeMode(library.Mode, TapeMode):  # type: ignore[misc]
        """Gets the ops that the library does not record."""

        recorder: NativeReplayRecorder

        def __init__(self, recorder: NativeReplayRecorder) -> None:
            super().__init__(recorder, None)

        def __enter__(self) -> Any:
            super().__enter__()
            recorder = self.recorder
            tape = recorder.tape
            library.start(
                tape.native,
                self,
                recorder,
                tape,
                self.table.native(library),
                recorder.tables(),
            )
            return self

        def __exit__(self, *error: Any) -> None:
            library.stop(self.recorder.tape.native)
            super().__exit__(*error)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if get_ident() != self.thread and self.is_forked():
                return func(*args, **(kwargs or {}))
            site: CallSite | None = self.sites.get(id(func))
            if site is None:
                site = self.table.add_site(func, self.path)
            if not site.is_told:
                tell(library, self, site)
            return self._run(site, func, args, kwargs or {})

    return NativeMode
