"""Parameters, buffers and flags of a region's modules: their state in the forward, restored for recomputation."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sac.errors import Problem, RegionError, SacWarning
from sac.native.load import library
from sac.region.marks import Contents, hooks_of, is_managed, marks_of, put_hooks, unpacked, versions_in
from sac.region.tables import ModuleTables, TablesHolder
from sac.region.undo import UndoStack
from sac.tensors import (
    STORAGE_WATCHERS,
    copy_of,
    describe,
    detached,
    has_graph,
    is_plain,
    place_of,
    placed_on,
    storage_address,
    storage_sizes,
    version_of,
)

# -- Module state of a region

# Note [Buffers advance once]
#
# A region's recomputation starts from the buffers that its forward started from. Afterwards, the buffers are as they
# were right before the recomputation.
#  - Rebound (`self.n = self.n + 1`): in recomputation each name refers to the object that it referred to when the
#    forward began. The same holds for names that `torch.func.functional_call` rebinds for one call.
#  - Changed in place, in ops that the recorder sees: the recorder takes a snapshot of whatever is written, see
#    Note [What is kept, and what is not].
#  - Changed in place unseen, inside a compiled function or because no earlier call needed a recorder (Note [Evidence]):
#    each small buffer, such as statistics and counters, is copied before the forward. If the forward writes to a large
#    buffer or to a parameter without a recorder, the call is not recomputed at all (Note [The walk of a region]), and
#    the region has a recorder from then on.
#  - Changed by other code between forward and backward: a small buffer is restored. A large one is a warning; if the
#    tensor is not a buffer, it is an error.
# All of this also holds for other tensors that the region's modules can reach (Note [Python state]).
# With `freeze_buffers=False` none of this is done, and recomputation works on the current buffers.
#
# Each module's `training` flag is restored too: if a model is switched to evaluation between forward and backward (to
# validate before a last backward), its recomputation uses the dropout and the statistics of the forward. So is each
# parameter's `requires_grad`, which decides what autograd saves: adversarial training switches it between the two.
#
# A write to a parameter by other code between forward and backward is an error, as it is if autograd saved the
# parameter.
#
# Buffers belong to a module, not to a thread: if another thread runs the same module during a recomputation, it finds
# the buffers of that forward, and its writes to them are lost.
#
# Example. `nn.BatchNorm1d(64)` in training, without a recorder, and `num_batches_tracked` is 7. Its running statistics
# (256 bytes each) and its counter are small, so they are copied before the forward, which changes them in place: the
# counter is 8. A second micro-batch makes it 9. In the backward of the first one, recomputation finds 7 and the
# statistics of that time, and updates them again. When it ends, the counter is 9, with the statistics that belong to
# it.

_TRAINING = attrgetter("training")
_MOST_COPIED_BYTES = 1 << 16
MOST_COPIED_BYTES_UNRECORDED = 1 << 9  # the usual call: copying a counter is cheap enough, a position table is not

# Note [At the start]
#
# Most forwards write neither to parameters nor to buffers, and then all that is ever asked of their record is whether
# this is still so. With the C++ library the record is an `AtStart` (csrc/at_start.h), which is made, and compared, in
# one pass. As long as it finds no difference it stands for the fields that `_look` fills. Once something differs, or
# something else needs one of these fields, Python takes over what it holds: from then on all is as without the library.
# There is none if a tensor is of a subclass, if a small one is not in the memory of the CPU, and while a plan counts
# storages.
#
# Example. A block with a rotary table of 2 KiB writes to nothing. Its table is copied when the forward begins. When it
# ends, one comparison of marks, versions and bytes finds no difference, and the copy is released. A replay compares
# once more, so that a write to the table between the passes is found as before: that call has a `_Watched` for it.

Bound = dict[str, Any]

KEPT_WHOLE = (  # of a call that cannot be recomputed
    "none is needed: the activations of this call are kept until its backward instead of being recomputed, and later "
    "calls of the region keep a copy of what they write to"
)


class UnseenWriteError(RegionError):
    """A recomputation could not repeat the forward, which wrote to what there is no copy of, chose, or drew, unseen."""


class ModuleState:
    """Parameters, buffers and flags of a region's modules when its forward began.

    Parameters of wrapper subclasses are not restored: FSDP exchanges its sharded ones between forward and backward.
    ``others``: tensors that the region can reach under other names; they are treated as buffers. ``beyond``: parameters
    that it can reach in addition to those of its modules; only its own writes to them are found. ``reentrant``: such a
    call cannot be kept whole. ``not_recomputed``: ids of modules that recomputation does not run, so their writes to
    large buffers are no reason to keep the call. ``found``: the tables of the modules, if they have been recorded just
    now.
    """

    __slots__ = (
        "_at_start",
        "_buffers",
        "_contents",
        "_exchanged",
        "_held",
        "_marked",
        "_marks",
        "_need_grad",
        "_owners",
        "_parameters",
        "_recorded",
        "_training",
        "_watched",
        "_written",
        "reached_again",
    )

    def __init__(
        self,
        owners: tuple[nn.Module, ...],
        others: Iterable[torch.Tensor] = (),
        beyond: Iterable[torch.Tensor] = (),
        *,
        freeze_buffers: bool = True,
        recorded: bool = True,
        reentrant: bool = False,
        not_recomputed: frozenset[int] = frozenset(),
        found: ModuleTables | None = None,
    ) -> None:
        self._at_start: Any = None  # in place of what `_look` records; see Note [At the start]
        self._owners = owners
        parameters, training, buffers = None, None, None
        self.reached_again: Any = (
            found.reached if found is not None else None
        )  # a survey's record of the modules' state
        if found is not None:
            parameters, training, buffers = found.parameters, found.training, found.buffers
        self._training = _training_of(owners) if training is None else training
        self._parameters = _parameters_of(owners) if parameters is None else parameters
        self._written: list[torch.Tensor] | None = None  # parameters, after ``close``
        self._exchanged: list[tuple[torch.Tensor, str, Any]] = []  # parameter, ``data`` or ``grad``, and what it was
        self._recorded = recorded
        self._buffers: list[tuple[nn.Module, Bound]] = []
        if freeze_buffers:
            if buffers is None:
                buffers = [(owner, {**held}) for owner in owners if (held := owner._buffers)]
            self._buffers = buffers
        most = _MOST_COPIED_BYTES if recorded else MOST_COPIED_BYTES_UNRECORDED
        others, beyond = (*others,) if freeze_buffers else (), [*beyond]
        native: Any = library()
        if native is not None and not not_recomputed and not STORAGE_WATCHERS:
            holds = recorded or reentrant
            self._at_start = native.at_start(self._parameters.values, beyond, self._buffers, others, most, holds)
        if self._at_start is None:
            self._look(others, beyond, most, not_recomputed, holds_contents=recorded or reentrant)

    def _look(
        self,
        others: Sequence[torch.Tensor],
        beyond: Sequence[torch.Tensor],
        most: int,
        not_recomputed: frozenset[int],
        *,
        holds_contents: bool,
    ) -> None:
        """Record parameters, and the tensors to which the region can write."""
        self._held, self._need_grad = _states_of(self._parameters.values)
        self._marked = self._held  # the parameters that have marks
        if beyond:
            own = {*map(id, self._held)}
            self._marked = [*self._held, *(one for one in beyond if id(one) not in own)]
        self._contents = Contents(self._marked) if holds_contents else None
        self._marks = marks_of(self._marked)
        self._watched: list[_Watched] = []
        for owner, one in _plain_tensors(self._buffers):
            is_apart = id(owner) in not_recomputed  # no write to it asks for a recorder, so it has a copy now
            self._watched.append(_Watched(one, _MOST_COPIED_BYTES if is_apart else most, is_apart))
        known = {id(one.tensor) for one in self._watched}
        self._watched += [_Watched(one, most, False) for one in others if id(one) not in known and is_own(one)]

    def __getattr__(self, name: str) -> Any:
        """Take over what the library has recorded, when something of it is first read."""
        at_start = self._at_start
        if at_start is None or name not in ModuleState.__slots__:
            raise AttributeError(name)
        self._at_start = None
        self._held, self._need_grad, self._marked = at_start.held, at_start.needs, at_start.marked
        self._marks = at_start.marks
        contents = at_start.contents()
        self._contents = None if contents is None else Contents(self._marked, contents)
        self._watched = [_Watched.again(*one) for one in at_start.spares()]
        return getattr(self, name)

    def close(self) -> None:
        """The forward is over: drop larger copies of tensors that it did not write to."""
        if self._at_start is not None and self._at_start.close(MOST_COPIED_BYTES_UNRECORDED):
            self._written = []
            return
        for one in self._watched:
            one.close()
        before = self._marks
        self._written = []
        self.note_parameters()
        if before != self._marks:
            self._find_changes(before)
        self._contents = self.reached_again = None

    def _find_changes(self, before: bytes) -> None:
        """Find the parameters that the forward wrote to, and those whose data or gradient it exchanged."""
        assert self._written is not None
        pairs = zip(self._marked, unpacked(before), unpacked(self._marks), strict=True)
        for position, (one, was, now) in enumerate(pairs):
            has_other_data = was[1:3] != now[1:3] and not is_managed(one)
            has_other_gradient = was.gradient != now.gradient
            is_written = was.version != now.version
            if self._contents is None:
                is_written = is_written or has_other_data or has_other_gradient
            else:
                data, gradient = self._contents.at(position)
                self._exchanged += [(one, "data", data)] if has_other_data else []
                self._exchanged += [(one, "grad", gradient)] if has_other_gradient else []
            if not self._recorded and not has_other_gradient:
                is_written = is_written or was.gradient_version != now.gradient_version
            if is_written:
                self._written.append(one)

    def note_parameters(self) -> None:
        """Record the parameters' marks: from now on only the region's own runs may write to the parameters."""
        if self._at_start is not None:
            self._at_start.note()
            return
        self._marks = marks_of(self._marked)

    def changed_parameter(self, where: str, read: Collection[int] | None = None) -> Problem | None:
        """Return a problem if a parameter was written to since ``note_parameters``.

        ``read``: ids of the only parameters to check; None: all. An optimizer may step in backward, parameter by
        parameter. While the forward runs, nothing is checked: only the region itself writes to parameters then.
        """
        if self._written is None or self.has_same_versions():
            return None
        written = {id(one) for one in self._written}  # the recorder holds the earlier values of these
        for one, version in zip(self._held, versions_in(self._marks), strict=False):
            if version_of(one) != version and id(one) not in written and (read is None or id(one) in read):
                named = zip(self._parameters.names, self._parameters.values, strict=True)
                name = next(name for name, value in named if value is one)
                return Problem(
                    where=where or "region",
                    found=f"parameter {name!r} ({describe(one)}) was changed in place after the forward: it is at "
                    f"version {version_of(one)}, backward expects version {version}",
                    fix="step the optimizer when every backward of these weights is done",
                )
        return None

    @property
    def owners(self) -> tuple[nn.Module, ...]:
        """The region's modules."""
        return self._owners

    @property
    def were_written(self) -> bool:
        """Whether the forward wrote to buffers or parameters, or exchanged the data of one; after ``close``."""
        if self._at_start is not None:
            return False
        of_buffers = (one.was_written for one in self._watched if not one.is_not_recomputed)
        return bool(self._written or self._exchanged) or any(of_buffers)

    def unseen_write(self, where: str) -> Problem | None:
        """Return a problem if the forward wrote to a tensor that has no copy.

        Call it after ``close``. ``where`` names the region.
        """
        if self._at_start is not None:
            return None
        lost = next((one.tensor for one in self._watched if one.is_lost), None)
        if lost is None:
            lost = next(iter(self._written or ()), None)
        return None if lost is None else self.unseen(lost, where)

    def changed_tensor(self, where: str) -> Problem | None:
        """Return a problem if other code has written to a large tensor since the forward.

        For a buffer it only warns: recomputation reads its current value, as in torch. For example, DDP broadcasts
        buffers in each forward.
        """
        if self.is_known_to_be_same():
            return None
        for one in self._watched:
            if one.was_written or one.copy is not None or not one.was_changed:
                continue
            problem = Problem(
                where=where or "region",
                found=f"{self._named(one.tensor)}({describe(one.tensor)}) was changed in place after the forward",
                fix="do not write to it between forward and backward",
            )
            if not self._is_buffer(one.tensor):
                return problem
            if not one.is_reported:
                one.is_reported = True
                told = replace(
                    problem, fix="recomputation reads what is there now: gradients are right if that is the same"
                )
                warnings.warn(str(told), SacWarning, stacklevel=2)
        return None

    def written_unseen(self) -> set[int]:
        """Return the addresses of storages that the forward has written to, so far, without moving a version.

        NumPy and ``data`` do that. At which op the data changed is not known.
        """
        if self.is_known_to_be_same():
            return set()
        running = self._written is None
        return {one.address for one in self._watched if (one.was_written_unseen if running else one.was_unseen)}

    def is_known_to_be_same(self) -> bool:
        """Return whether the library says that nothing has been written to buffers since the forward began."""
        return self._at_start is not None and bool(self._at_start.has_same_tensors())

    def has_same_versions(self) -> bool:
        """Return whether the library says that no parameter was written to in place since ``note_parameters``."""
        return self._at_start is not None and bool(self._at_start.has_same_versions())

    def watched(self) -> list[torch.Tensor]:
        """Return the buffers, and the other tensors that are treated as such."""
        return [one.tensor for one in self._watched]

    def watched_without_copy(self) -> frozenset[int]:
        """Return the addresses of those of ``watched`` of which there is no copy."""
        return frozenset(one.address for one in self._watched if one.copy is None)

    def parameter_addresses(self) -> frozenset[int]:
        """Return the addresses of the storages of all parameters."""
        return frozenset(address for one in self._held for address in storage_sizes(one))

    def at_start(self, address: int) -> torch.UntypedStorage | None:
        """Return the copy of the storage at ``address`` from before the forward; None if there is none."""
        return next((one.copy for one in self._watched if one.address == address), None)

    def lacks_copy(self, addresses: list[int]) -> bool:
        """Return whether one of the storages with these addresses may be that of a tensor in ``without_copy``."""
        at_start = self._at_start
        return bool(addresses) if at_start is None else at_start.lacks_copy(addresses)

    def without_copy(self) -> dict[int, torch.Tensor]:
        """Return the tensors of which there is no copy and whose version has not moved, by storage address."""
        watched = (one.tensor for one in self._watched if one.copy is None and not one.was_written)
        return {storage_address(one): one for one in (*self._held, *watched)}

    def copies(self) -> dict[int, torch.UntypedStorage] | None:
        """Return the copies of tensors that other code has written to since the forward, by storage address.

        None if one of these tensors has another storage now, or if the forward gave other data to a parameter.
        """
        if self.is_known_to_be_same():
            return {}
        changed = [one for one in self._watched if not one.was_written and one.was_changed]
        if any(one.was_moved for one in changed) or any(name == "data" for _, name, _ in self._exchanged):
            return None
        return {one.address: one.copy for one in changed if one.copy is not None}

    def enter_on(self, stack: UndoStack) -> None:
        """Restore names, data and flags of the forward; restore the current ones when ``stack`` is left."""
        # This includes values that are the same now: the recomputation may change them, as the forward may have.
        native: Any = library()
        at_start = self._at_start
        changed: Sequence[_Watched] = ()
        if at_start is not None and at_start.has_same_tensors():
            held, needs, leaves = at_start.held, at_start.needs, [*at_start.marked, *at_start.trained]
        else:
            held, needs, changed = self._held, self._need_grad, self._watched
            leaves = [*self._marked, *(one.tensor for one in changed if one.tensor.requires_grad)]
        wanted = _Wanted(self._owners, self._training, self._buffers, held, needs, leaves)
        is_same = native is not None and native.modules_are_as(*wanted)
        if is_same:
            stack.callback(_put_wanted, wanted)
        else:
            training = _training_of(self._owners)
            stack.callback(_put_training, self._owners, training)
            if training != self._training:
                _put_training(self._owners, self._training)
            for owner, before in self._buffers:
                stack.callback(bind, owner._buffers, dict(owner._buffers))
                bind(owner._buffers, before)
        parameters = self._parameters
        if exchanged := parameters.now():
            recorded = [*parameters.recorded()]
        for position, now in exchanged.items():
            before = recorded[position]
            other = {name: value for name, value in before.items() if _was_exchanged(value, now.get(name))}
            if other:
                bound = parameters.tables[position]
                stack.callback(bound.update, {name: now[name] for name in other})
                bound.update(other)
        if not is_same:
            need_grad = _states_of(held)[1]
            stack.callback(_put_needs, held, need_grad)
            if need_grad != needs:
                _put_needs(held, needs)
            stack.callback(put_hooks, leaves, hooks_of(leaves))
        for parameter, name, before in self._exchanged:
            stack.callback(setattr, parameter, name, detached(parameter) if name == "data" else parameter.grad)
            setattr(parameter, name, before)
        for one in changed:
            one.enter_on(stack)

    def drop(self) -> None:
        """Release everything."""
        self._at_start = None
        self._buffers, self._parameters, self._watched = [], _NO_TABLES, []
        self._owners, self._training = (), []
        self._held, self._marked, self._need_grad, self._written = [], [], [], None
        self._exchanged, self._contents, self._marks, self.reached_again = [], None, b"", None

    def unseen(self, tensor: torch.Tensor, where: str) -> Problem:
        """Return the problem that the forward wrote to ``tensor``, of which there is no copy."""
        return Problem(
            where=where or "region",
            found=f"this call changed {self._named(tensor)}({describe(tensor)}) in place, which no earlier call did",
            fix=KEPT_WHOLE,
        )

    def _named(self, tensor: torch.Tensor) -> str:
        buffers = (("buffer", name, value) for _, held in self._buffers for name, value in held.items())
        held_parameters = zip(self._parameters.names, self._parameters.values, strict=True)
        parameters = (("parameter", name, value) for name, value in held_parameters)
        named = (f"{what} {name!r} " for what, name, value in (*buffers, *parameters) if value is tensor)
        return next(named, "a tensor that the region holds ")

    def _is_buffer(self, tensor: torch.Tensor) -> bool:
        return any(value is tensor for _, held in self._buffers for value in held.values())


