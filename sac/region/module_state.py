"""Parameters, buffers and flags of a region's modules, as they were in the forward."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sac.errors import Problem, RegionError, SacWarning
from sac.tensors import copy_of, describe, has_graph, overwrite, version_of

# -- What the modules of a region own, as it was in the forward: parameters and buffers by name, buffers' data,
#    flags

# Note [Buffers advance once]
#
# A region's recomputation starts from the buffers that its forward started from, and leaves those that there are now.
#  - Rebound (`self.n = self.n + 1`): each name means in recomputation what it meant when the forward began. The same
#    holds for names that `torch.func.functional_call` gives another meaning for one call.
#  - Changed in place, in ops that the recorder sees: the recorder images what is written, whatever it is, see
#    Note [What is kept, and what is not].
#  - Changed in place where nobody sees it, inside a compiled function, or because no call before had needed a recorder
#    (Note [Evidence]): each small buffer, as statistics and counters are, is copied before the forward. If the forward
#    has written to a large one, or to a parameter, and there is no recorder, the call is not recomputed at all (Note
#    [The walk of a region]). From then on the region has one.
#  - Changed by somebody else between forward and backward: a small one is put back. A large one is an error, or if it
#    is a buffer, a warning.
# All of this holds for other tensors that the region's modules can reach, too (Note [Python state]).
# With `freeze_buffers=False` none of this is done, and recomputation works on the buffers as they are at that time.
#
# Each module's `training` flag is put back likewise: a model that is put into evaluation between forward and backward
# (to validate, before a last backward) is recomputed with the dropout and the statistics that its forward had. So is
# each parameter's `requires_grad`, which decides what autograd saves: adversarial training switches it between the two.
#
# Parameters that somebody else writes to between forward and backward are an error, as where autograd has saved them.
#
# A module's buffers are its own, not a thread's: another thread that runs the same module during a recomputation finds
# them as they were in that forward, and what it writes to them is lost.

_MOST_COPIED_BYTES = 1 << 16
_MOST_COPIED_BYTES_UNRECORDED = 1 << 9  # the usual call: a counter is worth the time, a table of positions is not

Bound = dict[str, Any]


class UnseenWriteError(RegionError):
    """A region wrote to a buffer or an input unseen: it cannot be recomputed from what was there before."""


class ModuleState:
    """What the names of parameters and buffers of a region's modules meant when its forward began; which were training.

    Parameters of wrapper subclasses are left alone: FSDP exchanges its sharded ones between forward and backward.
    ``others``: tensors that the region can reach under other names; they are treated as buffers. ``apart``: modules (by
    id) that recomputation does not run: what they write to their buffers needs no copy.
    """

    __slots__ = ("_buffers", "_held", "_need_grad", "_parameters", "_training", "_versions", "_watched", "_written")

    def __init__(
        self,
        owners: tuple[nn.Module, ...],
        others: Iterable[torch.Tensor] = (),
        *,
        freeze_buffers: bool = True,
        recorded: bool = True,
        not_recomputed: frozenset[int] = frozenset(),
    ) -> None:
        self._training = [(owner, owner.training) for owner in owners]
        self._parameters = [(bound, {**bound}) for owner in owners if (bound := owner._parameters)]
        self._held = [one for _, held in self._parameters for one in held.values() if one is not None]
        self._need_grad = [one.requires_grad for one in self._held]
        self._written: list[torch.Tensor] | None = None  # parameters, after ``close``
        self.note_parameters()
        self._buffers: list[tuple[nn.Module, Bound]] = []
        self._watched: list[_Watched] = []
        if freeze_buffers:
            most = _MOST_COPIED_BYTES if recorded else _MOST_COPIED_BYTES_UNRECORDED
            self._buffers = [(owner, {**held}) for owner in owners if (held := owner._buffers)]
            self._watched = [
                _Watched(one, most, id(owner) in not_recomputed) for owner, one in _plain_tensors(self._buffers)
            ]
            known = {id(one.tensor) for one in self._watched}
            self._watched += [_Watched(one, most, False) for one in others if id(one) not in known and _is_own(one)]

    def close(self) -> None:
        """The forward is over: drop the copies of what was not written to."""
        for one in self._watched:
            one.close()
        before = self._versions
        self._written = []
        self.note_parameters()
        if before != self._versions:
            pairs = zip(self._held, before, self._versions, strict=True)
            self._written = [one for one, was, now in pairs if was != now]

    def note_parameters(self) -> None:
        """Take note of the parameters' versions: from now on nothing but the region's own runs may write to them."""
        self._versions = [version_of(one) for one in self._held]

    def changed_parameter(self, where: str, read: Collection[int] | None = None) -> Problem | None:
        """Return the problem that a parameter was written to since ``note_parameters``, if one was.

        ``read``: ids of the only parameters that matter. An optimizer may step in backward, parameter by parameter.
        As long as the forward runs, nobody else writes to them.
        """
        if self._written is None:
            return None
        written = {id(one) for one in self._written}  # the recorder holds what lay there
        for one, version in zip(self._held, self._versions, strict=True):
            if version_of(one) != version and id(one) not in written and (read is None or id(one) in read):
                name = next(name for _, held in self._parameters for name, value in held.items() if value is one)
                return Problem(
                    where=where or "region",
                    found=f"parameter {name!r} ({describe(one)}) was changed in place after the forward: it is at "
                    f"version {version_of(one)}, backward expects version {version}",
                    fix="step the optimizer when every backward of these weights is done; determinism_check: none "
                    "turns this check off",
                )
        return None

    @property
    def were_written(self) -> bool:
        """Whether the forward wrote to buffers or parameters in place; after ``close``."""
        return bool(self._written) or any(one.was_written and not one.is_not_recomputed for one in self._watched)

    def unseen_write(self, where: str) -> Problem | None:
        """Return the problem that the forward wrote to something of which there is no copy, if it did.

        After ``close``. ``where`` names the region.
        """
        lost = next((one.tensor for one in self._watched if one.is_lost and not one.is_not_recomputed), None)
        if lost is None:
            lost = next(iter(self._written or ()), None)
        return None if lost is None else self._unseen(lost, where)

    def changed_tensor(self, where: str) -> Problem | None:
        """Return the problem that somebody has written to a large tensor since the forward, if that is so.

        For a buffer it warns: recomputation reads its current value, as in torch. DDP broadcasts buffers anew in each
        forward, for one.
        """
        for one in self._watched:
            if one.was_written or one.has_copy or not one.was_changed:
                continue
            problem = Problem(
                where=where or "region",
                found=f"{self._named(one.tensor)}({describe(one.tensor)}) was changed in place after the forward",
                fix="do not write to it between forward and backward; determinism_check: none turns this check off",
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
        running = self._written is None
        return {one.address for one in self._watched if (one.was_written_unseen() if running else one.was_unseen)}

    def copies(self) -> dict[int, torch.UntypedStorage] | None:
        """Return what lay in tensors that somebody has written to since the forward, by the address of the storage.

        None if one of them lies elsewhere now.
        """
        changed = [one for one in self._watched if not one.was_written and one.was_changed]
        if any(one.was_moved for one in changed):
            return None
        return {one.address: one.copy for one in changed if one.copy is not None}

    def enter_on(self, stack: ExitStack) -> None:
        """Let names, data and flags be those of the forward, and those of now when ``stack`` is left."""
        # What is the same now is restored too: the recomputation may change it, as the forward may have.
        stack.callback(_put_training, [(owner, owner.training) for owner, _ in self._training])
        _put_training(self._training)
        for owner, before in self._buffers:
            stack.callback(_bind, owner._buffers, dict(owner._buffers))
            _bind(owner._buffers, before)
        for bound, before in self._parameters:
            now = dict(bound)
            other = {name: value for name, value in before.items() if _was_exchanged(value, now.get(name))}
            if other:
                stack.callback(bound.update, {name: now[name] for name in other})
                bound.update(other)
        stack.callback(_put_needs, self._held, [one.requires_grad for one in self._held])
        _put_needs(self._held, self._need_grad)
        for one in self._watched:
            one.enter_on(stack)

    def drop(self) -> None:
        """Hold nothing any more."""
        self._buffers, self._parameters, self._watched, self._training = [], [], [], []
        self._held, self._need_grad, self._versions, self._written = [], [], [], None

    def _unseen(self, tensor: torch.Tensor, where: str) -> Problem:
        return Problem(
            where=where or "region",
            found=f"this call changed {self._named(tensor)}({describe(tensor)}) in place, which no earlier call did",
            fix="none is needed: the activations of this call are kept until its backward instead of being recomputed, "
            "and later calls of the region keep a copy of what they write to",
        )

    def _named(self, tensor: torch.Tensor) -> str:
        buffers = (("buffer", name, value) for _, held in self._buffers for name, value in held.items())
        parameters = (("parameter", name, value) for _, held in self._parameters for name, value in held.items())
        named = (f"{kind} {name!r} " for kind, name, value in (*buffers, *parameters) if value is tensor)
        return next(named, "a tensor that the region holds ")

    def _is_buffer(self, tensor: torch.Tensor) -> bool:
        return any(value is tensor for _, held in self._buffers for value in held.values())


class _Watched:
    """A tensor that the region can write to: its version, its storage, and a copy of that, of at most ``most`` bytes.

    ``was_written``, after ``close``: by the forward. The copy of one that the forward has not written to is kept if it
    is small: somebody else may write to it before backward.
    """

    __slots__ = (
        "_geometry",
        "_storage",
        "_version",
        "copy",
        "is_lost",
        "is_not_recomputed",
        "is_reported",
        "tensor",
        "was_unseen",
        "was_written",
    )

    def __init__(self, tensor: torch.Tensor, most: int, is_apart: bool) -> None:
        self.tensor = tensor
        self.is_not_recomputed = is_apart
        self._version = version_of(tensor)
        self._storage = storage = tensor.untyped_storage()
        self._geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
        self.copy = copy_of(storage) if storage.nbytes() <= most else None
        self.was_written = self.was_unseen = self.is_lost = self.is_reported = False

    def close(self) -> None:
        """The forward is over."""
        version = version_of(self.tensor)
        self.was_unseen = version == self._version and self.was_written_unseen()
        self.was_written = version != self._version or self.was_moved or self.was_unseen
        self.is_lost = self.copy is None and version != self._version
        if not self.was_written and self.copy is not None and self.copy.nbytes() > _MOST_COPIED_BYTES_UNRECORDED:
            self.copy = None

    def was_written_unseen(self) -> bool:
        """Whether a small tensor has been written to through NumPy or ``data``, which moves no version."""
        return self.copy is not None and type(self.tensor) is torch.Tensor and other_bytes(self.copy, self._storage)

    @property
    def address(self) -> int:
        """The address of the storage in which it lay in the forward."""
        address: int = self._storage._cdata
        return address

    @property
    def has_copy(self) -> bool:
        """Whether what it held before the forward can be put back."""
        return self.copy is not None

    @property
    def was_changed(self) -> bool:
        """Whether it was written to since it is watched, or given another storage (``buffer.data = ...``)."""
        return version_of(self.tensor) != self._version or self.was_moved or self.was_written_unseen()

    @property
    def was_moved(self) -> bool:
        """Whether it lies in another storage now."""
        return bool(self.tensor.untyped_storage()._cdata != self._storage._cdata)

    def enter_on(self, stack: ExitStack) -> None:
        """Put its data of the forward back, and those of now when ``stack`` is left."""
        if not (self.was_written or self.was_changed):
            return
        storage, copy = self._storage, self.copy
        if self.was_moved:
            stack.callback(setattr, self.tensor, "data", self.tensor.data)
            self.tensor.data = self.tensor.new_empty(0).set_(storage, *self._geometry)
        if copy is not None and copy.nbytes() == storage.nbytes():
            stack.callback(overwrite, storage, copy_of(storage))
            overwrite(storage, copy)


def _put_training(flags: Iterable[tuple[nn.Module, bool]]) -> None:
    for owner, training in flags:
        if owner.training is not training:
            owner.training = training  # not by `train`: it may do more


def _put_needs(parameters: Sequence[torch.Tensor], needs: Sequence[bool]) -> None:
    for parameter, wanted in zip(parameters, needs, strict=True):
        if parameter.requires_grad is not wanted:
            parameter.requires_grad_(wanted)


def _plain_tensors(buffers: list[tuple[nn.Module, Bound]]) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    for owner, before in buffers:
        for value in before.values():
            if _is_plain(value) and value.layout is torch.strided:
                yield owner, value


def other_bytes(copy: torch.UntypedStorage, storage: torch.UntypedStorage) -> bool:
    """Return whether something else lies in a small ``storage`` on the CPU than in its copy; False for other ones."""
    size = copy.nbytes()
    if not 0 < size <= _MOST_COPIED_BYTES_UNRECORDED or storage.device.type != "cpu" or size != storage.nbytes():
        return False
    return ctypes.string_at(copy.data_ptr(), size) != ctypes.string_at(storage.data_ptr(), size)


def spare_copy(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a copy of what a small tensor lies in, None for another one."""
    if not _is_own(tensor):
        return None
    storage = tensor.untyped_storage()
    return copy_of(storage) if storage.nbytes() <= _MOST_COPIED_BYTES_UNRECORDED else None


