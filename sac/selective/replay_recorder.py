"""The replay engine's part of a region's forward: what is kept, and what replay has to start from."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sac.region.detach import copy_of, detached
from sac.region.handles import Ending, Handle
from sac.region.inputs import KeptInputs
from sac.region.parking import PackHooks, park, surrounding_hooks
from sac.region.settings import AUTO, Settings
from sac.region.states.bindings import other_bytes
from sac.region.storages import describe, version_of
from sac.selective.compact import compact_views
from sac.selective.fallback import FallbackMode, Routed
from sac.selective.forward_state import forget_freed
from sac.selective.program import Program
from sac.selective.replay_plan import ReplayPlan, Wanted, plan_replay
from sac.selective.rows import Rows
from sac.selective.stats import KeptFigures
from sac.selective.table import Table
from sac.selective.tape import SMALL_NUMEL
from sac.selective.tape_entries import cast_of
from sac.selective.tape_figures import figures_of_tape
from sac.selective.tape_mode import TapeMode
from sac.selective.tape_recorder import TapeRecorder
from sac.selective.tensors import storage_address, storage_bytes, tensor_parts
from sac.selective.unrepeatable import may_differ, unrepeatable_on

_SMALL_BYTES = 1 << 9  # as of buffers that a region without a recorder copies


class ReplayRecorder(TapeRecorder):
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
        super().__init__(table, owners, settings, verifies=verifies)
        self.path = path
        self.rows = rows
        self.needs_mode = False
        self.figures: KeptFigures | None = None
        self.plan: ReplayPlan | None = None  # after the forward
        self.program = program  # that of an earlier call on such inputs; after the forward: of this one
        self.spoilt: dict[int, int] = {}  # handle -> version: autograd saved it, and the region wrote to it later
        self.yields = settings.engine == AUTO  # gives way rather than be worse than rerun; see Note [Auto]
        self.from_outside: set[int] = set()  # handles of what lives outside of the region, and is kept as it is
        self._perhaps_outside: list[tuple[weakref.ref[Handle], weakref.ref[Tensor], int]] = []
        self._owners = owners
        self._buffers: frozenset[int] | None = None  # of the owners, by id, once it has been asked for
        self._routed: list[Routed] = []  # after the forward: routing, with what is held of it
        self._keeps_persistent = True
        # By the address of its storage: version of a small tensor from outside, the tensor, and a copy of its data.
        self._outside: dict[int, tuple[int, Tensor, torch.UntypedStorage]] = {}
        self._lasting: set[int] = set()  # roots of inputs and parameters, which the region or the model holds anyway

    def begin(self, inputs: KeptInputs, leaves: list[Any]) -> None:
        """The region is about to run on ``inputs``, whose tensors are among ``leaves``."""
        self._inputs = inputs
        self._in_order = surrounding_hooks() is not None
        self._keeps_persistent = self._settings.early_stop and not self._in_order
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
        elif (
            tape.is_known(tensor)
            or cast_of(tensor) is not None
            or (tensor.grad_fn is not None and id(tensor) in tape.outside)
        ):
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
        leaf = tape.leaves.get(root)  # none: FSDP has made the storage of a parameter in the region
        is_written = root in tape.writers
        is_parameter = leaf is not None and leaf.position < 0 and leaf.lasts
        if (root in self._lasting and not is_written) or (is_parameter and is_written):
            # As it is: it is one of the ancestors that autograd holds anyway. So is a parameter that the region has
            # written to: if somebody writes to it once more, backward sees that as it would without us.
            handle.kept = handle.borrowed = True
            handle.version = version
            handle.value = handle.watched = tensor
            return
        self._places[handle.index] = value, len(tape.plans), version
        self.recent.append((handle.index, tensor, root))
        self.sum_up(handle.index, tensor)

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
        self.settle_suspects()
        self.recent = []
        forget_freed(self.images)
        self.needs_mode = self.may_save or bool(
            self.images or self._generators or self._wrote_late or self._wrote_inputs
        )
        if tape.writers and not tape.trouble:
            self._look_for_spoilt(missing)
        if not tape.trouble:
            program = self.program
            if program is None or not program.fits(tape, self._places, missing):
                program = Program(tape, self._places, missing, self.plan_of(missing))
            self.program = program
            program.lend(tape)
            self.plan = program.plan
            self._check_leaves()
            self._check_kept()
            if self.yields:
                self._check_unsaved(kept)
        if tape.trouble:
            self.plan = self.program = None
            for address in self._gathered - self._written_parameters:
                self.images.pop(address, None)
            if self.may_run_again(kept, missing):
                self.forget_what_lives(kept)
                kept[:] = [handle for handle in kept if handle.kept]
        self._routed = [
            Routed(
                plan,
                [tape.kept[value] for value in values],
                written=any(tape.roots[value] not in self._kept_in for value in values),
                sums=tuple(total for value in values for total in self._routing_sums.get(value, ())),
            )
            for plan, values in self._routing
        ]
        self._let_go(kept)
        tape.close()

    def wanted(self, handles: list[int]) -> list[Wanted]:
        """Return what the tape knows of these handles, without those that have been spoilt."""
        places = self._places
        return [Wanted(handle, *places[handle][:2]) for handle in handles if handle not in self.spoilt]

    def plan_of(self, handles: list[int]) -> ReplayPlan:
        """Return what to replay for these handles."""
        return plan_replay(self.tape, self.wanted(handles), early_stop=self._settings.early_stop)

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
        self._outside = {}

    @property
    def has_collectives(self) -> bool:
        """Whether other ranks have a part in what is run again: in an op of the tape, or in one of a DTensor."""
        return self.tape.has_meshes or any(getattr(plan, "is_collective", False) for plan in self.tape.plans)

    def may_differ(self, handle: int, device: torch.device) -> bool:
        """Whether what autograd saved as ``handle`` comes out otherwise each time, by the nature of its ops."""
        names = unrepeatable_on(device)
        return bool(names) and may_differ(self.tape, self._places[handle][0], names)

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
                self.sum_up(handle, tensor)
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
            elif leaf.position < 0 and not leaf.lasts:
                self._copy_small(leaf.tensor())

    def _copy_small(self, tensor: Tensor) -> None:
        """Replay will read a tensor from outside: hold a copy if it is small, since somebody may write to it before."""
        if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_inference():
            storage = tensor.untyped_storage()
            if storage._cdata not in self.images and storage.nbytes() <= _SMALL_BYTES:
                self._outside[storage._cdata] = tensor._version, detached(tensor), copy_of(storage)

    def changed_outside(self) -> dict[int, torch.UntypedStorage]:
        """Return what lay in small tensors from outside that were written to since the forward, by storage."""
        return {
            address: copy
            for address, (version, watch, copy) in self._outside.items()
            if watch._version != version or other_bytes(copy, watch.untyped_storage())
        }

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
            routed = (value for _, values in self._routing for value in values)
            self.figures = figures_of_tape(tape.kept, [*held, *routed], loose, self._rules, self.hits)
            if program is not None and not loose:
                program.sizes, program.figures = sizes, self.figures
        tape.kept = held
        self.draws.close({step.number for step in self.plan.steps} if self.plan is not None and tape.states else set())
