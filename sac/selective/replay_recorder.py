"""The replay engine's part of a region's forward: what is kept, and what replay has to start from."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sac.ops.traits import FILLING, FILLING_PARTS
from sac.region.detach import copy_of, detached
from sac.region.handles import Ending, Handle
from sac.region.inputs import KeptInputs
from sac.region.parking import PackHooks, park, surrounding_hooks
from sac.region.settings import AUTO, Settings
from sac.region.storages import describe, version_of
from sac.selective.checksum import Sums, checksum, same
from sac.selective.compact import compact_views
from sac.selective.draws import Draws
from sac.selective.fallback import FallbackMode, Routed
from sac.selective.forward_state import Generators, Images, note_generator
from sac.selective.made_of import MadeOf
from sac.selective.modes import decide
from sac.selective.program import Program
from sac.selective.record import written_tensors
from sac.selective.replay_plan import ReplayPlan, Wanted, plan_replay
from sac.selective.rows import Rows
from sac.selective.stats import NO_RULE, KeptFigures
from sac.selective.table import BoundRule, Plan, Table, run_op
from sac.selective.tape import SMALL_NUMEL, Tape
from sac.selective.tape_entries import HOLE, cast_of
from sac.selective.tape_mode import TapeMode, generators_of, new_tensors
from sac.selective.tensors import storage_address, storage_bytes, tensor_parts, tensors_of
from sac.selective.unrepeatable import may_differ, unrepeatable_on
from sac.selective.weights import NOT_PARAMETERS, is_large

_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class ReplayRecorder:
    """Carries a table out on one region call whose backward replays a tape; the ``Recorder`` of ``ReplayFrame``."""

    sees_ops = True
    apart: frozenset[int] = frozenset()

    def __init__(
        self,
        table: Table,
        path: str,
        owners: tuple[nn.Module, ...],
        settings: Settings,
        rows: Rows | None = None,
        *,
        verifies: bool = False,
        program: Program | None = None,
    ) -> None:
        self.table = table
        self.path = path
        self.rows = rows
        self.tape = Tape()
        self.paused = False  # a replay runs inside the region's own forward: nothing of it is recorded
        self.needs_mode = False
        self.figures: KeptFigures | None = None
        self.plan: ReplayPlan | None = None  # after the forward
        self.program = program  # that of an earlier call on such inputs; after the forward: of this one
        self.spoilt: dict[int, int] = {}  # handle -> version: autograd saved it, and the region wrote to it later
        self.images: Images = {}
        self.checksums: dict[int, Sums] | None = {} if verifies else None
        self.may_save = False
        self.calls: defaultdict[Plan, int] = defaultdict(int)
        self.alternations: defaultdict[int, int] = defaultdict(int)
        self.hits: defaultdict[int, int] = defaultdict(int)
        self.recent: list[
            tuple[int, Tensor, int]
        ] = []  # handles of what autograd saved since the last op, and versions
        self.yields = settings.engine == AUTO  # gives way rather than be worse than rerun; see Note [Auto]
        self.from_outside: set[int] = set()  # handles of what lives outside of the region, and is kept as it is
        self._perhaps_outside: list[tuple[weakref.ref[Handle], weakref.ref[Tensor], int]] = []
        self._settings = settings
        self._owners = owners
        self._buffers: frozenset[int] | None = None  # of the owners, by id, once it has been asked for
        self.draws = Draws(self.tape)
        self._made_of = MadeOf(self.tape, owners)
        self._places: dict[int, tuple[int, int, int]] = {}  # missing handle -> value, number of the next entry, version
        self.suspects: list[tuple[int, Tensor, int, int]] = []
        self._kept_in = self.tape.kept_in
        self._sums: dict[int, tuple[Plan, int, Sums]] = {}  # if verified: saved value -> call, its bits
        self._rules: dict[int, int] = {}  # kept value -> rule
        self._generators: Generators = {}
        self._routing: list[tuple[Plan, range]] = []  # calls of ops that may answer differently, and their results
        self._routed: list[Routed] = []  # after the forward: the same, with what is held of them
        self._gathered: set[int] = set()  # after trouble: addresses of parameters, which FSDP may have filled in here
        self._inputs: KeptInputs | None = None
        self._wrote_inputs = False
        self._wrote_late = False
        self._keeps_persistent = True
        self._lasting: set[int] = set()  # roots of inputs and parameters, which the region or the model holds anyway

    # What the frame asks

    def begin(self, inputs: KeptInputs, leaves: list[Any]) -> None:
        """The region is about to run on ``inputs``, whose tensors are among ``leaves``."""
        self._inputs = inputs
        self._keeps_persistent = surrounding_hooks() is None
        self.tape.lasting = self._lasting if self._keeps_persistent else set()
        for kept in inputs.tensors:
            self.tape.add_leaf(leaves[kept.position], kept.position, lasts=kept.stored is None)

    def give_out(self, handle: int, tensor: Tensor) -> None:
        """A gradient is taken inside the region's own forward, and ``tensor`` is what it will read as ``handle``."""
        self.tape.recognise(tensor, self._places[handle][0])

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the mode that writes the tape."""
        return TapeMode(self, self.rows)

    def pack(self, tensor: Tensor, handle: Handle) -> None:
        """Autograd saves ``tensor``: note which value it is, and keep it if that costs nothing or nobody knows it."""
        tape = self.tape
        found = tape.ids.get(id(tensor))
        if tape.is_busy and (tape.trouble or self.paused):
            return
        version = tensor._version
        if found is not None and found[0]() is tensor:
            value = found[1]
            if version != tape.versions[value]:
                value = tape.look_at_version(tensor, value)
        elif tape.is_known(tensor) or cast_of(tensor) is not None:
            value = tape.find(tensor, "autograd")
        else:
            self._pack_from_outside(tensor, handle)
            return
        root = tape.roots[value]
        if root in tape.factories and root not in tape.kept:
            self._explain(root, tensor, None)
        if root in self._kept_in:
            handle.keep(tensor)
            handle.storage = storage_address(tensor)
            self.recent.append((handle.index, tensor, root))
            return
        if root in self._lasting and root not in tape.writers:
            # As it is: it is one of the ancestors that autograd holds anyway.
            handle.kept = handle.borrowed = True
            handle.version = version
            handle.value = handle.watched = tensor
            return
        self._places[handle.index] = value, len(tape.plans), version
        self.recent.append((handle.index, tensor, root))
        if self.checksums is not None:
            self.checksums[handle.index] = checksum(tensor)

    def _pack_from_outside(self, tensor: Tensor, handle: Handle) -> None:
        """Autograd saves what no op of the region made: something that lives outside of it, or an unseen result."""
        handle.storage = storage_address(tensor)
        handle.borrowed = isinstance(tensor, nn.Parameter) or self._is_buffer(tensor)
        if handle.borrowed or not self.yields or tensor.numel() <= SMALL_NUMEL:
            handle.keep(tensor)
            if type(tensor) is not nn.Parameter:
                self.from_outside.add(handle.index)
        else:
            self._perhaps_outside.append((weakref.ref(handle), weakref.ref(tensor), version_of(tensor)))

    def _is_buffer(self, tensor: Tensor) -> bool:
        if self._buffers is None:
            self._buffers = frozenset(id(buffer) for owner in self._owners for buffer in owner._buffers.values())
        return id(tensor) in self._buffers

    def hold_what_lives(self) -> None:
        """Hold what autograd has saved of tensors from outside, which costs nothing; there is trouble if some is gone.

        What has a graph, and no op made, is a result of an unseen kernel, which lives on for somebody's sake only.
        """
        for handle_of, tensor_of, version in self._perhaps_outside:
            handle, tensor = handle_of(), tensor_of()
            if handle is None:
                continue
            if tensor is None or tensor.grad_fn is not None or version_of(tensor) != version:
                self.tape.fail("autograd saves a tensor that no op made")
            else:
                handle.keep(tensor)
                handle.borrowed = True
                self.from_outside.add(handle.index)
        self._perhaps_outside.clear()

    def forget_what_lives(self, handles: Iterable[Handle]) -> None:
        """Python runs again, and finds tensors from outside itself: a buffer advances in it."""
        for handle in handles:
            if handle.index in self.from_outside:
                handle.kept, handle.value, handle.watched = False, None, None
        self.from_outside.clear()

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """See ``end``; the frame of this recorder calls that."""
        raise AssertionError("a tape is closed by its own frame")

    def may_run_again(self, kept: list[Handle], missing: list[int]) -> bool:
        """Whether backward may need more than is kept. What lives outside may change, and be read again."""
        if missing or not (self.yields and self.from_outside):
            return bool(missing)
        return not self.from_outside.isdisjoint(handle.index for handle in kept)

    def end(self, kept: list[Handle], missing: list[int]) -> None:
        """The forward is over: work out what is to be replayed, and let go of what that does not need."""
        tape = self.tape
        for value in [*self._sums]:
            self._compare_kept(value)
        self.settle_suspects()
        self.recent = []
        self.needs_mode = self.may_save or bool(
            self.images or self._generators or self._wrote_late or self._wrote_inputs
        )
        if tape.writers and not tape.trouble:
            self._look_for_spoilt(missing)
        if not tape.trouble:
            program = self.program
            if program is None or not program.fits(tape, self._places, missing):
                if self.yields and self.has_collectives:
                    tape.fail("collectives run inside the region")
                program = Program(tape, self._places, missing, plan_replay(tape, self.wanted(missing)))
            self.program = program
            program.lend(tape)
            self.plan = program.plan
            self._check_leaves()
            self._check_kept()
            if self.yields:
                self._check_unsaved(kept)
        if tape.trouble:
            self.plan = self.program = None
            for address in self._gathered:
                self.images.pop(address, None)
            if self.may_run_again(kept, missing):
                self.forget_what_lives(kept)
                kept[:] = [handle for handle in kept if handle.kept]
        self._routed = [
            Routed(
                plan,
                [tape.kept[value] for value in values],
                written=any(tape.roots[value] not in self._kept_in for value in values),
            )
            for plan, values in self._routing
        ]
        self._let_go(kept)
        tape.close()

    def wanted(self, handles: list[int]) -> list[Wanted]:
        """Return what the tape knows of these handles, without those that have been spoilt."""
        places = self._places
        return [Wanted(handle, *places[handle][:2]) for handle in handles if handle not in self.spoilt]

    def park(self, hooks: PackHooks) -> None:
        """Hand the held values to the saved-tensor hooks around the region."""
        kept: dict[int, Any] = self.tape.kept
        for value, tensor in kept.items():
            kept[value] = park(tensor, hooks)

    def recompute_mode(self, inputs: list[tuple[int, Tensor]], ending: Ending) -> AbstractContextManager[Any]:
        """Return the context in which the region's Python runs again, where the tape cannot be replayed."""
        return FallbackMode(self.table, self.path, self.images, self._generators, self._routed, ending)

    def check_recomputed(self) -> None:
        """Nothing: what has to be served is asked for in order."""

    def drop(self) -> None:
        """Let every held value go."""
        self.tape.drop()
        self.plan = None
        self.images, self._generators, self._routed, self._places = {}, {}, [], {}
        self.checksums = None

    @property
    def has_collectives(self) -> bool:
        """Whether other ranks have a part in what is run again: in an op of the tape, or in one of a DTensor."""
        return self.tape.has_meshes or any(getattr(plan, "is_collective", False) for plan in self.tape.plans)

    def may_differ(self, handle: int, device: torch.device) -> bool:
        """Whether what autograd saved as ``handle`` comes out otherwise each time, by the nature of its ops."""
        names = unrepeatable_on(device)
        return bool(names) and may_differ(self.tape, self._places[handle][0], names)

    # What the mode asks

    def run_untaped(self, mode: TapeMode, plan: Plan, args: Any, kwargs: Any) -> Any:
        """Run an op after the tape has met trouble: hold what must not be chosen anew, and image what is written."""
        if plan.has_generator or plan.draws:
            self._note_generators(args, kwargs)
        if plan.writes and not plan.traits.is_infrastructure:
            self.before_write(plan, args, kwargs)
        for tensor in tensors_of([*args, *kwargs.values()]):
            if isinstance(tensor, nn.Parameter):
                self._gathered.update(map(storage_address, tensor_parts(tensor)))
        out = run_op(plan, args, kwargs)
        first, tensors = len(self.tape.roots), new_tensors(out)
        for tensor in tensors:
            self.tape.add(tensor)
        rule, saves = plan.final, False
        if plan.counts or plan.candidates:
            self.may_save = self.may_save or plan.counts
            saves, rule = decide(self, plan, args, kwargs, out)
            if saves and plan.must_save:
                for value in range(first, len(self.tape.roots)):
                    self.keep(value, tensors[value - first])
                self._routing.append((plan, range(first, len(self.tape.roots))))
        if rule is not None:
            self.hits[rule.index] += 1
        if mode.rows is not None:
            mode.rows.add(plan, rule, saves, args, kwargs, out)
        return out

    def read_factories(self, plan: Plan, args: Any, kwargs: Any, reads: list[int]) -> None:
        """An op reads ``reads``: explain those that were made of nothing, and that no op has written to."""
        if plan.is_view or (plan.writes and _fills(plan)):
            return
        tape = self.tape
        found = [value for value in reads if tape.roots[value] in tape.factories]
        if not found:
            return
        written = {id(tensor) for tensor in written_tensors(plan, args, kwargs)} if _writes_parts(plan) else ()
        for tensor in tensors_of([*args, *kwargs.values()]):
            value = tape.known(tensor)
            root = tape.roots[value] if value in found else -1
            if root not in tape.factories:
                continue
            if id(tensor) in written and tape.plans[tape.factories[root]].traits.is_uninitialised:
                continue
            self._explain(root, tensor, plan.op)

    def before_write(self, plan: Plan, args: Any, kwargs: Any) -> None:
        """An op is about to write to some of its arguments: copy or image what lies there, if it is wanted as it is."""
        tape = self.tape
        tape.sync()
        roots = []
        for tensor in written_tensors(plan, args, kwargs):
            for part in tensor_parts(tensor):
                if part.layout is not torch.strided:
                    tape.fail(f"{plan.op} writes to a tensor without strides")
                    continue
                address = storage_address(part)
                root = tape.by_storage.get(address)
                if root is not None and plan.op._schema.name == "aten::set_":
                    tape.fail(f"{plan.op} lets a tensor lie elsewhere")
                if root in tape.given_out:
                    tape.fail(f"{plan.op} writes to what a gradient inside the region has read")
                if root in self._kept_in:
                    self._copy_kept(root)
                if root is None or root in tape.leaves:
                    self._image(root, address, part, plan)
                if root is not None:
                    roots.append(root)
        tape.add_write(tuple(roots))

    def draw(self, plan: Plan, args: Any, kwargs: Any) -> None:
        """An op is about to draw random numbers, perhaps: note the generators it may draw from, as they stand."""
        if plan.has_generator:
            self._note_generators(args, kwargs)
        self.draws.before(generators_of(args, kwargs))

    def finish(
        self,
        mode: TapeMode,
        plan: Plan,
        args: Any,
        kwargs: Any,
        rest: Any,
        reads: list[int],
        keywords: Any,
        out: Any,
    ) -> None:
        """An op has run: put its entry on the tape, decide on its results, and hold them if they are to be saved."""
        tape = self.tape
        entry, first = len(tape.plans), len(tape.roots)
        count = self._add_results(plan, out)
        tape.append(plan, rest, reads, first)
        if count != 1:
            tape.counts[entry] = count
        if plan.is_view and reads:
            tape.versions[first:] = [tape.versions[reads[0]]] * count
        if keywords:
            tape.keywords[entry] = keywords
        saves, rule, call = False, None, None
        if plan.decides:
            saves, rule, call = self.decide_on(plan, args, kwargs, out, first, reads)
        if plan.draws:
            self.draws.after(entry, runs_again=not saves)
        if plan.traits.is_factory and count:
            tape.factories[first] = entry
        elif plan.op is _LIFT_FRESH and (constant := tape.known(out)) is not None:
            self.keep(constant, out)  # made of numbers, which are no op's arguments
            tape.constants.add(constant)
        self._look_at_recent(entry)
        tape.is_busy = bool(tape.trouble or tape.factories or self.suspects or self.paused)
        if mode.rows is not None:
            mode.rows.add(plan, rule, saves, args, kwargs, out, call=call)

    def decide_on(
        self, plan: Plan, args: Any, kwargs: Any, out: Any, first: int, reads: list[int]
    ) -> tuple[bool, BoundRule | None, int | None]:
        """Decide on the result of an op, and hold it if so; return that, the rule, and which call of the op it was."""
        saves, rule, call = False, plan.final, None
        if plan.counts or plan.candidates:
            call = self.calls[plan]
            saves, rule = decide(self, plan, args, kwargs, out)
            saves = saves and self._save(plan, rule, call, first, out, reads)
            self.may_save = self.may_save or plan.counts
        if rule is not None:
            self.hits[rule.index] += 1
        return saves, rule, call

    def _add_results(self, plan: Plan, out: Any) -> int:
        """Give numbers to the results of an op, but not to arguments that it gives back; return how many there are."""
        tensors = new_tensors(out)
        tape = self.tape
        if all(tape.known(tensor) is not None for tensor in tensors):
            return 0
        for tensor in tensors:
            tape.add(tensor)
        return len(tensors)

    def _save(self, plan: Plan, rule: BoundRule | None, call: int, first: int, out: Any, reads: list[int]) -> bool:
        """Hold the results of an op that the policy saves; return whether they can be held."""
        roots = self.tape.roots
        count = len(roots) - first
        new = [value for value in range(first, first + count) if roots[value] >= first]
        if not new or (plan.must_save and len(new) < count):
            return False  # it gave back an argument, or a view of one
        if not plan.must_save and call not in plan.calls_on_inputs and self._is_of_parameters(plan, call, out, reads):
            return False
        number = rule.index if rule is not None else NO_RULE
        tensors = (out,) if count == 1 and type(out) is Tensor else new_tensors(out)
        for value in new:
            self.keep(value, tensors[value - first])
            self._rules[value] = number
            if self.checksums is not None:
                self._sums[value] = plan, call, checksum(self.tape.kept[value])
        if len(new) < count:  # a compiled graph gives back arguments that its backward reads
            for value in range(first, first + count):
                if roots[value] < first:
                    self.tape.find_behind(tensors[value - first], roots[value])
        if plan.must_save:
            self._routing.append((plan, range(first, first + count)))
        return True

    def _is_of_parameters(self, plan: Plan, call: int, out: Any, reads: list[int]) -> bool:
        """Whether a result is made from parameters alone, and large."""
        made_of = self._made_of.all_of(reads)
        if made_of == NOT_PARAMETERS:
            plan.calls_on_inputs.add(call)  # the next region's too: it only decides what is held
        return is_large(out, made_of) and not (plan.draws and self.draws.have_moved())

    def keep(self, value: int, tensor: Tensor) -> None:
        """Hold what lies in ``tensor``, as ``value``."""
        # `data` asks no dispatcher. It has a version counter of its own; but writes are seen by the mode.
        self.tape.kept[value] = tensor.data if type(tensor) is Tensor else detached(tensor)
        self._kept_in.setdefault(self.tape.roots[value], []).append(value)

    def _look_at_recent(self, entry: int) -> None:
        """An op has run: see whether it wrote to what autograd had saved right before it."""
        if written := self.tape.writes.get(entry):
            for handle, tensor, root in self.recent:
                if root in written:
                    self._wrote_late = True
                    if handle in self._places:
                        self.suspects.append((handle, tensor, self._places[handle][2], entry))
        self.recent = []

    def settle_suspects(self) -> None:
        """Autograd saved these, and the next op wrote to them: with its consent if no version counter has moved."""
        for handle, tensor, version, entry in self.suspects:
            if tensor._version == version:
                value, _, _ = self._places[handle]
                self._places[handle] = value, entry + 1, version
                if self.checksums is not None:
                    self.checksums[handle] = checksum(tensor)
        self.suspects.clear()

    def _explain(self, root: int, tensor: Tensor, op: Any) -> None:
        """A tensor made of nothing is used, and no op has written to it: hold it, unless it is a constant still."""
        tape = self.tape
        entry = tape.factories.pop(root)
        plan = tape.plans[entry]
        whole = tensor if tape.known(tensor) == root else tape.tensor_of(root)
        if whole is None:
            tape.fail(f"{op} reads memory that {plan.op} made, and that no op has written to")
        elif plan.traits.is_uninitialised or not self._is_constant(entry, whole):
            self.keep(root, whole)

    def _is_constant(self, entry: int, tensor: Tensor) -> bool:
        was_paused, self.paused = self.paused, True  # where autograd saves the tensor, the mode sees what is asked here
        try:
            return _is_constant(self.tape, entry, tensor)
        finally:
            self.paused = was_paused

    def _copy_kept(self, root: int) -> None:
        kept = self.tape.kept
        for value in self._kept_in.pop(root):
            self._compare_kept(value)
            kept[value] = kept[value].clone()  # which the modes around see: what measures memory among them

    def _image(self, root: int | None, address: int, tensor: Tensor, plan: Plan) -> None:
        leaf = self.tape.leaves.get(root) if root is not None else None
        if leaf is not None and leaf.position >= 0:
            assert self._inputs is not None
            self._inputs.copy_storage(address)
            self._wrote_inputs = True
        elif (leaf is not None and leaf.lasts) or isinstance(tensor, nn.Parameter):
            self.tape.fail(f"{plan.op} writes to a parameter")
        elif plan.traits.is_infrastructure:
            # FSDP of FullyShardedDataParallel: parameters are gathered for a module inside the region, and let go of.
            self.tape.fail(f"{plan.op} writes to a tensor from outside")
        elif not self._settings.freeze_buffers:
            self.tape.fail(f"{plan.op} writes to a tensor from outside, and freeze_buffers is off")
        elif address not in self.images:
            storage = tensor.untyped_storage()
            self.images[address] = storage, copy_of(storage)

    def _note_generators(self, args: Any, kwargs: Any) -> None:
        for generator in (*args, *kwargs.values()):
            if isinstance(generator, torch.Generator):
                note_generator(self._generators, generator)

    def _look_for_spoilt(self, missing: list[int]) -> None:
        """What has been written to since autograd saved it is spoilt, or what backward sees is what was written."""
        tape = self.tape
        alive = {value: reference for reference, value in tape.ids.values()}
        for handle in missing:
            value, time, version = self._places[handle]
            writers = tape.writers.get(tape.roots[value])
            if not writers or writers[-1] < time:
                continue
            tensor = reference() if (reference := alive.get(value)) is not None else None
            if tensor is not None and tensor._version == version:
                self._places[handle] = value, len(tape.plans), version
                if self.checksums is not None:
                    self.checksums[handle] = checksum(tensor)
            elif tensor is None or self.yields:
                # Autograd's own GRU cells write to one part of what `unsafe_chunk` gives and have saved another.
                writer = tape.plans[writers[-1]].op
                tape.fail(f"{writer} writes to memory in which autograd saved a tensor before")
            else:
                self.spoilt[handle] = version

    def _check_leaves(self) -> None:
        """Nothing holds the leaves: what is gone when the forward ends will not be there in backward."""
        assert self.plan is not None
        tape = self.tape
        for value in self.plan.leaves:
            leaf = tape.leaves[value]
            if leaf.position < 0 and leaf.tensor() is None:
                reader = next(
                    (tape.plans[one.number] for one in self.plan.steps if value in tape.reads[one.number]), None
                )
                name = getattr(reader, "op", "autograd")
                tape.fail(f"{name} reads a tensor that no op made, and that nothing holds")

    def _compare_kept(self, value: int) -> None:
        """Tell the rerun engine, which would serve it, if what is held of a saved result is not what the op left."""
        if value in self._sums:
            plan, call, before = self._sums.pop(value)
            if not same(before, checksum(self.tape.kept[value])):
                plan.overwritten_calls.add(call)

    def _check_kept(self) -> None:
        """What the policy saves is held as it is: something that is no op may have written to it since."""
        assert self.plan is not None
        for value in self.plan.kept:
            if value in self.tape.lost:
                self.tape.fail(
                    f"a result that the policy saves ({describe(self.tape.kept[value])}) was written to by no op"
                )

    def _check_unsaved(self, kept: list[Handle]) -> None:
        """What replay has to hold beyond what the policy saves, rerun would make again."""
        assert self.plan is not None
        large = [value for value in self.tape.kept.keys() - self._rules.keys() if self._is_large(value)]
        if large:
            in_handles = {handle.storage for handle in kept}
            for value in large:
                tensor = self.tape.kept[value]
                if value in self.plan.kept or any(storage_address(part) in in_handles for part in tensor_parts(tensor)):
                    self.tape.fail(f"replay would hold what the policy does not save ({describe(tensor)})")

    def _is_large(self, value: int) -> bool:
        return self.tape.kept[value].numel() > SMALL_NUMEL

    def _let_go(self, kept: list[Handle]) -> None:
        """Hold only what replay starts from, and count it."""
        tape, program = self.tape, self.program
        held = {value: tape.kept[value] for value in self.plan.kept} if self.plan is not None else {}
        loose = [handle for handle in kept if not handle.borrowed]
        if loose:
            addresses = {storage_address(part) for tensor in held.values() for part in tensor_parts(tensor)}
            compact_views([handle for handle in loose if handle.storage not in addresses])
        sizes = [storage_bytes(tensor) for tensor in tape.kept.values()]
        if program is not None and program.figures is not None and not loose and program.sizes == sizes:
            self.figures = program.figures
        else:
            self.figures = self._count(held, loose)
            if program is not None and not loose:
                program.sizes, program.figures = sizes, self.figures
        tape.kept = held
        self.draws.close({step.number for step in self.plan.steps} if self.plan is not None and tape.states else set())

    def _count(self, held: dict[int, Tensor], loose: list[Handle]) -> KeptFigures:
        routed = {value for _, values in self._routing for value in values}
        sizes: dict[int, tuple[int, int]] = {}  # address of a storage -> bytes, rule
        rule_at: dict[int, int] = {}
        dead: dict[int, int] = {}
        for value, tensor in self.tape.kept.items():
            rule = self._rules.get(value, NO_RULE)
            for part in tensor_parts(tensor):
                address = storage_address(part)
                rule_at[address] = rule
                if value in held or value in routed:
                    sizes[address] = storage_bytes(part), rule
                elif value in self._rules:
                    dead[address] = storage_bytes(part)
        for handle in loose:
            if isinstance(handle.value, Tensor):
                rule = rule_at.get(handle.storage, NO_RULE)
                for part in tensor_parts(handle.value):
                    sizes.setdefault(storage_address(part), (storage_bytes(part), rule))
        rules = dict.fromkeys(self._rules.values(), 0)
        for size, rule in sizes.values():
            rules[rule] = rules.get(rule, 0) + size
        lost = sum(size for address, size in dead.items() if address not in sizes)
        return KeptFigures(sum(size for size, _ in sizes.values()), lost, rules, dict(self.hits))


def _fills(plan: Plan) -> bool:
    """Whether what an op writes to is wholly overwritten, as far as can be known: it does not read what is there."""
    namespace, name = plan.op._schema.name.split("::")
    return namespace != "aten" or name in FILLING or plan.op._schema.overload_name.endswith("out")


def _writes_parts(plan: Plan) -> bool:
    """Whether an op may be there to fill fresh memory, part by part."""
    return plan.writes and plan.op._schema.name.split("::")[1] in FILLING_PARTS


def _is_constant(tape: Tape, entry: int, tensor: Tensor) -> bool:
    """Whether ``tensor``, which the op of ``entry`` made of no values, is still what it makes.

    On a device it is asked once for all calls at one place of a kind of region: to compare waits for the device, and a
    kernel that writes to such tensors unseen does so in every call, as a rule.
    """
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        return True  # no data
    plan: Plan = tape.plans[entry]
    shape, answer = plan.constants.get(entry, (None, False))
    if shape != tensor.shape or tensor.is_cpu:
        args = [tensor if one is HOLE else one for one in tape.rests[entry]]
        answer = bool(torch.equal(plan.run(*args, **tape.keywords.get(entry, {})), tensor))
        plan.constants[entry] = tensor.shape, answer
    return answer
