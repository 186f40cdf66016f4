"""What the entries of a tape are made of: arguments with numbers for tensors, and what stands for unseen makings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sac.selective.tensors import storage_address, wrapped_parts

if TYPE_CHECKING:
    from sac.selective.tape import Tape

HOLE = object()  # stands for a tensor among an entry's arguments; its value's number is among the entry's reads

_PLAIN = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format})


@dataclass(frozen=True, slots=True)
class Ref:
    """The number of a value, inside an argument that holds several tensors."""

    value: int


def as_reads(value: Any, tape: Tape, op: Any, reads: list[int]) -> Any:
    """Return ``value`` with ``Ref`` in place of tensors, through lists, tuples and dicts; note them in ``reads``."""
    if isinstance(value, Tensor):
        number = tape.find(value, op)
        reads.append(number)
        return Ref(number)
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return kind(as_reads(part, tape, op, reads) for part in value)
    if kind is dict:
        return {key: as_reads(part, tape, op, reads) for key, part in value.items()}
    return value


def from_reads(value: Any, values: list[Any]) -> Any:
    """Return ``value`` with the tensors in ``values`` in place of ``Ref``."""
    kind = type(value)
    if kind is Ref:
        return values[value.value]
    if kind is list or kind is tuple:
        return kind(from_reads(part, values) for part in value)
    if kind is dict:
        return {key: from_reads(part, values) for key, part in value.items()}
    return value


class _Synthetic:
    """What stands in an entry's place for the plan, where no op was called."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


ALIAS = _Synthetic("alias")  # of the root: (geometry,)
PART = _Synthetic("part")  # of a wrapper: (which, geometry)
CAST = _Synthetic("cast")  # of a parameter: (dtype,)
WRAP = _Synthetic("wrap")  # parts in a wrapper: (class, names, context, size, stride)


def cast_of(tensor: Tensor) -> Tensor | None:
    """Return the parameter that ``tensor`` is, in another dtype and untouched; None if it is something else."""
    cast = tensor.grad_fn
    if cast is None or type(cast).__name__ != "ToCopyBackward0" or tensor._version:
        return None
    leaf = getattr(cast.next_functions[0][0], "variable", None)
    if type(leaf) is not Parameter or (leaf.shape, leaf.stride()) != (tensor.shape, tensor.stride()):
        return None
    return leaf if leaf.device == tensor.device else None


def is_wrapper(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds its data in tensors inside it."""
    return hasattr(type(tensor), "__tensor_flatten__")


def first_address(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor, of its first part if it is a wrapper."""
    if type(tensor) is not Tensor and is_wrapper(tensor):
        parts = wrapped_parts(tensor)
        return storage_address(parts[0]) if parts else id(tensor)
    return storage_address(tensor)
