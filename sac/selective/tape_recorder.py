"""The recorder of the replay engine towards the mode of a region's forward: decides, holds, and writes the tape."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from sac.ops.traits import FILLING, FILLING_PARTS
from sac.region.detach import detached
from sac.region.inputs import KeptInputs
from sac.region.settings import Settings
from sac.selective.checksum import Sums, checksum, find_different
from sac.selective.draws import Draws
from sac.selective.forward_state import Generators, Images, forget_freed, image_of, note_generator
from sac.selective.made_of import MadeOf
from sac.selective.modes import decide
from sac.selective.record import gathers, written_tensors
from sac.selective.stats import NO_RULE
from sac.selective.table import BoundRule, Plan, Table, run_op
from sac.selective.tape import Tape
from sac.selective.tape_entries import HOLE
from sac.selective.tape_mode import TapeMode, generators_of, new_tensors
from sac.selective.tensors import storage_address, tensor_parts, tensors_of, written_parts
from sac.selective.weights import NOT_PARAMETERS, is_large

_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class TapeRecorder:
    """What ``TapeMode`` asks; see Note [The tape]. What the frame asks is in ``ReplayRecorder``."""

    def __init__(self, table: Table, owners: tuple[nn.Module, ...], settings: Settings, *, verifies: bool) -> None:
        self.table = table
        self.tape = Tape()
        self.paused = False  # a replay runs inside the region's own forward: nothing of it is recorded
        self.images: Images = {}
        self.checksums: dict[int, Sums] | None = {} if verifies else None  # of missing handles
        self.may_save = False
        self.reads_values = False  # the value of a tensor was read: the program may have branched on it
        self.calls: defaultdict[Plan, int] = defaultdict(int)
        self.alternations: defaultdict[int, int] = defaultdict(int)
        self.hits: defaultdict[int, int] = defaultdict(int)
        self.recent: list[tuple[int, Tensor, int]] = []  # handles of what autograd saved since the last op, and roots
        self.suspects: list[tuple[int, Tensor, int, int]] = []
        self.draws = Draws(self.tape)
        self._settings = settings
        self._made_of = MadeOf(self.tape, owners)
        self._places: dict[int, tuple[int, int, int]] = {}  # missing handle -> value, number of the next entry, version
        self._kept_in = self.tape.kept_in
        self._in_order = False  # whether a value may come back with other strides
        self._routing_sums: dict[int, Sums] = {}  # if verified: result of an op that chooses -> its checksum
        self._rules: dict[int, int] = {}  # kept value -> rule
        self._generators: Generators = {}
        self._routing: list[tuple[Plan, range]] = []  # calls of ops that may answer differently, and their results
        self._written_parameters: set[int] = set()  # addresses of parameters that the region itself writes to
        self._gathered: set[int] = set()  # after trouble: addresses of parameters, which FSDP may have filled in here
        self._inputs: KeptInputs | None = None
        self._wrote_inputs = False
        self._wrote_late = False

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
                    self._keep_routing(plan, value, tensors[value - first])
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
            for part in written_parts(tensor):
                if part.layout is not torch.strided:
                    tape.fail(f"{plan.op} writes to a tensor without strides")
                    continue
                address = storage_address(part)
                root = tape.by_storage.get(address)
                if root is None and part is tensor and (value := tape.known(tensor)) is not None:
                    root = tape.roots[value]  # the first value there is gone, and this is a view of it
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
        new = [first] if count == 1 else [*range(first, first + count)]
        if not count or min(roots[first:]) < first:  # it gave back an argument, or a view of one
            new = [value for value in new if roots[value] >= first]
            if not new or plan.must_save:
                return False
        if not plan.must_save and call not in plan.calls_on_inputs and self._is_of_parameters(plan, call, out, reads):
            return False
        number = rule.index if rule is not None else NO_RULE
        tensors = (out,) if count == 1 and type(out) is Tensor else new_tensors(out)
        for value in new:
            self._keep_routing(plan, value, tensors[value - first])
            self._rules[value] = number
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

    def _keep_routing(self, plan: Plan, value: int, tensor: Tensor) -> None:
        self.keep(value, tensor)
        if plan.must_save and self.checksums is not None and not plan.is_collective:  # whose result is not there yet
            self._routing_sums[value] = checksum(self.tape.kept[value])

    def sum_up(self, handle: int, tensor: Tensor) -> None:
        """If the call is verified: note the bits of what autograd has saved as ``handle``."""
        if self.checksums is not None:
            self.checksums[handle] = checksum(tensor, in_order=self._in_order)

    def different(self, values: list[tuple[int, Any]]) -> list[tuple[int, Tensor]]:
        """Return those of these handles with their values that are not what autograd saved in forward."""
        assert self.checksums is not None
        there = [(handle, value) for handle, value in values if isinstance(value, Tensor)]
        pairs = [(self.checksums[handle], checksum(value, in_order=self._in_order)) for handle, value in there]
        return [there[place] for place in find_different(pairs)]

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
                self.sum_up(handle, tensor)
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
            kept[value] = kept[value].clone()  # which the modes around see: what measures memory among them

    def _image(self, root: int | None, address: int, tensor: Tensor, plan: Plan) -> None:
        leaf = self.tape.leaves.get(root) if root is not None else None
        if leaf is not None and leaf.position >= 0:
            assert self._inputs is not None
            self._inputs.copy_storage(address)
            self._wrote_inputs = True
        elif (leaf is not None and leaf.lasts) or isinstance(tensor, nn.Parameter):
            if gathers(plan) or type(tensor) not in (Tensor, nn.Parameter):
                self.tape.fail(f"{plan.op} writes to a parameter")
            elif address not in self.images:
                self._written_parameters.add(address)
                self.images[address] = image_of(tensor)
        elif plan.traits.is_infrastructure:
            # FSDP of FullyShardedDataParallel: parameters are gathered for a module inside the region, and let go of.
            self.tape.fail(f"{plan.op} writes to a tensor from outside")
        elif not self._settings.freeze_buffers:
            self.tape.fail(f"{plan.op} writes to a tensor from outside, and freeze_buffers is off")
        elif address not in self.images:
            forget_freed(self.images)
            self.images[address] = image_of(tensor)

    def _note_generators(self, args: Any, kwargs: Any) -> None:
        for generator in (*args, *kwargs.values()):
            if isinstance(generator, torch.Generator):
                note_generator(self._generators, generator)


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
