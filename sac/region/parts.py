"""What identities are made of: plain values, references to objects, sorts of tensors, names in code."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch

_Answer = TypeVar("_Answer")

PLAIN = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


class Same(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that stands for one object, whatever the object says of equality; made by ``same`` only."""

    __slots__ = ("address",)
    address: int
    # As long as the object lives there is one of these, so they need not be compared by what they refer to.
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


_living: dict[int, Same] = {}  # by the address of the object


def same(value: Any) -> Same:
    """Return the one object that stands for ``value``; raises ``TypeError`` where its class does not allow that."""
    found = _living.get(id(value))
    if found is not None and found() is value:
        return found
    made = Same(value, _forget)
    made.address = id(value)
    if found is not None:  # its object is gone, and it is about to be told
        _living.pop(id(value), None)
    return _living.setdefault(id(value), made)


def _forget(dead: Same) -> None:
    if _living.get(dead.address) is dead:
        del _living[dead.address]


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds under names, slots included."""
    held = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{name}"  # as Python mangles it
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                held[name] = getattr(value, name)
    return held


@lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code, or code inside it, looks up as globals or attributes, each once."""
    inner = (name for constant in code.co_consts if type(constant) is types.CodeType for name in names_in(constant))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def by_class(ask: Callable[[Any], _Answer]) -> Callable[[Any], _Answer]:
    """Return ``ask``, which is asked of classes, with a memory of the answers that keeps no class alive."""
    answers: dict[int, _Answer] = {}
    living: dict[int, weakref.ref[type]] = {}

    def forget(address: int, dead: object) -> None:
        del answers[address], living[address]

    def remembered(kind: Any) -> _Answer:
        address = id(kind)
        if address in answers:
            return answers[address]
        answer = ask(kind)
        if address not in living:
            living[address] = weakref.ref(kind, partial(forget, address))
        answers[address] = answer
        return answer

    return remembered


def sort_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return what of a tensor may decide which ops are run on it, but for its values."""
    return type(tensor), tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad
