"""The replay engine's part of a region's forward: what is kept, and what replay has to start from."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sac.region.detach import cloned, copy_of, detached
from sac.region.handles import Ending, Handle
from sac.region.inputs import KeptInputs
from sac.region.parking import PackHooks, park, surrounding_hooks
from sac.region.settings import Settings
from sac.region.states.rng import default_generator
from sac.selective.checksum import checksum
from sac.selective.compact import compact_views
from sac.selective.fallback import FallbackMode, Routed
from sac.selective.forward_state import Generators, Images
from sac.selective.made_of import MadeOf
from sac.selective.modes import decide
from sac.selective.record import written_tensors
from sac.selective.replay_plan import ReplayPlan, Wanted, plan_replay
from sac.selective.rows import Rows
from sac.selective.stats import NO_RULE, KeptFigures
from sac.selective.table import BoundRule, Plan, Table, run_op
from sac.selective.tape import HOLE, KWARGS, PLAN, READS, REST, Entry, Tape, first_address
from sac.selective.tape_mode import TapeMode, generators_of, moved, new_tensors
from sac.selective.tensors import storage_address, storage_bytes, tensor_parts, tensors_of
from sac.selective.weights import is_large


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
    ) -> None:
        self.table = table
        self.path = path
        self.rows = rows
        self.tape = Tape()
        self.paused = False  # a replay runs inside the region's own forward: nothing of it is recorded
        self.needs_mode = False
        self.figures: KeptFigures | None = None
        self.plan: ReplayPlan | None = None  # after the forward
        self.spoilt: dict[int, int] = {}  # handle -> version: autograd saved it, and the region wrote to it later
        self.images: Images = {}
        self.checksums: dict[int, tuple[Tensor, ...]] | None = {} if verifies else None
        self.may_save = False
        self.calls: defaultdict[Plan, int] = defaultdict(int)
        self.alternations: defaultdict[int, int] = defaultdict(int)
        self.hits: defaultdict[int, int] = defaultdict(int)
        self.recent: list[
            tuple[int, Tensor, int]
        ] = []  # handles of what autograd saved since the last op, and versions
        self._settings = settings
        self._made_of = MadeOf(self.tape, owners)
        self._places: dict[int, tuple[int, int, int]] = {}  # missing handle -> value, number of the next entry, version
        self._suspects: list[tuple[int, Tensor, int, int]] = []
        self._kept_at: dict[int, list[int]] = {}  # address of a storage -> kept values in it that no op has written to
        self._kept_roots: set[int] = set()
        self._rules: dict[int, int] = {}  # kept value -> rule
        self._generators: Generators = {}
        self._routed: list[Routed] = []
        self._inputs: KeptInputs | None = None
        self._wrote_inputs = False
        self._wrote_late = False
        self._keeps_persistent = True

    # What the frame asks

    def begin(self, inputs: KeptInputs, leaves: list[Any]) -> None:
        """The region is about to run on ``inputs``, whose tensors are among ``leaves``."""
        self._inputs = inputs
        self._keeps_persistent = surrounding_hooks() is None
        for kept in inputs.tensors:
            self.tape.add_leaf(leaves[kept.position], kept.position, lasts=kept.stored is None)

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the mode that writes the tape."""
        return TapeMode(self, self.rows)

    def pack(self, tensor: Tensor, handle: Handle) -> None:
        """Autograd saves ``tensor``: note which value it is, and keep it if that costs nothing or nobody knows it."""
        tape = self.tape
        if tape.trouble or self.paused:
            return
        found = tape.ids.get(id(tensor))
        if found is not None and found[0]() is tensor:
            value = found[1]
        elif first_address(tensor) in tape.by_storage:
            value = tape.find(tensor, "autograd")
        else:
            handle.keep(tensor)
            handle.storage = storage_address(tensor)
            handle.borrowed = isinstance(tensor, nn.Parameter)
            return
        root = tape.roots[value]
        if root in tape.factories and root not in tape.kept:
            self._explain(root, tensor, None)
        if root in self._kept_roots:
            handle.keep(tensor)
            handle.storage = storage_address(tensor)
            return
        leaf = tape.leaves.get(root)
        if leaf is not None and leaf.lasts and self._keeps_persistent and root not in tape.writers:
            handle.keep(tensor)
            handle.borrowed = True
            return
        version = tensor._version
        self._places[handle.index] = value, len(tape.entries), version
        self.recent.append((handle.index, tensor, version))
        if self.checksums is not None:
            self.checksums[handle.index] = checksum(tensor)

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """See ``end``; the frame of this recorder calls that."""
        raise AssertionError("a tape is closed by its own frame")

    def end(self, kept: list[Handle], missing: list[int]) -> None:
        """The forward is over: work out what is to be replayed, and let go of what that does not need."""
        tape = self.tape
        self._settle_suspects()
        self.recent.clear()
        self.needs_mode = self.may_save or bool(
            self.images or self._generators or self._wrote_late or self._wrote_inputs
        )
        if not tape.trouble:
            self.plan = plan_replay(tape, self._wanted(missing))
            self._check_leaves()
        if tape.trouble:
            self.plan = None
        self._let_go(kept)
        tape.close()
        if not missing:
            self.drop()

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
        """Whether other ranks have a part in what is run again."""
        return any(getattr(entry[PLAN], "is_collective", False) for entry in self.tape.entries)

    # What the mode asks

    def run_untaped(self, mode: TapeMode, plan: Plan, args: Any, kwargs: Any) -> Any:
        """Run an op after the tape has met trouble: hold what must not be chosen anew, and images of what is written."""
        if plan.has_generator or plan.draws:
            self._note_generators(args, kwargs)
        if plan.writes:
            self.before_write(plan, args, kwargs)
        out = run_op(plan, args, kwargs)
        for tensor in new_tensors(out):
            self.tape.add(tensor)
        rule, saves = plan.final, False
        if plan.counts or plan.candidates:
            self.may_save = self.may_save or plan.counts
            saves, rule = decide(self, plan, args, kwargs, out)
            if saves and plan.must_save:
                self._routed.append(Routed(plan, [detached(tensor) for tensor in new_tensors(out)]))
        if rule is not None:
            self.hits[rule.index] += 1
        if mode.rows is not None:
            mode.rows.add(plan, rule, saves, args, kwargs, out)
        return out

    def read_factories(self, plan: Plan, args: Any, kwargs: Any, reads: list[int], rest: Any) -> None:
        """An op reads ``reads``: explain those that were made of nothing, and that no op has written to."""
        if plan.is_view:
            return
        tape = self.tape
        found = [value for value in reads if tape.roots[value] in tape.factories]
        if not found:
            return
        written = {id(tensor) for tensor in written_tensors(plan, args, kwargs)}
        for tensor in tensors_of([*args, *kwargs.values()]):
            value = tape.known(tensor)
            if value in found and id(tensor) not in written:
                self._explain(tape.roots[value], tensor, plan.op)

    def before_write(self, plan: Plan, args: Any, kwargs: Any) -> None:
        """An op is about to write to some of its arguments: copy or image what lies there, if it is wanted as it is."""
        tape = self.tape
        roots = []
        for tensor in written_tensors(plan, args, kwargs):
            for part in tensor_parts(tensor):
                if part.layout is not torch.strided:
                    tape.fail(f"{plan.op} writes to a tensor without strides")
                    continue
                address = storage_address(part)
                if address in self._kept_at:
                    self._copy_kept(address)
                root = tape.by_storage.get(address)
                if root is None or root in tape.leaves:
                    self._image(root, address, part, plan)
                if root is not None:
                    roots.append(root)
        tape.add_write(tuple(roots))

    def draw(self, plan: Plan, args: Any, kwargs: Any) -> list[tuple[torch.Generator, Tensor]]:
        """An op is about to draw random numbers, perhaps: return the generators it may draw from, as they stand."""
        if plan.has_generator:
            self._note_generators(args, kwargs)
        self._before = [(generator, generator.get_state()) for generator in generators_of(args, kwargs)]
        return self._before

    def after_draw(self, plan: Plan, entry: int, before: list[tuple[torch.Generator, Tensor]], saves: bool) -> None:
        """It has run: remember where its generators stood, if it is to run again and has moved one."""
        if not saves and (plan.is_random or moved(before)):
            self.tape.states[entry] = before

    def add_results(self, plan: Plan, out: Any) -> int:
        """Give numbers to the results of an op, but not to arguments that it gives back; return how many there are."""
        tensors = new_tensors(out)
        tape = self.tape
        if all(tape.known(tensor) is not None for tensor in tensors):
            return 0
        for tensor in tensors:
            tape.add(tensor)
        return len(tensors)

    def save(self, plan: Plan, rule: BoundRule | None, first: int, count: int, out: Any, reads: list[int]) -> bool:
        """Hold the results of an op that the policy saves; return whether they can be held."""
        roots = self.tape.roots
        values = range(first, first + count)
        if not count or any(roots[value] < first for value in values):
            return False  # it gave back an argument, or a view of one
        if not plan.must_save and is_large(out, self._made_of.all_of(reads)):
            if not (plan.draws and moved(self._before)):
                return False
        tensors = new_tensors(out)
        for value, tensor in zip(values, tensors, strict=True):
            self.keep(value, tensor)
            self._rules[value] = rule.index if rule is not None else NO_RULE
        if plan.must_save:
            self._routed.append(Routed(plan, [self.tape.kept[value] for value in values]))
        return True

    def keep(self, value: int, tensor: Tensor) -> None:
        """Hold what lies in ``tensor``, as ``value``."""
        self.tape.kept[value] = detached(tensor)
        self._kept_roots.add(self.tape.roots[value])
        for part in tensor_parts(tensor):
            self._kept_at.setdefault(storage_address(part), []).append(value)

    def look_at_recent(self, entry: int) -> None:
        """An op has run: see whether it wrote to what autograd had saved right before it."""
        self._settle_suspects()
        if written := self.tape.writes.get(entry):
            for handle, tensor, version in self.recent:
                if handle in self._places and self.tape.roots[self._places[handle][0]] in written:
                    self._suspects.append((handle, tensor, version, entry))
        self.recent.clear()

    # Within

    def _settle_suspects(self) -> None:
        """Autograd saved these, and the next op wrote to them: with its consent if no version counter has moved."""
        for handle, tensor, version, entry in self._suspects:
            if tensor._version == version:
                self._wrote_late = True
                value, _, _ = self._places[handle]
                self._places[handle] = value, entry + 1, version
                if self.checksums is not None:
                    self.checksums[handle] = checksum(tensor)
        self._suspects.clear()

    def _explain(self, root: int, tensor: Tensor, op: Any) -> None:
        """A tensor made of nothing is used, and no op has written to it: hold it, unless it is a constant still."""
        tape = self.tape
        entry = tape.entries[tape.factories.pop(root)]
        plan = entry[PLAN]
        whole = tensor if tape.known(tensor) == root else tape.tensor_of(root)
        if whole is None:
            tape.fail(f"{op} reads memory that {plan.op} made, and that no op has written to")
        elif plan.traits.is_uninitialised or not _is_constant(entry, whole):
            self.keep(root, whole)

    def _copy_kept(self, address: int) -> None:
        tape = self.tape
        for value in self._kept_at.pop(address):
            tape.kept[value] = cloned(tape.kept[value])
            self._kept_roots.discard(tape.roots[value])

    def _image(self, root: int | None, address: int, tensor: Tensor, plan: Plan) -> None:
        leaf = self.tape.leaves.get(root) if root is not None else None
        if leaf is not None and leaf.position >= 0:
            assert self._inputs is not None
            self._inputs.copy_storage(address)
            self._wrote_inputs = True
        elif (leaf is not None and leaf.lasts) or isinstance(tensor, nn.Parameter):
            self.tape.fail(f"{plan.op} writes to a parameter")
        elif not self._settings.freeze_buffers:
            self.tape.fail(f"{plan.op} writes to a tensor from outside, and freeze_buffers is off")
        elif address not in self.images:
            storage = tensor.untyped_storage()
            self.images[address] = storage, copy_of(storage)

    def _note_generators(self, args: Any, kwargs: Any) -> None:
        for generator in (*args, *kwargs.values()):
            if isinstance(generator, torch.Generator) and generator._cdata not in self._generators:
                usual = default_generator(generator.device)
                if usual is None or usual._cdata != generator._cdata:
                    self._generators[generator._cdata] = generator, generator.get_state()

    def _wanted(self, missing: list[int]) -> list[Wanted]:
        """Return what backward may ask for; what has been written to since autograd saved it is spoilt, or later."""
        tape = self.tape
        alive = {value: reference for reference, value in tape.ids.values()} if tape.writers else {}
        for handle in missing:
            value, time, version = self._places[handle]
            writers = tape.writers.get(tape.roots[value])
            if not writers or writers[-1] < time:
                continue
            tensor = reference() if (reference := alive.get(value)) is not None else None
            if tensor is not None and tensor._version == version:
                self._places[handle] = value, len(tape.entries), version
                if self.checksums is not None:
                    self.checksums[handle] = checksum(tensor)
            else:
                self.spoilt[handle] = version
        return self.wanted(missing)

    def _check_leaves(self) -> None:
        """Nothing holds the leaves: what is gone when the forward ends will not be there in backward."""
        assert self.plan is not None
        for value in self.plan.leaves:
            leaf = self.tape.leaves[value]
            if leaf.position < 0 and leaf.tensor() is None:
                reader = next(step.entry[PLAN] for step in self.plan.steps if value in step.entry[READS])
                name = getattr(reader, "op", reader)
                self.tape.fail(f"{name} reads a tensor that no op made, and that nothing holds")

    def _let_go(self, kept: list[Handle]) -> None:
        """Hold only what replay starts from, and count it."""
        tape = self.tape
        needed = set(self.plan.kept) if self.plan is not None else set()
        held = {value: tensor for value, tensor in tape.kept.items() if value in needed}
        addresses = {storage_address(part) for tensor in held.values() for part in tensor_parts(tensor)}
        loose = [handle for handle in kept if not handle.borrowed and handle.storage not in addresses]
        compact_views([handle for handle in loose if isinstance(handle.value, Tensor)])
        self.figures = self._count(held, kept)
        tape.kept = held
        if self.plan is not None:
            running = {step.number for step in self.plan.steps}
            tape.states = {number: states for number, states in tape.states.items() if number in running}

    def _count(self, held: dict[int, Tensor], kept: list[Handle]) -> KeptFigures:
        sizes: dict[int, tuple[int, int]] = {}  # address of a storage -> bytes, rule
        rule_at: dict[int, int] = {}
        dead: dict[int, int] = {}
        for value, tensor in self.tape.kept.items():
            rule = self._rules.get(value, NO_RULE)
            for part in tensor_parts(tensor):
                address = storage_address(part)
                rule_at[address] = rule
                if value in held:
                    sizes[address] = storage_bytes(part), rule
                elif value in self._rules:
                    dead[address] = storage_bytes(part)
        for handle in kept:
            if not handle.borrowed and isinstance(handle.value, Tensor):
                rule = rule_at.get(handle.storage, NO_RULE)
                for part in tensor_parts(handle.value):
                    sizes.setdefault(storage_address(part), (storage_bytes(part), rule))
        rules = dict.fromkeys(self._rules.values(), 0)
        for size, rule in sizes.values():
            rules[rule] = rules.get(rule, 0) + size
        lost = sum(size for address, size in dead.items() if address not in sizes)
        return KeptFigures(sum(size for size, _ in sizes.values()), lost, rules, dict(self.hits))


def _is_constant(entry: Entry, tensor: Tensor) -> bool:
    """Whether ``tensor``, which the op of ``entry`` made of no values, is still what it makes.

    Asked once for all calls at one place of a kind of region: to compare waits for the device, and a kernel that writes
    to such tensors unseen does so in every call.
    """
    plan = entry[PLAN]
    if plan.constant is None:
        args = [tensor if one is HOLE else one for one in entry[REST]]
        plan.constant = bool(torch.equal(plan.run(*args, **(entry[KWARGS] or {})), tensor))
    return bool(plan.constant)
