"""What stands for each leaf of a saved module's result, from forward to recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from sac.region.detach import detached, laid_out, layout_of, version_watch, write_onto
from sac.region.kept_tensor import Alias, copied
from sac.region.parking import PackHooks, Parked, fetch, park
from sac.region.storages import version_of
from sac.region.writes import give_history
from sac.selective.tensors import storage_address


@dataclass(frozen=True, slots=True)
class Serving:
    """One recomputation's call of a saved module.

    ``given``: the leaves of its arguments. ``name`` is told which tensor now holds each kept value. ``fetched``: values
    that are at hand, by the id of the leaf. ``storages``: the copies made for it so far.
    """

    given: list[Any]
    name: Callable[[KeptLeaf, torch.Tensor], None]
    fetched: dict[int, torch.Tensor]
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)


class KeptLeaf:
    """One tensor without its graph.

    ``places``: label and offset of each of its parts, where labels are used. ``is_borrowed``: it is a leaf that needs a
    gradient, a parameter as a rule, and stays itself.
    """

    __slots__ = ("_layout", "_needs_grad", "_version", "_watch", "copied", "data", "is_borrowed", "places")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.is_borrowed = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        self._needs_grad = tensor.requires_grad
        self.data: torch.Tensor | Parked | None = tensor if self.is_borrowed else detached(tensor)
        self._watch: torch.Tensor | None = self.data
        self._version = version_of(tensor)
        self._layout: torch.Tensor | None = None  # without data: how it lay in memory, where it is held otherwise
        self.copied = False  # the region writes to it: it is held, and given out, as a copy
        self.places: list[tuple[int, int]] = []

    @property
    def held(self) -> torch.Tensor:
        """The tensor, in forward."""
        assert isinstance(self.data, torch.Tensor)
        return self.data

    @property
    def was_changed(self) -> bool:
        """Whether it was written to since, with no copy made before."""
        return self._watch is not None and version_of(self._watch) != self._version

    def copy(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Hold a copy from here on; ``storages`` holds the copies made so far."""
        if isinstance(self.data, torch.Tensor) and not self.is_borrowed and not self.copied:
            self.data, self._watch, self.copied = copied(self.data, storages), None, True

    def compact(self) -> None:
        """Hold the elements only, and not the whole storage."""
        if isinstance(self.data, torch.Tensor) and (layout := layout_of(self.data)) is not None:
            self._layout = layout
            self._watch = version_watch(self.data) if self._watch is not None else None
            self.data = self.data.clone(memory_format=torch.preserve_format)

    def park(self, hooks: PackHooks) -> None:
        """Hand the data to the saved-tensor hooks around the region."""
        if isinstance(self.data, torch.Tensor) and not self.is_borrowed:
            self._watch = version_watch(self.data) if self._watch is not None else None
            self.data = park(self.data, hooks)

    def drop(self) -> None:
        """Hold nothing any more."""
        self.data = self._watch = None

    def made(self, serving: Serving) -> torch.Tensor:
        """Return the tensor for one recomputation."""
        tensor = self._tensor(serving)
        serving.name(self, tensor)
        return tensor

    def _value(self, serving: Serving) -> torch.Tensor:
        assert self.data is not None, "a result was given out after it had been let go"
        found = serving.fetched.pop(id(self), None)
        return fetch(self.data) if found is None else found

    def _tensor(self, serving: Serving) -> torch.Tensor:
        data = self._value(serving)
        if self.is_borrowed:
            return data
        if self._layout is not None and not _lies_as(data, self._layout):
            data = laid_out(data, self._layout)  # kernels choose their order of sums by it
        fresh = copied(data, serving.storages) if self.copied else detached(data)
        if not self._needs_grad:
            return fresh.detach() if fresh.requires_grad else fresh
        fresh.requires_grad_()
        return Alias.apply(fresh) if self.copied else fresh  # type: ignore[no-untyped-call]

    def write_to(self, target: torch.Tensor, serving: Serving) -> None:
        """Let ``target`` hold this value, as an op in place would have left it."""
        value = self._value(serving)
        if storage_address(value) != storage_address(target):
            write_onto(target, value)
        if self._needs_grad and not target.requires_grad:
            give_history(target, detached(value).requires_grad_())


def _lies_as(tensor: torch.Tensor, layout: torch.Tensor) -> bool:
    return (tensor.stride(), tensor.is_conj(), tensor.is_neg()) == (layout.stride(), layout.is_conj(), layout.is_neg())


class Argument:
    """One of the arguments, returned as it is."""

    __slots__ = ("_position",)

    def __init__(self, position: int) -> None:
        self._position = position

    def made(self, serving: Serving) -> Any:
        """Return the argument of the recomputation."""
        return serving.given[self._position]


class ArgumentView:
    """A view of one of the arguments."""

    __slots__ = ("_geometry", "_needs_grad", "_of", "_position")

    def __init__(self, tensor: torch.Tensor, argument: torch.Tensor, position: int) -> None:
        self._position = position
        self._of = argument.shape, argument.stride()
        self._geometry = tensor.shape, tensor.stride(), tensor.storage_offset() - argument.storage_offset()
        self._needs_grad = tensor.requires_grad

    def fits(self, given: list[Any]) -> bool:
        """Return whether the argument is laid out as in forward."""
        argument = given[self._position] if self._position < len(given) else None
        return type(argument) is torch.Tensor and (argument.shape, argument.stride()) == self._of

    def made(self, serving: Serving) -> Any:
        """Return the view of the argument of the recomputation."""
        shape, stride, offset = self._geometry
        argument = serving.given[self._position]
        with torch.set_grad_enabled(self._needs_grad):
            return argument.as_strided(shape, stride, argument.storage_offset() + offset)


class HoldingObject:
    """An object that holds tensors under names: a dataclass, say."""

    __slots__ = ("_attributes", "_kind")

    def __init__(self, kind: type, attributes: dict[str, tuple[list[Any], Any]]) -> None:
        self._kind = kind
        self._attributes = attributes

    def made(self, serving: Serving) -> Any:
        """Return such an object anew."""
        built: Any = object.__new__(self._kind)
        for name, (leaves, spec) in self._attributes.items():
            object.__setattr__(built, name, tree_unflatten([made(leaf, serving) for leaf in leaves], spec))
        return built


STANDING = (KeptLeaf, Argument, ArgumentView, HoldingObject)


def made(leaf: Any, serving: Serving) -> Any:
    """Return what ``leaf``, kept of a result, stands for: itself, if it is a plain value."""
    return leaf.made(serving) if isinstance(leaf, STANDING) else leaf