def _is_own(value: torch.Tensor) -> bool:
    """Whether the region may write to a tensor that it holds, other than by a graph."""
    return _is_plain(value) and value.layout is torch.strided and not has_graph(value) and not value.is_inference()


def _is_plain(value: Any) -> bool:
    """Whether a tensor is none of a subclass, but for one without data: a plan counts the same copies."""
    return type(value) is torch.Tensor or type(value).__name__ == "FakeTensor"


def _was_exchanged(before: Any, now: Any) -> bool:
    """Return whether a plain tensor or parameter stood where another one stands now."""
    plain = (torch.Tensor, nn.Parameter)
    return before is not now and type(before) in plain and type(now) in plain


def _bind(bound: Bound, wanted: Bound) -> None:
    """Let ``bound`` hold just what ``wanted`` holds; it is not touched if it does (a scripted module's cannot be)."""
    present = dict(bound)
    if present.keys() != wanted.keys() or any(present[name] is not value for name, value in wanted.items()):
        bound.clear()
        bound.update(wanted)


def owners_of(module: nn.Module | None) -> tuple[nn.Module, ...]:
    """Return the modules of a region, each once."""
    if module is None:
        return ()
    seen = {module}
    owners = [module]
    for owner in owners:  # by hand: module.modules() makes the names of all of them, in every call of a region
        if owner._modules:
            for child in owner._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    owners.append(child)
    return tuple(owners)


# -- Parameters that a module makes in its first call

# Note [Lazy modules]
#
# A lazy module draws its parameters in its first call, from the shapes that it sees there. A recomputation finds them
# made, and would draw other numbers than the forward did after that. So the call of a region in which any are to be
# made runs without checkpointing: it is one step.


def has_uninitialized(owners: Iterable[nn.Module]) -> bool:
    """Return whether any parameter or buffer of these modules is still to be made."""
    tables = (held for owner in owners for held in (owner._parameters, owner._buffers))
    return any(one is not None and is_lazy(one) for held in tables for one in held.values())
