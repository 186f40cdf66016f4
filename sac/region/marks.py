"""Marks of parameters: whether a forward has written to them, or exchanged their data or gradients."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from sac.native.load import library
from sac.region.globals_in_code import is_of_torch
from sac.tensors import detached, place_of, storage_address, version_of

# Note [Marks of parameters]
#
# Three changes that a forward makes to a parameter would be made again by a recomputation that runs Python, or would
# let it start from other values:
#
#   in place              moves the version counter; a recorder has copied the data before the write
#   other data            `weight.data = ...`, `vector_to_parameters`, `module.half()`: moves no counter
#   another gradient      a `backward()` inside the forward, `weight.grad = ...`
#
# So each parameter has a mark when the forward begins and when it ends. Without a recorder, a call whose marks differ
# keeps its activations (Note [The walk of a region]). With one, data and gradients of the beginning are held until the
# forward ends; those that it has exchanged are put back for the recomputation, and afterwards the present ones are.
#
# A recomputation also registers again the hooks that the forward has registered on parameters and other leaves
# (`weight.register_hook`). The hooks that it adds are removed, except those of torch.
#
# Systems that shard parameters exchange their data in each forward, and gather it anew in a recomputation: their
# parameters have empty data when the forward ends, or an attribute that says so (`_MANAGED`).
#
# Example. A block ends with `w.data = normalize(w.data)`. The recomputation of its call finds the data of before, and
# makes normalised data of its own; when it is over, `w` has the data that the forward has made.

_MANAGED = ("ds_id", "_fsdp_flattened")  # of DeepSpeed's ZeRO-3 and of FSDP1
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Mark(NamedTuple):
    """A tensor's version, its storage, a hash of its place there, its gradient, and the version of that."""

    version: int
    storage: int
    place: int
    gradient: int
    gradient_version: int


def marks_of(tensors: list[torch.Tensor]) -> bytes:
    """Return the marks of ``tensors``; if they are equal, nothing has been written to or exchanged."""
    native: Any = library()
    if native is not None:
        return native.leaf_marks(tensors)  # type: ignore[no-any-return]
    found: list[int] = []
    for one in tensors:
        version = version_of(one)
        if _has_own_data(one):
            grad = one.grad
            gradient, gradient_version = (0, 0) if grad is None else (id(grad), version_of(grad))
            found += version, storage_address(one), hash(place_of(one)), gradient, gradient_version
        else:
            found += version, 0, 0, 0, 0
    return array("q", found).tobytes()


def versions_in(marks: bytes) -> list[int]:
    """Return the version of each tensor."""
    return memoryview(marks).cast("q").tolist()[:: len(Mark._fields)]


def unpacked(marks: bytes) -> Iterator[Mark]:
    """Yield the mark of each tensor."""
    numbers = iter(memoryview(marks).cast("q").tolist())
    return map(Mark, numbers, numbers, numbers, numbers, numbers)


def is_managed(tensor: torch.Tensor) -> bool:
    """Return whether another system exchanges the data of a parameter."""
    return tensor.numel() == 0 or any(hasattr(tensor, name) for name in _MANAGED)


class Contents:
    """The data and gradients of tensors at one time."""

    __slots__ = ("_held", "_native")

    def __init__(self, tensors: list[torch.Tensor], held: Any = None) -> None:
        """``held``: what the library has returned for them."""
        self._native: Any = library()
        self._held: Any = held
        if held is not None:
            return
        if self._native is not None:
            self._held = self._native.leaf_contents(tensors)
        else:
            self._held = [(detached(one), one.grad) if _has_own_data(one) else (None, None) for one in tensors]

    def at(self, position: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the data and the gradient of one of the tensors."""
        found = self._held[position] if self._native is None else self._native.contents_at(self._held, position)
        data, gradient = found
        return data, gradient


def _has_own_data(tensor: torch.Tensor) -> bool:
    return type(tensor) is nn.Parameter and tensor.layout is torch.strided


Hooks = list[dict[int, Any] | None]


def hooks_of(leaves: Sequence[torch.Tensor]) -> Hooks:
    """Return the hooks that are registered on leaves."""
    return [None if table is None else {**table} for table in _tables(leaves)]


def put_hooks(leaves: Sequence[torch.Tensor], wanted: Hooks) -> None:
    """Remove the hooks that have been added to leaves, and add those that have been removed; those of torch stay."""
    for before, table in zip(wanted, [*_tables(leaves)], strict=True):
        if table is not None and table != (before or {}):
            hooks = (before or {}) | {key: hook for key, hook in table.items() if is_of_torch(hook)}
            table.clear()
            table.update(hooks)


def _tables(leaves: Sequence[torch.Tensor]) -> Iterator[Any]:
    return (getattr(leaf, name, None) for leaf in leaves for name in _HOOKS)
