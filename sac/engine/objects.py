"""Objects of user classes that modules or arguments hold, without the graphs of the tensors in them."""

from __future__ import annotations

import argparse
import copy
import copyreg
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from sac.errors import Problem, RegionError
from sac.tensors import detached, placed_on

# A graph is no object of Python's garbage collector. A frame that held a tensor with the region's own history (a layer
# that keeps its last result, a cache) would be held by that history, for ever. So frames hold stand-ins.

_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_LIBRARIES = frozenset({"torch", "sac", "builtins", "numpy", *sys.stdlib_module_names})
_HOLDERS = (Tensor, torch.Generator, list, tuple, dict, set, deque, partial)
_MOST_LEVELS = 5  # of objects and containers inside of an argument


class NotLeaf(torch.autograd.Function):
    """Gives a tensor in the same storage that is no leaf, so that a region or function may write to it again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return the tensor on the same storage."""
        return placed_on(tensor.untyped_storage(), tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Raise: only the backward of a reentrant region runs through a recomputation."""
        found = "a reentrant region reads a tensor with a graph from a container or object of a module"
        raise RegionError(Problem("region", found, fix="pass it as an argument, or pass use_reentrant=False"))


def not_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor on the storage of ``tensor`` that needs a gradient and is no leaf."""
    with torch.enable_grad():
        again: Tensor = NotLeaf.apply(tensor.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return again


class _WithoutGraph:
    """Stands for a tensor with a graph in the copy of an object."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = detached(tensor)


def tensors_of_copies(copies: dict[int, Any]) -> list[Tensor]:
    """Return the tensors among the ``copies`` that ``copied`` has noted."""
    held = (copy.tensor if type(copy) is _WithoutGraph else copy for copy in copies.values())
    return [tensor for tensor in held if isinstance(tensor, Tensor)]


class StandIn:
    """Holds a tensor with a graph, a container or an object as a copy without graphs; ``copies``: see ``copied``."""

    __slots__ = ("_copy", "_tensor")

    def __init__(self, value: Any, copies: dict[int, Any] | None = None) -> None:
        self._copy = copied(value, {} if copies is None else copies)
        self._tensor = weakref.ref(value) if isinstance(value, Tensor) else None

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor."""
        return self._tensor is not None

    def again(self) -> Any:
        """Return a tensor itself while it lives (a reentrant region's gradients go through it), else a copy."""
        original = None if self._tensor is None else self._tensor()
        return copied(self._copy, {}) if original is None else original


def without_graph(value: Any) -> Any:
    """Return what to hold of a value: a stand-in if it is a tensor with a graph, or holds one."""
    return StandIn(value) if any(map(has_graph, tensors_in(value, 2))) else value


def has_graph(tensor: Tensor) -> bool:
    """Return whether a tensor has a graph."""
    return tensor.requires_grad and not is_stale(tensor) and tensor.grad_fn is not None


def is_stale(value: Any) -> bool:
    """Return whether a value is a view that cannot be used, as FSDP1 leaves them behind for parameters."""
    if not (isinstance(value, Tensor) and value.requires_grad and value._is_view()):
        return False
    try:
        value.grad_fn  # noqa: B018
        return False
    except RuntimeError:  # its base has been written to
        return True


def parts_of(value: Any) -> Iterable[Any]:
    """Return the items of a container, or the attributes of an object of a user's class; nothing of other values."""
    if isinstance(value, (list, tuple, deque)):
        return value
    if isinstance(value, dict):
        return value.values()
    return attributes_of(value).values() if is_own_object(value) else ()


def tensors_in(value: Any, levels: int = _MOST_LEVELS) -> Iterator[Tensor]:
    """Yield the tensors in a value, and in so many levels of containers and objects below it."""
    if isinstance(value, Tensor):
        yield value
    elif levels:
        for part in parts_of(value):
            if not holds_nothing(class_of(part)):
                yield from tensors_in(part, levels - 1)


def with_tensor(value: Any) -> Any:
    """Return the value that ``without_graph`` was given, or a copy of it."""
    return value.again() if type(value) is StandIn else value


def is_own_object(value: Any) -> bool:
    """Return whether a value is an object of a user's class that holds attributes."""
    return is_own_class(class_of(value)) and not isinstance(value, (Tensor, nn.Module, type))


def class_of(value: Any) -> type:
    """Return the class of a value, as one that can be hashed."""
    return type(value)


@cache
def is_own_class(cls: type) -> bool:
    """Return whether objects of a class count as those of a user's class."""
    if cls in _NAMESPACES:
        return True
    if cls.__module__.partition(".")[0] in _LIBRARIES or any("__call__" in vars(base) for base in cls.__mro__):
        return False
    return cls.__dictoffset__ != 0 or bool(_slots(cls))


@cache
def holds_nothing(cls: type) -> bool:
    """Return whether objects of a class are neither tensors, containers nor random, and not of a user's class."""
    return not (is_own_class(cls) or issubclass(cls, _HOLDERS) or hasattr(cls, "get_states"))


_slots = cache(copyreg._slotnames)  # type: ignore[attr-defined]


def cells(function: Any) -> Iterator[Any]:
    """Yield what the closure of a function holds."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it has no contents yet
            yield cell.cell_contents


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too."""
    slots = {name: getattr(value, name) for name in _slots(class_of(value)) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}


def copied(value: Any, copies: dict[int, Any], level: int = 0) -> Any:
    """Copy an object of a user's class with the objects and containers in it, but no tensors and modules.

    ``copies``: id -> the copy of what occurs more than once. A copy holds tensors with a graph without it; a copy of
    that copy has such tensors again, with another graph.
    """
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Tensor):
        copies[id(value)] = _WithoutGraph(value) if has_graph(value) else value
        return copies[id(value)]
    if type(value) is _WithoutGraph:
        copies[id(value)] = not_leaf(value.tensor)
        return copies[id(value)]
    if level == _MOST_LEVELS:
        return value
    cls = type(value)
    if cls is tuple:
        return tuple(copied(part, copies, level + 1) for part in value)
    is_object = is_own_object(value)
    if not (is_object or cls in (list, dict, deque)):
        return value
    try:
        twin = copies[id(value)] = copy.copy(value)
    except Exception:  # it cannot be copied: both passes share it
        return value
    if isinstance(value, dict):
        dict.update(twin, {key: copied(part, copies, level + 1) for key, part in value.items()})
    elif isinstance(value, (list, deque)):
        plain: Any = list if isinstance(value, list) else deque  # without what a subclass makes of it
        plain.clear(twin)
        plain.extend(twin, [copied(part, copies, level + 1) for part in value])
    if is_object and twin is not value:
        for name, part in attributes_of(value).items():
            object.__setattr__(twin, name, copied(part, copies, level + 1))
    return twin
