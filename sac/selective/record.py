"""What one region call holds for its recomputation: saved values, generator states, images of what it wrote to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from sac.errors import Problem
from sac.region.handles import Handle
from sac.region.inputs import KeptInputs
from sac.region.parking import PackHooks, park
from sac.region.states.bindings import UnseenWriteError
from sac.region.states.rng import default_generator
from sac.region.storages import describe, version_of
from sac.selective.checksum import Sums, find_different, sums_of
from sac.selective.compact import compact_views
from sac.selective.forward_state import Images, forget_freed, image_of, note_generator
from sac.selective.labels import Description, Labels
from sac.selective.table import BoundRule, Plan, Table, plan_name
from sac.selective.tensors import (
    map_tensors,
    storage_address,
    storage_bytes,
    tensor_parts,
    tensors_of,
    written_parts,
)
from sac.selective.whole_modules import SavedCall, SavedModules

# Note [What is kept, and what is not]
#
# A saved op's output is used in two ways. Autograd may save it: then the handle keeps exactly what autograd would have
# kept. And recomputation serves it instead of running the op: then it has to be held until the last missing handle is
# filled. At the end of the forward an output that does neither is let go (it is dead: backward can never read it):
#  - no handle is missing: nothing is run again, so only what handles keep stays;
#  - the op runs after the last missing handle is filled: early stop never reaches it;
#  - only saved ops read it, which recomputation serves without their arguments. The Python that runs again still passes
#    the op: it runs anew, so that whatever looks at the value unseen by the dispatcher sees the true one. That is done
#    for ops without FLOPs only (a norm's inner sums, say); a matmul whose result nothing recomputed reads stays held.
# A handle whose tensor is a small view of a big output that nothing else needs keeps a copy of the view instead.
#
# In-place writes. A held output is copied right before an op of the region writes to its storage, and served as a copy.
# A tensor from outside that the region writes to (a buffer, an input) is imaged right before the first write; the image
# is put back for recomputation, and the present value after it. So statistics and counters advance once. Not with
# `freeze_buffers=False`: then only inputs and held outputs are copied.


_GATHERING = frozenset({"aten.split_with_sizes_copy", "aten.set_", "aten.resize_"})  # FSDP's


class SavedValue:
    """One saved call: its result, and how to find it again; see Note [Labels]."""

    __slots__ = (
        "call",
        "description",
        "foreign",
        "must",
        "outputs",
        "overwritten",
        "packs_before",
        "plan",
        "read",
        "rng_after",
        "rule",
        "signature",
        "sums",
        "twin",
        "written",
    )

    def __init__(self, plan: Plan, call: int, rule: BoundRule | None, signature: int, twin: int, foreign: bool) -> None:
        self.plan = plan
        self.call = call
        self.rule = rule
        self.signature = signature
        self.twin = twin  # how many calls had the same signature before
        self.foreign = foreign
        self.must = plan.must_save
        self.description: Description = ()
        self.outputs: Any = None
        self.packs_before = 0
        self.rng_after: list[tuple[torch.Generator, torch.Tensor]] = []
        self.read = False  # an op that is not saved reads it, and so will be in need of it in recomputation
        self.sums: Sums = ()  # checksums of the results, if they are compared
        self.overwritten = False  # something that is no op has written to the results: the op runs again
        self.written = False  # the region writes to it later: it is held, and served, as a copy


class CallRecord:
    """State of one call of a region under a table; the forward fills it, the recomputation reads it."""

    def __init__(
        self,
        table: Table,
        path: str,
        owners: tuple[nn.Module, ...] = (),
        *,
        freeze_buffers: bool = True,
        modules: SavedModules | None = None,
        verifies: bool = True,
    ) -> None:
        self.table = table
        self.verifies = verifies  # whether what is served is compared with what was saved
        self.modules = modules
        self.inside: SavedCall | None = None  # the saved module that runs now, and is watched
        self.path = path
        self.freeze_buffers = freeze_buffers
        self.labels = Labels(owners)
        self.places = self.labels.places
        self.saved: list[SavedValue] = []
        self.decided: list[SavedValue] = []  # after the forward: all that was decided to be saved, for the report
        self.by_storage: dict[int, list[SavedValue]] = {}
        self.written_parameters: set[int] = set()  # addresses of parameters that the region itself writes to
        self._versions: dict[int, int] = {}  # storage address -> version counter when its result was saved
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self.images: Images = {}  # by the address of the storage: what lay there before the first write
        self.calls: defaultdict[Plan, int] = defaultdict(int)
        self.alternations: defaultdict[int, int] = defaultdict(int)
        self.hits: defaultdict[int, int] = defaultdict(int)
        self.dead_bytes = 0
        self.rule_of: dict[int, int] = {}  # after the forward: storage address of a result -> rule that saved it
        self.visitors = self.labels.visitors
        self.known: Collection[int] = ()  # after the forward: the signatures of all its calls
        self.twins: defaultdict[int, int] = defaultdict(int)  # signature -> how many calls that may be saved had it
        self.packs = 0
        # Per tensor that autograd saved: label (None: not to be compared), foreign, maker.
        self.packed: list[tuple[int | None, bool, Plan | None]] = []
        self.inputs: KeptInputs | None = None
        self.inputs_written = False
        # Inputs and parameters are kept as they are, but not through hooks around the region: those may belong to an
        # outer checkpoint, which counts, and has to see the same with and without a recorder.
        self.keeps_persistent = True
        self.lenient = False  # a gradient was taken inside the forward: what that unpacked has no label of its own
        # The forward of a reentrant region runs without: some modules choose other kernels then, and labels say little.
        self.saw_grad = True
        self.may_save = False  # some op ran that another call of this region may save
        self.reads_values = False  # the value of a tensor was read: the program may have branched on it
        self.late_write = False  # an op wrote to a tensor that autograd had saved right before the op ran
        self.forward_over = False
        self.paused = False  # a recomputation runs inside the region's own forward: nothing of it is recorded
        self.kept_places: set[int] | None = None  # inside torch.utils.checkpoint: which packed tensors are ours
        self.held_addresses: frozenset[int] = frozenset()
        self._packed_since_op: list[Handle] = []
        self._is_parked = False

    # Forward

    def save(self, value: SavedValue, out: Any) -> None:
        """Hold ``out``, the result of the call that ``value`` stands for, without its graph."""
        value.outputs = map_tensors(out, _detached)
        if self.verifies and not value.plan.is_collective:  # whose result is there when it has been waited for
            value.sums = sums_of(value.outputs)
        value.packs_before = self.packs
        self.saved.append(value)
        for tensor in tensors_of(out):
            for part in tensor_parts(tensor):
                address = storage_address(part)
                self.by_storage.setdefault(address, []).append(value)
                self._versions[address] = version_of(part)

    def _look_at_version(self, tensor: torch.Tensor, address: int) -> bool:
        """Whether what is held at ``address`` is as the op left it. Something that is no op may have written there."""
        if version_of(tensor) <= self._versions[address]:
            return True
        lost = self.by_storage.pop(address)
        self.saved = [value for value in self.saved if value not in lost]  # these ops run again
        return False

    def note_reads(self, args: tuple[Any, ...]) -> None:
        """An op that is not saved has read ``args``."""
        if self.by_storage:
            for tensor in tensors_of(args):
                for part in tensor_parts(tensor):
                    address = storage_address(part)
                    if address in self.by_storage and self._look_at_version(part, address):
                        for value in self.by_storage[address]:
                            value.read = True

    def pack(self, tensor: torch.Tensor, handle: Handle) -> None:
        """Autograd saves ``tensor``: keep it if it is, or is a view of, a saved output, a parameter or an input."""
        self.packs += 1
        handle.storage = address = storage_address(tensor)
        kind = type(tensor)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            self._pack_other(tensor, handle)
            return
        labels = self.labels
        label = labels.of_plain(tensor, kind, address)
        # Without rules parameters and inputs are saved again in recomputation; their data may be elsewhere (ZeRO-3).
        is_compared = bool(self.table.rules) or not labels.lasts(label)
        self.packed.append((label if is_compared else None, label in labels.foreign, labels.makers.get(label)))
        if self.table.saves_everything:
            handle.keep(tensor)
            handle.borrowed = labels.origin(tensor) != "op"
            return
        self._packed_since_op.append(handle)
        if address in self.by_storage and self._look_at_version(tensor, address):
            handle.keep(tensor)
        elif self.keeps_persistent and labels.lasts(label):
            handle.keep(tensor)
            handle.borrowed = True

    def _pack_other(self, tensor: torch.Tensor, handle: Handle) -> None:
        """Do what ``pack`` does, for a subclass of tensor: it may have several storages."""
        parts = tensor_parts(tensor)
        label = self.labels.of(tensor)
        self.packed.append((label, label in self.labels.foreign, self.labels.makers.get(label)))
        if self.table.saves_everything:
            handle.keep(tensor)
            handle.borrowed = all(self.labels.is_persistent(part) for part in parts)
            return
        self._packed_since_op.append(handle)
        if all(storage_address(part) in self.by_storage for part in parts):
            handle.keep(tensor)
        elif self.keeps_persistent and all(self.labels.is_persistent(part) for part in parts):
            handle.keep(tensor)
            handle.borrowed = True

    def before_write(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op is about to write to some of its arguments: copy or image what lies there, if it is wanted as it is."""
        for tensor in written_tensors(plan, args, kwargs):
            for part in written_parts(tensor):
                address = storage_address(part)
                if self.modules is not None:
                    self.modules.before_write(address)
                is_input = self.labels.origin(part) == "input"
                if self.inside is not None and self.modules is not None and (is_input or address in self.by_storage):
                    self.modules.learnt.keeps_watching = True
                if address in self.by_storage:
                    if self._look_at_version(part, address):
                        self._copy_saved(address)
                elif self.inside is None or is_input:
                    self._image(address, part, plan)
                if any(handle.storage == address for handle in self._packed_since_op):
                    self.late_write = True

    def after_module(self, written: Iterable[torch.Tensor], where: str) -> None:
        """A saved module has run, and has written to these; raises if it wrote to a saved value that nobody copied."""
        for part in (part for tensor in written for part in tensor_parts(tensor)):
            if storage_address(part) in self.by_storage:
                raise UnseenWriteError(
                    Problem(
                        where=where,
                        found=f"this saved module wrote in place to a value ({describe(part)}) that another rule "
                        "saves, as in no call with such inputs before, so that nothing was kept to recompute it from",
                        fix="go back to a checkpoint of the training: from now on the region keeps what it writes to",
                    )
                )

    def after_op(self) -> None:
        """An op has run: what autograd saved before it is no longer about to be written by it."""
        if self._packed_since_op:
            self._packed_since_op.clear()

    def _copy_saved(self, address: int) -> None:
        for value in self.by_storage.pop(address):
            value.outputs = map_tensors(value.outputs, lambda t: _copy_if_at(t, address))
            value.written = True

    def _image(self, address: int, tensor: torch.Tensor, plan: Plan) -> None:
        origin = self.labels.origin(tensor)
        if origin == "input" and self.inputs is not None:
            self.inputs.copy_storage(address)
            self.inputs_written = True
        elif address in self.images or tensor.layout is not torch.strided:
            return
        elif origin == "parameter":
            if not (gathers(plan) or tensor.is_inference()):
                self.images[address] = image_of(tensor)
                self.written_parameters.add(address)
        elif self.freeze_buffers and origin in ("foreign", "input"):
            forget_freed(self.images)
            self.images[address] = image_of(tensor)

    def note_generator(self, generator: torch.Generator) -> None:
        """See ``forward_state.note_generator``."""
        note_generator(self.generators, generator)

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """Let dead outputs go; return whether the region can be run again without this record."""
        self.forward_over = True
        self._packed_since_op.clear()
        in_handles = {handle.storage for handle in kept}
        self.rule_of = {
            address: value.rule.index
            for value in self.saved
            if value.rule is not None
            for address in addresses_of([value])
        }
        alive = [v for v in self.saved if v.packs_before <= last_missing and not self._is_dead(v, in_handles)]
        held = {id(value) for value in alive}
        addresses = addresses_of(alive)
        if self.modules is not None:
            self.modules.close(last_missing)
        compact_views([handle for handle in kept if not handle.borrowed and handle.storage not in addresses])
        for value in self.saved:
            if id(value) not in held:
                self._let_go(value, in_handles)
        self.decided, self.saved = self.saved, alive
        self.held_addresses = addresses_of(value for value in alive if not value.written)
        self.by_storage.clear()
        forget_freed(self.images)
        for address in self.labels.parameter_addresses:  # FSDP gathers a parameter into a storage by an out= op
            if address not in self.written_parameters:
                self.images.pop(address, None)
        self.known = self.labels.makers.keys()
        self.visitors = (
            self.labels.visitors
        )  # a foreign tensor of the recomputation never has the label of one of these
        self.labels = Labels()
        return not (alive or self.writes_or_draws or (self.modules is not None and self.modules.calls))

    @property
    def needs_mode(self) -> bool:
        """Whether later calls like this one have to run under a dispatch mode."""
        return self.may_save or self.writes_or_draws

    @property
    def writes_or_draws(self) -> bool:
        """Whether this call did something that a recomputation without a dispatch mode would get wrong."""
        return bool(self.images or self.generators or self.late_write or self.inputs_written)

    @staticmethod
    def _is_dead(value: SavedValue, in_handles: set[int]) -> bool:
        """Whether only saved ops read the result, so that nothing recomputed is made from it, and it is cheap."""
        if value.read or value.written or value.must or value.rng_after or not value.plan.is_cheap:
            return False
        return in_handles.isdisjoint(addresses_of([value]))

    def _let_go(self, value: SavedValue, in_handles: set[int]) -> None:
        for tensor in tensors_of(value.outputs):
            for part in tensor_parts(tensor):
                if storage_address(part) not in in_handles:
                    self.dead_bytes += storage_bytes(part)
        value.outputs = None

    def look_for_overwritten(self) -> None:
        """Compare what is held with what the ops returned: Python or a kernel may have written there, seen by no mode.

        To hand that out would be to write twice.
        """
        if self._is_parked:
            return  # hooks on saved tensors were given them as they were
        values = [value for value in self.saved if value.sums and not value.overwritten]
        different = find_different([(value.sums, sums_of(value.outputs)) for value in values])
        for place in different:
            values[place].overwritten = True

    def park(self, hooks: PackHooks) -> None:
        """Hand the held values to the saved-tensor hooks around the region."""
        self.look_for_overwritten()
        self._is_parked = True
        self.held_addresses = frozenset()  # what comes back from the hooks is nobody else's to write to
        for value in self.saved:
            value.outputs = map_tensors(value.outputs, lambda tensor: park(tensor, hooks))
        if self.modules is not None:
            self.modules.park(hooks)

    # Recomputation

    def drop(self) -> None:
        """Let every held value go."""
        self.saved = []
        self.images = {}
        self.generators = {}
        if self.modules is not None:
            self.modules.drop()