def _states_of(values: list[Any]) -> tuple[list[torch.Tensor], list[bool]]:
    """Return the tensors among ``values`` (the others are None), and whether each needs a gradient."""
    native: Any = library()
    found = None if native is None else native.tensor_states(values)
    if found is not None:
        return found  # type: ignore[no-any-return]
    held = [one for one in values if one is not None]
    return held, [one.requires_grad for one in held]


def _parameters_of(owners: Iterable[nn.Module]) -> TablesHolder:
    tables = (one if isinstance(one, dict) else {**one} for owner in owners if (one := owner._parameters))
    return TablesHolder([*tables], 0)  # that of a scripted module is another kind of mapping


class Spare:
    """A tensor that others may write to before backward, with a copy of its storage if that has at most ``most`` bytes.

    A ``WriteGuard`` copies before a write that the recorder sees; this copy is there from the start.
    """

    __slots__ = ("_bytes", "_place", "_storage", "_version", "copy", "tensor")

    def __init__(self, tensor: torch.Tensor, most: int) -> None:
        self.tensor = tensor
        self._version = version_of(tensor)
        self._storage = storage = tensor.untyped_storage()
        self._place = place_of(tensor)
        self._bytes = storage.nbytes()
        self.copy = copy_of(storage) if self._bytes <= most else None

    @property
    def address(self) -> int:
        """The address of the storage that it had at the start."""
        address: int = self._storage._cdata
        return address

    @property
    def was_moved(self) -> bool:
        """Whether it has another storage now (``tensor.data = ...``)."""
        return bool(self.tensor.untyped_storage()._cdata != self._storage._cdata)

    @property
    def was_resized(self) -> bool:
        """Whether its storage has another size now (``resize_``)."""
        return self._storage.nbytes() != self._bytes

    @property
    def was_written_unseen(self) -> bool:
        """Whether a tensor with a copy was written to through NumPy or ``data``, which does not move its version."""
        return self.copy is not None and type(self.tensor) is torch.Tensor and other_bytes(self.copy, self._storage)

    @property
    def was_changed(self) -> bool:
        """Whether it was written to or got another storage since this object was made."""
        native: Any = library()
        if native is not None:
            is_same = native.is_as_copied(self.tensor, self._storage, self._version, self._bytes, self.copy)
            if is_same is not None:
                return not is_same
        is_other_version = version_of(self.tensor) != self._version
        return is_other_version or self.was_moved or self.was_resized or self.was_written_unseen

    def placed_on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor in ``storage`` at the place that this one had in its own."""
        return placed_on(storage, self.tensor, self._place)


_NO_TABLES = TablesHolder([], 0, found=([], [], [], []))


class _Watched(Spare):
    """A tensor that the region can write to.

    ``was_written``: after ``close``, whether the forward wrote to it. If it did not, a small copy is still kept: other
    code may write to the tensor before backward.
    """

    __slots__ = ("is_lost", "is_not_recomputed", "is_reported", "was_unseen", "was_written")

    def __init__(self, tensor: torch.Tensor, most: int, is_apart: bool) -> None:
        super().__init__(tensor, most)
        self.is_not_recomputed = is_apart
        self.was_written = self.was_unseen = self.is_lost = self.is_reported = False

    @classmethod
    def again(
        cls,
        tensor: torch.Tensor,
        version: int,
        storage: torch.UntypedStorage,
        place: tuple[int, Any, Any],
        size: int,
        copy: torch.UntypedStorage | None,
    ) -> _Watched:
        """Return what the constructor would have made when the forward began."""
        made = cls.__new__(cls)
        made.tensor, made.copy = tensor, copy
        made._version, made._storage, made._place, made._bytes = version, storage, place, size
        made.is_not_recomputed = made.was_written = made.was_unseen = made.is_lost = made.is_reported = False
        return made

    def close(self) -> None:
        """The forward is over."""
        is_other_version = version_of(self.tensor) != self._version
        self.was_unseen = not is_other_version and self.was_written_unseen
        self.was_written = is_other_version or self.was_moved or self.was_resized or self.was_unseen
        self.is_lost = self.copy is None and is_other_version
        if not self.was_written and self.copy is not None and self.copy.nbytes() > MOST_COPIED_BYTES_UNRECORDED:
            self.copy = None

    def enter_on(self, stack: UndoStack) -> None:
        """Restore its data from before the forward; restore the current data when ``stack`` is left."""
        if not (self.was_written or self.was_changed):
            return
        storage, copy = self._storage, self.copy
        if self.was_resized and copy is not None:
            storage = copy_of(copy)
        if storage._cdata != self.tensor.untyped_storage()._cdata or place_of(self.tensor) != self._place:
            stack.callback(setattr, self.tensor, "data", detached(self.tensor))
            self.tensor.data = self.placed_on(storage)
        if copy is not None and storage is self._storage and not self.was_resized:
            stack.overwrite(storage, copy)


class _Wanted(NamedTuple):
    """What the library compares in one pass: modules, and whether they train; buffers; parameters, and whether they
    need gradients; leaves, which have no hooks."""

    owners: tuple[nn.Module, ...]
    training: list[bool]
    buffers: list[tuple[nn.Module, Bound]]
    parameters: list[torch.Tensor]
    needs: list[bool]
    leaves: list[torch.Tensor]


def _put_wanted(wanted: _Wanted) -> None:
    native: Any = library()
    if native is not None and native.modules_are_as(*wanted):
        return
    put_hooks(wanted.leaves, [None] * (2 * len(wanted.leaves)))
    _put_needs(wanted.parameters, wanted.needs)
    for owner, before in wanted.buffers:
        bind(owner._buffers, before)
    _put_training(wanted.owners, wanted.training)


def _training_of(owners: Iterable[nn.Module]) -> list[bool]:
    return [*map(_TRAINING, owners)]


def _put_training(owners: Sequence[nn.Module], flags: list[bool]) -> None:
    if _training_of(owners) == flags:
        return
    for owner, training in zip(owners, flags, strict=True):
        if owner.training is not training:
            owner.training = training  # not `train()`, which may do more


def _put_needs(parameters: list[torch.Tensor], needs: list[bool]) -> None:
    if _states_of(parameters)[1] == needs:
        return
    for parameter, wanted in zip(parameters, needs, strict=True):
        if parameter.requires_grad is not wanted:
            parameter.requires_grad_(wanted)


def _plain_tensors(buffers: list[tuple[nn.Module, Bound]]) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    for owner, before in buffers:
        for value in before.values():
            if is_plain(value) and value.layout is torch.strided:
                yield owner, value


def other_bytes(copy: torch.UntypedStorage, storage: torch.UntypedStorage) -> bool:
    """Return whether a ``storage`` on the CPU of at most 64 KiB differs from its copy; False for all other storages."""
    if copy.nbytes() != storage.nbytes() or not 0 < copy.nbytes() <= _MOST_COPIED_BYTES:
        return False
    native: Any = library()
    if native is not None and (is_other := native.other_bytes(copy, storage)) is not None:
        return bool(is_other)
    found = small_bytes(storage, _MOST_COPIED_BYTES)
    return found is not None and found != small_bytes(copy, _MOST_COPIED_BYTES)


def small_bytes(storage: torch.UntypedStorage, most: int = MOST_COPIED_BYTES_UNRECORDED) -> bytes | None:
    """Return what a storage on the CPU of at most ``most`` bytes holds; None for all others."""
    size = storage.nbytes()
    if not 0 < size <= most or storage.device.type != "cpu":
        return None
    return ctypes.string_at(storage.data_ptr(), size)


def spare_of(tensor: torch.Tensor) -> Spare | None:
    """Return a small tensor with its copy; None for other tensors."""
    if not is_own(tensor) or tensor.untyped_storage().nbytes() > MOST_COPIED_BYTES_UNRECORDED:
        return None
    return Spare(tensor, MOST_COPIED_BYTES_UNRECORDED)


def is_own(value: torch.Tensor) -> bool:
    """Whether the region may write to this tensor, which it holds: a plain one without a graph."""
    return is_plain(value) and value.layout is torch.strided and not has_graph(value) and not value.is_inference()


def _was_exchanged(before: Any, now: Any) -> bool:
    """Return whether a plain tensor or parameter was replaced by another one."""
    plain = (torch.Tensor, nn.Parameter)
    return before is not now and type(before) in plain and type(now) in plain


def bind(bound: Bound, wanted: Bound) -> None:
    """Make ``bound`` equal to ``wanted``; it is not touched if it already is (a scripted module's cannot be)."""
    if not is_bound(bound, wanted):
        bound.clear()
        bound.update(wanted)


def is_bound(bound: Bound, wanted: Bound) -> bool:
    """Return whether ``bound`` has the names of ``wanted``, for the same objects."""
    present = dict(bound)  # of a scripted module it is another kind of mapping
    return present.keys() == wanted.keys() and all(present[name] is value for name, value in wanted.items())


def owners_of(module: nn.Module | None) -> tuple[nn.Module, ...]:
    """Return the modules of a region, each once."""
    if module is None:
        return ()
    seen = {module}
    owners = [module]
    for owner in owners:  # not module.modules(): it builds the names of all of them, in every call of a region
        if owner._modules:
            for child in owner._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    owners.append(child)
    return tuple(owners)


# -- Lazy modules

# Note [Lazy modules]
#
# A lazy module initialises its parameters in its first call, with the shapes that it sees there. A recomputation finds
# them initialised, so its later random draws would differ from those of the forward. Therefore a region call that
# would initialise parameters runs without checkpointing. This affects only one step.


def has_uninitialized(owners: Iterable[nn.Module]) -> bool:
    """Return whether any parameter or buffer of these modules is still uninitialised."""
    tables = (held for owner in owners for held in (owner._parameters, owner._buffers))
    return any(one is not None and is_lazy(one) for held in tables for one in held.values())
