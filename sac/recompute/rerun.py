"""Rerun: the region's Python runs again, and saved results are served instead of running their ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from sac.checksums import Sums, find_different, same, sums_of
from sac.errors import Problem, RegionError
from sac.outer_hooks import PackHooks, active_hooks
from sac.policy.model import Decision
from sac.recompute.forward_state import WriteGuard
from sac.recompute.module_tracker import RegionMode
from sac.recompute.op_trace import NO_RULE, OpTraceRecorder, SavedFigures
from sac.recompute.parameter_only import NOT_PARAMETERS, is_large
from sac.recompute.table import (
    CallSite,
    DecisionTable,
    ResolvedRule,
    decide,
    gathers,
    is_holdable,
    run_op,
    site_name,
)
from sac.recompute.value_ids import Description, ValueIds
from sac.recompute.whole_modules import SavedModuleCall, SavedModules, SavingPass, ServingPass
from sac.region.frame import (
    OTHER_PATH,
    OTHER_VALUE,
    OTHER_WRITE,
    Handle,
    Handles,
    NoEarlyStop,
    Progress,
    Recorder,
)
from sac.region.inputs import RegionInputs
from sac.region.module_state import ModuleState, UnseenWriteError
from sac.region.rng import default_generator, state_of, states_of
from sac.region.undo import UndoStack
from sac.stores.saved_tensor import Held, SavedResult, SavedTensor, compact, fetch_recomputed
from sac.tensors import (
    describe,
    equal,
    lazy_bits,
    map_tensors,
    storage_address,
    tensor_parts,
    tensors_of,
    version_of,
    written_parts,
)

if TYPE_CHECKING:
    from sac.recompute.module_tracker import TrackedForward


# -- State of one region call for its recomputation: saved values, generator states, snapshots of written storages

# Note [What is kept, and what is not]
#
# A saved op's output has two uses. Autograd may save it: the handle then keeps exactly what autograd would have kept.
# And recomputation serves it instead of running the op: it is then held until the last missing handle is filled. When
# the forward ends, an output with neither use is freed (it is dead: backward can never read it):
#  - no handle is missing: nothing is recomputed, so only what handles keep stays;
#  - the op runs after the last missing handle is filled: early stop ends the recomputation before it;
#  - only saved ops read it, and recomputation serves these without their arguments. The rerun Python still reaches the
#    op, so the op runs again and code that reads the value without the dispatcher sees the true one. This applies only
#    to ops without FLOPs (for example the inner sums of a norm). The result of a matmul stays held even if nothing
#    recomputed reads it.
# If a handle's tensor is a small view of a large output that nothing else needs, the handle keeps a copy of the view.
#
# In-place writes. Right before an op of the region writes to the storage of a held output, the output is copied.
# Recomputation serves a fresh copy of it. Right before the first write to an external tensor (a buffer, an input), a
# snapshot is taken. Recomputation starts from the snapshot and then restores the present value, so statistics and
# counters advance once. With `freeze_buffers=False` there are no snapshots of buffers: only inputs, parameters and held
# outputs are copied.
#
# Example. A rule saves `aten.mm` in a region that computes `h = x @ w1; g = gelu(h); y = g @ w2`. Autograd saves w1, x,
# h, w2 and g, in this order: handles 0 to 4. Only handle 4 (g) is missing: x is an input, w1 and w2 are parameters, h
# is a saved output. The recorder holds h and y. When the forward ends, y is freed, because its matmul runs after handle
# 4 is filled. h stays held, because the gelu reads it and is not saved. Recomputation serves h, runs the gelu, fills
# handle 4 and stops before the second matmul.


class SavedValue:
    """One saved call: its result, and how recomputation finds it again; see Note [Value ids]."""

    __slots__ = (
        "call",
        "description",
        "external",
        "must_save",
        "occurrence",
        "outputs",
        "overwritten",
        "packs_before",
        "read",
        "results",
        "rng_after",
        "rule",
        "signature",
        "site",
        "sums",
    )

    def __init__(
        self, site: CallSite, call: int, rule: ResolvedRule | None, signature: int, occurrence: int, external: bool
    ) -> None:
        self.site = site
        self.call = call
        self.rule = rule
        self.signature = signature
        self.occurrence = occurrence  # how many earlier calls had the same signature
        self.external = external
        self.must_save = site.must_save
        self.description: Description = ()
        self.outputs: Any = None
        self.results: list[SavedResult] = []  # the tensors in `outputs`
        self.packs_before = 0
        self.rng_after: list[tuple[torch.Generator, torch.Tensor]] = []
        self.read = False  # an op that is not saved reads it, so recomputation needs it
        self.sums: Sums = ()  # checksums of the results, if they are compared
        self.overwritten = False  # something other than an op wrote to the results: the op runs again

    def hold(self, outputs: Any) -> None:
        """Hold ``outputs``, the op's result with a ``SavedResult`` in place of each tensor; nothing if it is None."""
        self.outputs, self.results = outputs, tensors_of(outputs, SavedResult)

    @property
    def written(self) -> bool:
        """Whether the region writes to a result later: it is held and served as a copy."""
        return any([one.written for one in self.results])  # noqa: C419 (a generator takes longer)


class RerunState:
    """State of one region call under a decision table: the forward fills it, the recomputation reads it."""

    def __init__(
        self,
        table: DecisionTable,
        path: str,
        owners: tuple[nn.Module, ...] = (),
        *,
        freeze_buffers: bool = True,
        modules: SavedModules | None = None,
        verifies: bool = True,
        new_value_ids: Callable[..., ValueIds] = ValueIds,
    ) -> None:
        self.table = table
        self.verifies = verifies  # whether served values are compared with what was saved
        self.new_value_ids = new_value_ids
        self.modules = modules
        self.path = path
        self.freeze_buffers = freeze_buffers
        self.value_ids = new_value_ids(owners)
        self.input_ids, self.packed = self.value_ids.input_ids, self.value_ids.packed
        self.inside: SavedModuleCall | None = None  # the saved module that runs now and is watched
        self.paused = False  # a recomputation runs inside the region's own forward: none of it is recorded
        self.saved: list[SavedValue] = []
        self.decided: list[SavedValue] = []  # after the forward: every value decided to be saved, for the report
        self.by_storage: dict[int, list[SavedValue]] = {}
        self.written_parameters: set[int] = set()  # addresses of parameters that the region itself writes to
        self.snapshots = WriteGuard()  # storage address -> contents before the first write
        self.calls: MutableMapping[CallSite, int] = defaultdict(int)
        self.alternations: MutableMapping[int, int] = defaultdict(int)
        self.hits: defaultdict[int, int] = defaultdict(int)
        self.dead_bytes = 0
        self.rule_of: dict[int, int] = {}  # after the forward: storage address of a result -> rule that saved it
        self.external_storages = self.value_ids.external_storages
        self.known: Collection[int] = ()  # after the forward: the signatures of all its calls
        # signature -> number of calls with it that may be saved
        self.occurrences: defaultdict[int, int] = defaultdict(int)
        # Whether all that the region starts from comes back in the same layout, so that parts of it can be told apart.
        self.keeps_layouts = False
        self.inputs: RegionInputs | None = None
        self.inputs_written = False
        # Whether handles keep inputs and parameters. They do not under saved-tensor hooks around the region: these may
        # belong to an outer checkpoint, which counts packed tensors and must see the same ones with and without a
        # recorder.
        self.keeps_persistent = True
        self.lenient = False  # a gradient was taken inside the forward: what it unpacked has no value id of its own
        # False in the forward of a reentrant region: some modules then choose other kernels, and value ids say little.
        self.saw_grad = True
        self.may_save = False  # an op ran that may be saved in another call of this region
        self.reads_values = False  # the program read the value of a tensor and may have branched on it
        self.late_write = False  # an op wrote to a tensor that autograd had saved right before the op ran
        self.forward_over = False
        self.kept_places: set[int] | None = None  # in torch.utils.checkpoint: indices of packed tensors that we keep
        self._is_packed_outside = False

    def pause(self, is_paused: bool) -> None:
        """A recomputation inside the region's own forward begins or ends."""
        self.paused = is_paused
        self._tell_turn()

    def run_inside(self, call: SavedModuleCall | None) -> None:
        """A saved module that is watched begins to run, or, if it is None, has run."""
        self.inside = call
        self._tell_turn()

    def _tell_turn(self) -> None:
        inside = self.table.sites_of(self.inside.call_key[0]) if self.inside is not None else None
        self.value_ids.tell_turn(is_paused=self.paused, inside=inside)

    @property
    def packs(self) -> int:
        """How many tensors autograd has saved."""
        return len(self.packed)

    @property
    def rule_of_no_op(self) -> int:
        """The rule under which counts what is no op's result."""
        whole = self.table.whole_rule("") if self.table.saves_whole("") else None
        return whole.index if whole is not None else NO_RULE

    # Forward

    def hold(
        self,
        site: CallSite,
        call: int,
        signature: int,
        occurrence: int,
        external: bool,
        description: Description,
        out: Any,
        has_graph: bool,
        has_drawn: bool,
    ) -> None:
        """Hold ``out``, the result of an op on which the library has decided.

        ``has_graph``: whether it is the result itself, or a copy without a graph. ``has_drawn``: from the default
        generator of the CPU.
        """
        rule = site.conditional_rules[0].resolved if site.conditional_rules else site.final_rule
        value = SavedValue(site, call, rule, signature, occurrence, external)
        value.description = description
        if has_drawn:
            value.rng_after = states_of([torch.default_generator])
        self.save(value, out, has_graph=has_graph)

    def save(self, value: SavedValue, out: Any, *, has_graph: bool = True) -> None:
        """Hold ``out``, the result of the call that ``value`` describes, without its graph."""
        if type(out) is torch.Tensor:  # the usual case
            value.outputs = one = SavedResult(out, has_graph=has_graph)
            value.results = [one]
        else:
            value.hold(map_tensors(out, SavedResult if has_graph else partial(SavedResult, has_graph=False)))
        if self.verifies and not value.site.is_collective:  # the result of a collective is complete only after its wait
            value.sums = self.value_ids.sums_of(out)
        value.packs_before = len(self.packed)
        self.saved.append(value)
        for tensor in (out,) if type(out) is torch.Tensor else tensors_of(out):
            for part in tensor_parts(tensor):
                self.by_storage.setdefault(self.value_ids.note_saved(part), []).append(value)

    def _look_at_version(self, tensor: torch.Tensor, address: int) -> bool:
        """Whether the value held at ``address`` is as its op left it; drop it if something else wrote to it."""
        if version_of(tensor) <= self.value_ids.saved_versions[address]:
            return True
        lost = self._take_saved(address)
        self.saved = [value for value in self.saved if value not in lost]  # these ops run again
        return False

    def _take_saved(self, address: int) -> list[SavedValue]:
        """Return the values held at ``address``, of which nothing more is recorded."""
        self.value_ids.saved_versions.pop(address)
        return self.by_storage.pop(address)

    def note_reads(self, args: tuple[Any, ...]) -> None:
        """Record that an op that is not saved has read ``args``."""
        if self.by_storage:
            for tensor in tensors_of(args):
                for part in tensor_parts(tensor):
                    address = storage_address(part)
                    if address in self.by_storage and self._look_at_version(part, address):
                        for value in self.by_storage[address]:
                            value.read = True

    def pack(self, tensor: torch.Tensor, handle: Handle) -> None:
        """Keep ``tensor``, which autograd saves, if it is or views a saved output, a parameter or an input."""
        handle.storage = address = storage_address(tensor)
        cls = type(tensor)
        if cls is not torch.Tensor and cls is not torch.nn.Parameter:
            self._pack_other(tensor, handle)
            return
        value_ids = self.value_ids
        value_id = value_ids.of_plain(tensor, cls, address)
        # Without rules, recomputation saves parameters and inputs again; their data may have moved by then (ZeRO-3).
        is_compared = bool(self.table.rules) or not value_ids.is_persistent_id(value_id)
        is_external, maker = value_id in value_ids.external, value_ids.producers.get(value_id)
        has_place = maker is not None and not is_external and self.keeps_layouts and tensor.layout is torch.strided
        offset = int(tensor.storage_offset()) if has_place else -1
        self.packed.append((value_id if is_compared else None, is_external, maker, offset, lazy_bits(tensor)))
        if self.table.saves_everything:
            handle.keep(tensor)
            handle.is_external = value_ids.source(tensor) != "op"
            return
        value_ids.recent.add(address)
        if address in self.by_storage and self._look_at_version(tensor, address):
            handle.keep(tensor)
        elif self.keeps_persistent and value_ids.is_persistent_id(value_id):
            handle.keep(tensor)
            handle.is_external = True

    def _pack_other(self, tensor: torch.Tensor, handle: Handle) -> None:
        """Do the work of ``pack`` for a tensor subclass, which may have several storages."""
        parts = tensor_parts(tensor)
        value_id = self.value_ids.of(tensor)
        known = value_id in self.value_ids.external, self.value_ids.producers.get(value_id)
        self.packed.append((value_id, *known, -1, lazy_bits(tensor)))
        if self.table.saves_everything:
            handle.keep(tensor)
            handle.is_external = all(self.value_ids.is_persistent(part) for part in parts)
            return
        self.value_ids.recent.add(handle.storage)
        if all(storage_address(part) in self.by_storage for part in parts):
            handle.keep(tensor)
        elif self.keeps_persistent and all(self.value_ids.is_persistent(part) for part in parts):
            handle.keep(tensor)
            handle.is_external = True

    def before_write(self, site: CallSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy or snapshot those arguments that an op is about to write to and that are needed as they are."""
        for tensor in written_tensors(site, args, kwargs):
            for part in written_parts(tensor):
                address = storage_address(part)
                if self.modules is not None:
                    self.modules.before_write(address)
                is_input = self.value_ids.source(part) == "input"
                is_large = self.modules is not None and address in self.modules.without_copy
                if self.inside is not None and self.modules is not None and address in self.modules.parameters:
                    self.inside.runs_again = True
                if address in self.by_storage:
                    if self._look_at_version(part, address):
                        self._copy_saved(address)
                elif self.inside is None or is_input or is_large:
                    self._snapshot(address, part, site)
                if address in self.value_ids.recent:
                    self.late_write = True

    def after_module(self, written: Iterable[torch.Tensor], where: str) -> None:
        """A saved module has written to ``written``; raise if it wrote to a saved value of which there is no copy."""
        for part in (part for tensor in written for part in tensor_parts(tensor)):
            if storage_address(part) in self.by_storage:
                raise UnseenWriteError(
                    Problem(
                        where=where,
                        found=f"this saved module wrote in place to a value ({describe(part)}) that another rule "
                        "saves, but not by an op that sac could see, so there is no copy to recompute from",
                        fix="clone the value before the module writes to it",
                    )
                )

    def after_op(self) -> None:
        """An op has run: it can no longer write to what autograd saved before it."""
        self.value_ids.recent.clear()

    def _copy_saved(self, address: int) -> None:
        for value in self._take_saved(address):
            for one in value.results:
                if address in one.sizes():  # outer modes see the clone, among them those that measure memory
                    one.value, one.written = one.fetch().clone(), True

    def _snapshot(self, address: int, tensor: torch.Tensor, site: CallSite) -> None:
        origin = self.value_ids.source(tensor)
        if origin == "input" and self.inputs is not None:
            self.inputs.copy(address)
            self.inputs_written = True
        elif address in self.snapshots or tensor.layout is not torch.strided:
            return
        elif origin == "parameter":
            if not (gathers(site) or tensor.is_inference()):
                self.snapshots.before_write(address, tensor)
                self.written_parameters.add(address)
        elif self.freeze_buffers and (origin in ("foreign", "input") or self._is_reached(address)):
            self.snapshots.before_write(address, tensor)

    def _is_reached(self, address: int) -> bool:
        """Whether the storage is that of a buffer, even if a saved module has returned it."""
        return self.modules is not None and address in self.modules.reached_addresses()

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """Free dead outputs; return whether the region can be recomputed without this state."""
        self.forward_over = True
        in_handles = {handle.storage for handle in kept}
        self.rule_of = {
            address: value.rule.index
            for value in self.saved
            if value.rule is not None
            for address in addresses_of([value])
        }
        alive = [v for v in self.saved if v.packs_before <= last_missing and not self._is_dead(v, in_handles)]
        if self.modules is not None:
            self.modules.close(last_missing)
        if kept:
            addresses = addresses_of(alive)
            compact([handle for handle in kept if not handle.is_external and handle.storage not in addresses])
        if len(alive) < len(self.saved):
            held = {id(value) for value in alive}
            for value in self.saved:
                if id(value) not in held:
                    self._release(value, in_handles)
        self.decided, self.saved = self.saved, alive
        self.by_storage.clear()
        if self.snapshots:
            self.snapshots.forget_freed()
            for address in self.value_ids.parameter_addresses:  # FSDP gathers parameters into storages by out= ops
                if address not in self.written_parameters:
                    self.snapshots.pop(address, None)
        # No external tensor of the recomputation has the value id of one of the forward's: the addresses are not used
        # again. `known` holds the storages that the library has named.
        self.known = self.value_ids.signatures()
        self.external_storages = self.value_ids.external_storages
        self.value_ids = self.new_value_ids()
        return not (alive or self.writes_or_draws or (self.modules is not None and self.modules.calls))

    @property
    def needs_mode(self) -> bool:
        """Whether later calls like this one must run under a dispatch mode."""
        return self.may_save or self.writes_or_draws

    @property
    def are_holdable(self) -> bool:
        """Whether a watch could have held all that this call has decided to save; see Note [Watched calls]."""
        return sum(self.occurrences.values()) == len(self.saved) and all(
            is_holdable(value.site) and all(type(one.value) is torch.Tensor for one in value.results)
            for value in self.saved
        )

    @property
    def writes_or_draws(self) -> bool:
        """Whether this call did something that a recomputation without a dispatch mode would get wrong."""
        return bool(self.snapshots or self.snapshots.generators or self.late_write or self.inputs_written)

    @staticmethod
    def _is_dead(value: SavedValue, in_handles: set[int]) -> bool:
        """Whether the result is cheap and only saved ops read it, so that nothing recomputed is computed from it."""
        if value.read or value.written or value.must_save or value.rng_after or not value.site.is_cheap:
            return False
        return in_handles.isdisjoint(addresses_of([value]))

    def _release(self, value: SavedValue, in_handles: set[int]) -> None:
        for one in value.results:
            self.dead_bytes += sum(size for address, size in one.sizes().items() if address not in in_handles)
        value.hold(None)

    def look_for_overwritten(self) -> None:
        """Mark the held values that differ from what their ops returned.

        Python code or a kernel may have written to them, unseen by any mode. Serving them would apply the write twice.
        """
        if self._is_packed_outside:
            return  # they were compared before the outer hooks packed them
        values = [one for one in self.value_ids.not_as_saved(self.saved) if one.sums and not one.overwritten]
        if not values:
            return
        sums_of = self.value_ids.sums_of
        pairs = [(value.sums, sums_of([one.fetch() for one in value.results])) for value in values]
        for index in find_different(pairs):
            values[index].overwritten = True

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Hand the held values to the saved-tensor hooks around the region."""
        self.look_for_overwritten()
        self._is_packed_outside = True
        for one, _ in self.held():
            one.pack_with_outer_hooks(hooks)

    def held(self) -> Held:
        """See ``Recorder.held``."""
        found: list[tuple[SavedTensor, int | None]] = []
        for value in self.saved:
            rule = value.rule.index if value.rule is not None else NO_RULE
            found += [(one, rule) for one in value.results]
        if self.modules is not None:
            found += self.modules.held()
        return found

    # Recomputation

    def drop(self) -> None:
        """Release every held value."""
        self.saved = []
        self.snapshots = WriteGuard()
        if self.modules is not None:
            self.modules.drop()


def addresses_of(values: Iterable[SavedValue]) -> frozenset[int]:
    """Return the addresses of the storages that hold the results of saved calls."""
    found: set[int] = set()
    for value in values:
        for one in value.results:
            found.update(one.sizes())
    return frozenset(found)


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


def generators_of(args: Any, kwargs: Any) -> list[torch.Generator]:
    """Return the generators that an op with these arguments may draw from: the passed ones, else the default ones."""
    passed = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    return passed or default_generators(args, kwargs)


def written_tensors(site: CallSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments that the call site's op writes to."""
    traits = site.traits
    written = [args[index] for index in traits.mutated_args if index < len(args)]
    return tensors_of([*written, *(kwargs[name] for name in traits.mutated_kwargs if name in kwargs)])


# -- Messages about saved values that recomputation cannot match


def unmatched_problem(path: str, value: SavedValue, rivals: Sequence[tuple[CallSite, Any]]) -> Problem:
    """Return the problem that ``value``'s call did not run in recomputation; ``rivals`` ran instead."""
    module = value.site.path or "the region itself"
    forward = ", ".join(_argument(part) for part in value.description)
    if rivals:
        seen = f"in recomputation with ({', '.join(_argument(part) for part in rivals[0][1])})"
    else:
        seen = "not at all in recomputation"
    return Problem(
        where=path or "region",
        found=f"call {value.call} of {site_name(value.site)} in {module} ran in forward with ({forward}) and {seen}",
        fix=OTHER_VALUE if rivals else OTHER_PATH,
    )


def other_tensor_problem(path: str, index: int, was: str, now: str, fix: str = OTHER_PATH) -> Problem:
    """Return the problem that the ``index``-th tensor that autograd saves is another one in recomputation."""
    return Problem(path or "region", f"saved tensor {index} was {was}; in recomputation it is {now}", fix=fix)


_LAZY = ("plain view", "conjugate", "negative", "negative conjugate")  # by `lazy_bits`


def overwritten_problem(path: str, op: Any) -> Problem:
    """Return the problem that a result of ``op``, which chooses, was overwritten unseen, and ``op`` chooses anew."""
    return Problem(
        where=path or "region",
        found=f"the result of {op} in forward was overwritten, not by an op but by NumPy or a kernel on raw "
        "pointers, and recomputation returns another result",
        fix="write to a copy of it",
    )


def _made_by(site: CallSite | None) -> str:
    if site is None:
        return "an input, a parameter or a part of an op's result"
    return f"the result of {site_name(site)} in {site.path or 'the region itself'}"


def _argument(description: Any) -> str:
    if _is_tensor(description):
        value_id, external, _ = description
        shape, dtype = _sort(description)
        origin = "external" if external else f"value {value_id & 0xFFFF:04x}"
        return f"{str(dtype).removeprefix('torch.')}{shape if isinstance(shape, str) else list(shape)} {origin}"
    if isinstance(description, tuple):
        return "[" + ", ".join(_argument(part) for part in description) + "]"
    return str(description)


def arguments_agree(forward: Any, recomputed: Any, *, closely: bool = True) -> bool:
    """Return whether two argument descriptions may mean the same call: equal except for external value ids.

    If not ``closely``, tensors need only have the same shapes and dtypes.
    """
    if len(forward) != len(recomputed):
        return False
    for one, other in zip(forward, recomputed, strict=True):
        if _is_tensor(one) and _is_tensor(other):
            if not (_may_be_same(one, other) if closely else _sort(one) == _sort(other)):
                return False
        elif isinstance(one, tuple) and isinstance(other, tuple):
            if not arguments_agree(one, other, closely=closely):
                return False
        elif one != other:
            return False
    return True


def _may_be_same(one: Any, other: Any) -> bool:
    return bool(one[2] == other[2] and (one[0] == other[0] or one[1] or other[1]))


def _sort(description: Any) -> tuple[Any, torch.dtype]:
    metadata = description[2]
    return metadata[0], next(part for part in metadata if isinstance(part, torch.dtype))


def _is_tensor(description: Any) -> bool:
    return isinstance(description, tuple) and len(description) == 3 and isinstance(description[1], bool)


# -- Dispatch modes: one decides and holds in forward, one serves in recomputation

LIFT_FRESH = torch.ops.aten.lift_fresh.default


class StopsEarly(Protocol):
    """The progress of a recomputation: ``RecomputeMode`` asks it before each op whether to stop."""

    @property
    def done(self) -> bool:
        """Whether everything is filled, so that the run can stop unless the next op still matters."""

    verify: Callable[[int, torch.Tensor], None] | None

    def stop_before(self, written: Sequence[torch.Tensor]) -> None:
        """Stop if possible: ``done`` is true, and an op that writes to ``written`` is about to run."""

    def after_op(self) -> None:
        """An op has run."""


class ForwardMode(RegionMode):
    """Runs a region's forward: decides per op, and holds saved results in the region call's state."""

    def __init__(self, state: RerunState, op_trace: OpTraceRecorder | None) -> None:
        super().__init__(state.table)
        self.region_path = state.path
        self.state = state
        self.op_trace = op_trace
        self.hooks = 1  # how many of the innermost saved-tensor hooks belong to the region

    def whole_modules(self) -> SavingPass | None:
        """Return the pass that saves whole modules."""
        state = self.state
        if state.modules is None:
            return None
        return SavingPass(state.modules, lambda: state.packs, self, hooks=self.hooks)

    def __enter__(self) -> ForwardMode:
        super().__enter__()
        self.state.saw_grad = torch.is_grad_enabled()
        self.state.keeps_layouts = self.state.keeps_layouts and self.state.saw_grad
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        state = self.state
        if get_ident() != self.thread and self.is_forked():
            return func(*args, **(kwargs or {}))
        if state.paused:
            return func(*args, **kwargs)
        if state.inside is not None:
            return self._run_inside(state.inside, func, args, kwargs)
        site: CallSite | None = self.sites.get(id(func))
        if site is None:
            site = state.table.add_site(func, self.path)
        if site.is_bookkeeping:
            state.reads_values = state.reads_values or site.reads_value
            state.value_ids.see(args)
            out = site.run(*args, **kwargs)
            if site.is_view and func is LIFT_FRESH:
                state.value_ids.name_constant(out)
            if self.op_trace is not None:
                self.op_trace.add(site, None, Decision.RECOMPUTE, args, kwargs, out)
            return out
        signature, external, made_of = state.value_ids.signature(site.key, args, kwargs)
        if site.is_random:
            signature, made_of = state.value_ids.draw(site.key, signature), NOT_PARAMETERS
        if site.has_generator:
            state.snapshots.before_draw(args, kwargs)
        if site.writes:
            state.before_write(site, args, kwargs)
        if site.may_save or site.conditional_rules:
            out = self._run_decided(site, signature, external, made_of, args, kwargs)
        else:
            state.note_reads(args)
            out = run_op(site, args, kwargs) if site.is_custom_op else site.run(*args, **kwargs)
            if site.final_rule is not None:
                state.hits[site.final_rule.index] += 1
            if self.op_trace is not None:
                self.op_trace.add(site, site.final_rule, Decision.RECOMPUTE, args, kwargs, out)
        if site.writes:
            _relabel(state.value_ids, site, signature, external, args, kwargs, made_of)
        state.value_ids.producers[signature] = site
        state.value_ids.name_output(out, signature, external, made_of)
        state.after_op()
        return out

    def passed_generators(self) -> list[torch.Generator]:
        """See ``Watcher``."""
        return [generator for generator, _ in self.state.snapshots.generators.values()]

    @contextmanager
    def watches(self, call: SavedModuleCall) -> Iterator[None]:
        """See ``Watcher``."""
        self.state.run_inside(call)
        try:
            yield
        finally:
            self.state.run_inside(None)

    def returned(self, call: SavedModuleCall, forward: TrackedForward, given: list[Any], out: Any) -> None:
        """See ``Watcher``."""
        assert call.result is not None
        self.state.after_module((kept.held for _, kept in call.result.writes), call.result.where)
        value_ids, value_id = self.state.value_ids, hash(("module", *call.call_key))
        for position, kept in call.result.writes:
            for number, part in enumerate(tensor_parts(kept.held)):
                value_ids.name_output(part, hash((value_id, "written", position, number)), False)
        for number, kept in enumerate(call.result.tensors):
            kept.indices = value_ids.name_new(kept.held, hash((value_id, number)))
        if self.op_trace is not None:
            kept_bytes = sum({**call.inside, **call.result_sizes()}.values())
            self.op_trace.add_module(
                call.call_key, call.rule, forward.module, out, kept_bytes=kept_bytes, flops=call.flops
            )

    def _run_inside(self, call: SavedModuleCall, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op of a saved module: handle its writes, and count its FLOPs."""
        table, path = self.state.table, call.call_key[0]
        site = table.sites_of(path).get(id(func)) or table.add_site(func, path)
        if site.is_bookkeeping:  # torch queries the layout of nested tensors where an error would end the process
            return site.run(*args, **kwargs)
        if site.writes:
            self.state.before_write(site, args, kwargs)
        out = run_op(site, args, kwargs)
        if self.op_trace is not None:
            call.add(site, None, Decision.SAVE, args, kwargs, out)
        return out

    def _run_decided(self, site: CallSite, signature: int, external: bool, made_of: int, args: Any, kwargs: Any) -> Any:
        """Run an op that may be saved, decide, and hold its result if it is saved."""
        state = self.state
        before = []
        if site.draws and site.may_save:
            before = states_of(generators_of(args, kwargs))
        out = run_op(site, args, kwargs)
        state.may_save = state.may_save or site.may_save
        call = state.calls[site]
        occurrence = state.occurrences[signature]
        state.occurrences[signature] = occurrence + 1
        decision, rule = decide(state, site, args, kwargs, out)
        saves = decision.keeps
        if rule is not None:
            state.hits[rule.index] += 1
        moved = [(g, now) for g, state in before if not equal(now := state_of(g), state)] if saves else []
        if saves and (_aliases(args, kwargs, out) or (is_large(out, made_of) and not (site.must_save or moved))):
            saves = False
        if saves:
            value = SavedValue(site, call, rule, signature, occurrence, external)
            value.description = state.value_ids.describe(args, kwargs)
            value.rng_after = moved
            state.save(value, out)
        else:
            state.note_reads(args)
        if self.op_trace is not None:
            decision = decision if saves else Decision.RECOMPUTE
            self.op_trace.add(site, rule, decision, args, kwargs, out, call=call)
        return out


class RecomputeMode(RegionMode):
    """Runs a region again: serves held values instead of running their ops, and stops when nothing more is needed."""

    def __init__(self, state: RerunState, inputs: list[tuple[int, torch.Tensor]], progress: StopsEarly) -> None:
        super().__init__(state.table)
        self.state = state
        self.inputs = inputs
        self.progress = progress

    def __enter__(self) -> RecomputeMode:
        self.sites = self.table.sites_of("")
        self.path = ""
        self.value_ids = self.state.new_value_ids()
        for position, tensor in self.inputs:
            self.value_ids.name_input_again(tensor, self.state.input_ids[position])
        self.inputs = []
        self.progress.verify = self.verify
        self._was_paused = self.state.paused
        self.state.pause(not self.state.forward_over)
        self.state.lenient = self.state.lenient or not self.state.forward_over
        self.live: list[tuple[CallSite, Any]] = []  # calls that ran although a saved value of the same op is waiting
        self.state.look_for_overwritten()
        self.seen_in_forward = self.state.occurrences
        saved = self.state.saved
        self.waiting = {(value.signature, value.occurrence): value for value in saved}
        # Fetch now, above autograd and outside this mode: fetching may rerun a whole outer region.
        self._fetched = fetch_recomputed(self.state.held())
        self._held = addresses_of([value for value in saved if not value.written])
        self.occurrences: defaultdict[int, int] = defaultdict(int)
        self.calls: defaultdict[CallSite, int] = defaultdict(int)
        self._undo = UndoStack()
        served = [g for value in saved for g, _ in value.rng_after]  # serving advances these
        snapshots = self.state.snapshots
        if served or snapshots or snapshots.generators:
            snapshots.enter_on(self._undo, served)
        super().__enter__()
        return self

    def whole_modules(self) -> ServingPass | None:
        """Return the pass that serves whole modules."""
        modules = self.state.modules
        if modules is None:
            return None
        return ServingPass(modules, self._fetched, self._undo, self, self.value_ids)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.progress.verify = None
        self.progress = NoEarlyStop()  # breaks a cycle: it refers to the frame, which after an error still refers here
        self.state.pause(self._was_paused)
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        site: CallSite | None = self.sites.get(id(func))
        if site is None:
            site = self.state.table.add_site(func, self.path)
        progress = self.progress
        value_ids = self.value_ids
        if site.is_bookkeeping:
            value_ids.see(args)
            out = site.run(*args, **kwargs)
            if site.is_view and func is LIFT_FRESH:
                value_ids.name_constant(out)
            return out
        if progress.done:
            progress.stop_before(written_tensors(site, args, kwargs) if site.writes else ())
        signature, external, _ = value_ids.signature(site.key, args, kwargs)
        if site.is_random:
            signature = value_ids.draw(site.key, signature)
        value = None
        if site.may_save or site.conditional_rules:  # exactly the calls that forward counted
            value = self._find(site, signature, args, kwargs)
            if value is not None and not value.overwritten:
                progress.after_op()
                return self._serve(value)
        if site.writes:
            self._check_write(site, args, kwargs)
        out = run_op(site, args, kwargs) if site.is_custom_op else site.run(*args, **kwargs)
        if value is not None and value.must_save and not same(value.sums, sums_of(out)):
            raise RegionError(overwritten_problem(self.state.path, site.op))
        if site.writes:
            _relabel(value_ids, site, signature, external, args, kwargs)
        value_ids.producers[signature] = site
        value_ids.name_output(out, signature, external)
        progress.after_op()
        return out

    def _serve(self, value: SavedValue) -> Any:
        for generator, state in value.rng_after:
            generator.set_state(state)
        out = map_tensors(value.outputs, self._again, SavedResult)
        self.value_ids.name_output(out, value.signature, value.external)
        return out

    def _again(self, one: SavedResult) -> torch.Tensor:
        data = one.fetch(self._fetched)
        return data.clone() if one.written else data.detach()

    def _find(self, site: CallSite, signature: int, args: Any, kwargs: Any) -> SavedValue | None:
        """Return this call's saved value, if it has one, and remove it from the waiting values."""
        call = self.calls[site]
        occurrence = self.occurrences[signature]
        self.calls[site] = call + 1
        self.occurrences[signature] = occurrence + 1
        value = self.waiting.pop((signature, occurrence), None)
        if value is None and signature not in self.state.occurrences:
            value = self._match_by_order(site, call, args, kwargs)
            if value is not None:
                del self.waiting[value.signature, value.occurrence]
        return value

    def _match_by_order(self, site: CallSite, call: int, args: Any, kwargs: Any) -> SavedValue | None:
        """Return the waiting value with this call number if the arguments may be the same; see Note [Value ids]."""
        seen = self.value_ids.describe(args, kwargs)
        for value in self.state.saved:
            if value.site is site and value.call == call and (value.signature, value.occurrence) in self.waiting:
                if arguments_agree(value.description, seen, closely=self.state.saw_grad):
                    return value
                break
        self.live.append((site, seen))
        return None

    def verify(self, index: int, tensor: torch.Tensor) -> None:
        """Raise if the ``index``-th tensor that autograd saves is known to be another value than in forward."""
        packed = self.state.packed
        if index < len(packed):
            value_id, external, maker, offset, bits = packed[index]
            if self.state.lenient or value_id is None:
                return
            seen = self.value_ids.of(tensor)
            tolerated = (external or seen in self.value_ids.external) and seen not in self.state.known
            path = self.state.path
            if value_id == seen and maker is not None and 0 <= offset != tensor.storage_offset():
                was = f"the part of {_made_by(maker)} that begins at element {offset}"
                now = f"the one that begins at element {tensor.storage_offset()}, {describe(tensor)}"
                raise RegionError(other_tensor_problem(path, index, was, now))
            if value_id == seen and bits != lazy_bits(tensor):
                was = f"a {_LAZY[bits]} of a value in forward"
                now = f"a {_LAZY[lazy_bits(tensor)]} of it, {describe(tensor)}"
                raise RegionError(other_tensor_problem(path, index, was, now))
            if value_id != seen and not tolerated:
                other = _made_by(self.value_ids.producers.get(seen))
                was, now = f"{_made_by(maker)} in forward", f"{other}, {describe(tensor)}, computed from other values"
                raise RegionError(other_tensor_problem(path, index, was, now, fix=OTHER_VALUE))

    def _check_write(self, site: CallSite, args: Any, kwargs: Any) -> None:
        """Raise if the region now writes to a held value, but did not in forward."""
        for part in _written_parts(site, args, kwargs):
            if storage_address(part) in self._held:
                raise RegionError(
                    Problem(
                        where=self.state.path or "region",
                        found=f"{site.op} writes to a saved value in recomputation, and did not in forward",
                        fix=OTHER_WRITE,
                    )
                )

    def check(self, reached: int) -> None:
        """Raise if a saved value was not served, but a call of its op ran, or the op chooses or draws.

        ``reached``: the last handle that this run had to fill. Ops after it did not run.
        """
        for value in self.state.saved:
            if (value.signature, value.occurrence) not in self.waiting or value.packs_before > reached:
                continue
            rivals = [(site, seen) for site, seen in self.live if site is value.site]
            if rivals or value.must_save or value.rng_after:
                raise RegionError(unmatched_problem(self.state.path, value, rivals))


def _written_parts(site: CallSite, args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [part for tensor in written_tensors(site, args, kwargs) for part in written_parts(tensor)]


def _relabel(
    value_ids: ValueIds,
    site: CallSite,
    signature: int,
    external: bool,
    args: Any,
    kwargs: Any,
    made_of: int = NOT_PARAMETERS,
) -> None:
    for index, part in enumerate(_written_parts(site, args, kwargs)):
        value_ids.name_output(part, hash((signature, "written", index)), external, made_of)


def _aliases(args: Any, kwargs: Any, out: Any) -> bool:
    """Whether an op returned one of its arguments, or a view of one: such a result is never held."""
    inputs = {storage_address(part) for t in tensors_of([*args, *kwargs.values()]) for part in tensor_parts(t)}
    return any(storage_address(part) in inputs for t in tensors_of(out) for part in tensor_parts(t))


# -- The rerun engine's recorder


class RerunRecorder(Recorder):
    """Applies a decision table to one region call; the ``Recorder`` that a frame calls."""

    native_ops = 0  # run by the C++ library in forward

    def __init__(
        self,
        table: DecisionTable,
        path: str,
        owners: tuple[nn.Module, ...],
        op_trace: OpTraceRecorder | None = None,
        *,
        freeze_buffers: bool = True,
        early_stop: bool = True,
        modules: SavedModules | None = None,
        not_recomputed: frozenset[int] = frozenset(),
        verifies: bool = True,
        new_value_ids: Callable[..., ValueIds] = ValueIds,
    ) -> None:
        self.state = RerunState(
            table,
            path,
            owners,
            freeze_buffers=freeze_buffers,
            modules=modules,
            verifies=verifies,
            new_value_ids=new_value_ids,
        )
        self.not_recomputed = not_recomputed
        self.offloads = table.offloads
        self.early_stop = early_stop
        self.op_trace = op_trace
        self.needs_mode = self.reads_values = self.only_chooses = False
        self.writes_or_draws = True  # after the forward: whether this alone requires a recorder
        self.figures: SavedFigures | None = None
        self._recompute: RecomputeMode | None = None
        self._reached = -1

    def begin(self, inputs: RegionInputs) -> None:
        """The region is about to run on ``inputs``."""
        self.state.inputs = inputs
        if self.state.modules is not None:
            self.state.modules.begin(inputs)
        # Region calls with and without a recorder must rerun the same ops if there are no rules, because their
        # collectives must match those of other ranks. Without early stop, every rank must run a recomputation, which
        # kept tensors would avoid.
        has_rules = bool(self.state.table.rules)
        self.state.keeps_persistent = has_rules and self.early_stop and active_hooks() is None
        self.state.keeps_layouts = active_hooks() is None and all(kept.stored is None for kept in inputs.tensors)
        for kept in inputs.tensors:
            if isinstance(kept.value, torch.Tensor):
                self.state.value_ids.name_input(kept.value, kept.position, lasts=kept.stored is None)

    def set_start(self, module_state: ModuleState, handles: Handles) -> None:
        """See ``Recorder.set_start``."""
        self.state.snapshots.at_start = module_state.at_start
        if self.state.modules is not None:
            self.state.modules.set_start(module_state)

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the mode that decides."""
        return ForwardMode(self.state, self.op_trace)

    def pack(self, tensor: torch.Tensor, handle: Handle) -> None:
        """See ``RerunState.pack``."""
        if not self.state.paused:
            self.state.pack(tensor, handle)

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """See ``RerunState.close``."""
        are_holdable = self.state.are_holdable
        free = self.state.close(kept, last_missing)
        self.figures = figures_of(self.state, kept)
        self.only_chooses = are_holdable and not self.state.writes_or_draws
        self.state.decided = []
        self.writes_or_draws = self.state.writes_or_draws
        self.needs_mode, self.reads_values = self.state.needs_mode, self.state.reads_values
        return free

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """See ``RerunState.pack_with_outer_hooks``."""
        self.state.pack_with_outer_hooks(hooks)

    def held(self) -> Held:
        """See ``RerunState.held``."""
        return self.state.held()

    def rule_of(self, handle: Handle) -> int:
        """See ``Recorder.rule_of``."""
        return self.state.rule_of.get(handle.storage, self.state.rule_of_no_op)

    def recompute_mode(self, inputs: list[tuple[int, torch.Tensor]], progress: Progress) -> RecomputeMode:
        """Return the mode that serves."""
        self._recompute = self.new_recompute_mode(inputs, progress)
        self._reached = progress.last_missing
        return self._recompute

    def new_recompute_mode(self, inputs: list[tuple[int, torch.Tensor]], progress: Progress) -> RecomputeMode:
        """Return a mode for one recomputation."""
        return RecomputeMode(self.state, inputs, progress)

    def check_recomputed(self) -> None:
        """Raise if a saved value could not be matched."""
        if self._recompute is not None:
            mode, self._recompute = self._recompute, None
            mode.check(self._reached)

    def drop(self) -> None:
        """Release every held value."""
        self.state.drop()


def figures_of(state: RerunState, kept: Iterable[Handle]) -> SavedFigures:
    """Count the storages that ``state`` and the region's handles hold, each once and under its rule."""
    sizes: dict[int, tuple[int, int]] = {}  # address -> (bytes, rule)
    for value in state.saved:
        rule = value.rule.index if value.rule is not None else NO_RULE
        for one in value.results:
            for address, size in one.sizes().items():
                sizes[address] = size, rule
    counted = frozenset(sizes)  # a handle on one of these storages holds no copy
    calls = list(state.modules.calls.values()) if state.modules is not None else []
    for call in calls:
        sizes.update({address: (size, call.rule.index) for address, size in call.result_sizes().items()})
    others = [one for one in kept if one.storage not in counted and not one.is_external]
    if others:
        rule_of_no_op = state.rule_of_no_op
        for handle in others:
            rule = state.rule_of.get(handle.storage, rule_of_no_op)
            for address, size in handle.sizes().items():
                sizes.setdefault(address, (size, rule))
    rules: defaultdict[int, int] = defaultdict(int)
    for value in state.decided:
        rules[value.rule.index if value.rule is not None else NO_RULE] += 0
    for size, rule in sizes.values():
        rules[rule] += size
    hits = dict(state.hits)
    if state.modules is not None:
        hits |= state.modules.hits
        for rule, size in state.modules.evidence.bytes_inside.items():
            rules[rule] += size
    return SavedFigures(sum(rules.values()), state.dead_bytes, dict(rules), hits)