def addresses_of(values: Iterable[SavedValue]) -> frozenset[int]:
    """Return the addresses of the storages in which the results of saved calls lie."""
    tensors = (tensor for value in values for tensor in tensors_of(value.outputs))
    return frozenset(storage_address(part) for tensor in tensors for part in tensor_parts(tensor))


def default_generators(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    """Return the default generators that an op with these arguments may draw from."""
    device = kwargs.get("device")
    tensors = tensors_of([*args, *kwargs.values()])
    if (device is None or str(device) == "cpu") and all(tensor.is_cpu for tensor in tensors):
        return [torch.default_generator]
    devices = {tensor.device for tensor in tensors} | {torch.device("cpu")}
    if device is not None:
        devices.add(torch.device(device))
    found = {id(generator): generator for generator in map(default_generator, devices) if generator is not None}
    return list(found.values())


def _copy_if_at(tensor: torch.Tensor, address: int) -> torch.Tensor:
    return tensor.clone() if any(storage_address(part) == address for part in tensor_parts(tensor)) else tensor


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def gathers(plan: Plan) -> bool:
    """Whether an op fills parameters with what their shards hold, so that its writes are not the region's own."""
    return plan.traits.is_infrastructure or plan.is_collective or plan_name(plan) in _GATHERING


def written_tensors(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments that the plan's op writes to."""
    traits = plan.traits
    written = [args[place] for place in traits.mutated_args if place < len(args)]
    return tensors_of([*written, *(kwargs[name] for name in traits.mutated_kwargs if name in kwargs)])
