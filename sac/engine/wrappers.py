"""Tensors of wrapper classes (DTensor, jagged, quantised) that a region takes apart or puts together.

Ops on them are entries like others. What no op does is an entry here: to take a tensor out of a wrapper (a view of it),
and to make a wrapper around tensors that the tape knows. A DTensor's ``from_local`` and ``to_local`` are such.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sac.ops.facts import OpTraits
from sac.tensors import inner_tensors, is_wrapper, storage_address, tensor_parts


class WrapperSite:
    """Stands for a call site in the tape. ``run``: makes the result from the arguments of the entry."""

    is_ordinary = is_inplace_view = is_custom_op = is_collective = may_save = has_decision = must_save = writes = False
    path = ""
    traits = OpTraits()

    def __init__(self, name: str, run: Any, *, is_view: bool) -> None:
        self.op, self.run, self.is_view = name, run, is_view


def _taken(wrapper: Tensor, path: tuple[int, ...]) -> Tensor:
    for index in path:
        wrapper = inner_tensors(wrapper)[index]
    return wrapper


def _made(*arguments: Any) -> Any:
    *parts, cls, names, others, context, size, stride = arguments
    return cls.__tensor_unflatten__(others | dict(zip(names, parts, strict=True)), context, size, stride)


PART = WrapperSite("part of a wrapper", _taken, is_view=True)
WRAP = WrapperSite("wrapper", _made, is_view=False)


def parts_of(wrapper: Tensor, path: tuple[int, ...] = ()) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield the tensors inside of a wrapper, also those inside of wrappers in it, with the way to each."""
    for index, part in enumerate(inner_tensors(wrapper)):
        yield part, (*path, index)
        if is_wrapper(part):
            yield from parts_of(part, (*path, index))


def wrap_arguments(wrapper: Any) -> tuple[Any, ...]:
    """Return the arguments of an entry that makes ``wrapper``, after the tensors in it."""
    names, context = wrapper.__tensor_flatten__()
    held = {name: getattr(wrapper, name) for name in names}  # with the mesh of a DTensor in torch 2.13
    others = {name: value for name, value in held.items() if not isinstance(value, Tensor)}
    tensors = tuple(name for name in names if name not in others)
    return type(wrapper), tensors, others, context, wrapper.size(), wrapper.stride()


def memory_of(tensor: Tensor) -> Any:
    """Return what identifies the storage of a tensor, or the class and the storages of a wrapper."""
    if is_wrapper(tensor):
        return type(tensor), *map(storage_address, tensor_parts(tensor))
    return storage_address(tensor)


def is_in_flight(tensor: Tensor) -> bool:
    """Return whether a tensor is, or holds, the result of a collective that has not been waited for."""
    parts = (tensor, *(part for part, _ in parts_of(tensor))) if is_wrapper(tensor) else ()
    return any(getattr(part, "completed", True) is False for part in parts)  # of `AsyncCollectiveTensor`
