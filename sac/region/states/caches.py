"""K/V caches that are handed to a region: a recomputation finds each as it was when the forward began."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_is_leaf

from sac.region.identity import Identity

# Note [Caches as arguments]
#
# A block writes its keys and values into the cache that it is given (`use_cache=True`, or a prefix that is trained).
# Recomputed on that cache it would attend to its own keys twice. So a cache is no input that is kept: recomputation
# runs on a copy of what it was when the forward began, of its objects and containers and not of its tensors. Keys and
# values that come from before the region keep their graph, so that a trained prefix has its gradient.
#
# The region must not hold the caller's cache: keys and values that it has written there have it in their history, and
# such a circle, which leads through autograd's nodes, no collector would find.
#
# What a cache holds is rebound, appended to or, for states of a fixed size, written in place. Of the first two the copy
# knows nothing; the recorder sees the third (Note [What is kept, and what is not]). What ops a block runs depends on
# what lies in the cache, so that no call with one is evidence for another. What layers hand keys and values to each
# other by is a cache too: a plain dictionary is an input like others, what cannot be taken apart is known by the name
# of the argument. Of that of transformers all contents are known, and part of the sort of inputs.

SHARED_STATES = "shared_kv_states"  # the argument by which shared keys and values are handed on
_SHARED = "KVSharingDict"  # of transformers
_LEAVES = (torch.Tensor, nn.Module, type, str, bytes, int, float)


@lru_cache(maxsize=1024)
def _is_cache_class(kind: Any) -> bool:
    # By name: the classes are Hugging Face's (DynamicCache, EncoderDecoderCache, ...) and those of models' own files.
    return any(one.__name__.endswith(("Cache", _SHARED)) for one in kind.__mro__)


def _is_cache(value: object) -> bool:
    kind: Hashable = type(value)  # type: ignore[assignment]  # mypy takes a class's __hash__ for that of its objects
    return _is_cache_class(kind)


@lru_cache(maxsize=1024)
def _names_of_arguments(kind: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]  # without self
    except (AttributeError, TypeError, ValueError):  # a scripted module does not tell
        return ()


def _is_handed_on(name: str, value: object) -> bool:
    return name == SHARED_STATES and value is not None and not isinstance(value, _LEAVES) and tree_is_leaf(value)


def sort_of_shared(caches: dict[int | str, Any]) -> tuple[Any, ...] | None:
    """Return what lies in dictionaries of shared keys and values, as a part of the sort of inputs.

    None if one of the caches is something else, or holds what cannot be known.
    """
    if any(type(one).__name__ != _SHARED for one in caches.values()):
        return None
    identity = Identity()
    identity.look_at(*(dict(one) for one in caches.values()))
    return tuple(identity.parts) if identity.is_known else None


def caches_in(
    args: tuple[Any, ...], kwargs: dict[str, Any], owners: tuple[nn.Module, ...] = ()
) -> dict[int | str, Any]:
    """Return the caches among the arguments of a call of the first of ``owners``, by position or name."""
    called: Hashable = type(owners[0]) if owners else None  # type: ignore[assignment]  # as above
    names = _names_of_arguments(called)
    found: dict[int | str, Any] = {
        place: one
        for place, one in enumerate(args)
        if _is_cache(one) or (place < len(names) and _is_handed_on(names[place], one))
    }
    found.update({name: one for name, one in kwargs.items() if _is_cache(one) or _is_handed_on(name, one)})
    return found


def without(
    caches: dict[int | str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with None in the place of each cache."""
    return _exchanged(dict.fromkeys(caches), args, kwargs)


class OnCaches:
    """A region's function with its caches put in again; each call after the first finds them as the first did."""

    def __init__(self, function: Callable[..., Any], caches: dict[int | str, Any]) -> None:
        self.function = function
        self.caches = caches
        self._is_forward = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, whose arguments are given ``without`` the caches."""
        caches, copies = self.caches, _copied(self.caches, {})
        args, kwargs = _exchanged(caches if self._is_forward else copies, args, kwargs)
        if self._is_forward:
            self._is_forward, self.caches = False, copies  # what the caller has from now on leads to this region
        return self.function(*args, **kwargs)


def _copied(one: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of a cache, of all objects and containers below it, but not of tensors, modules and plain values.

    ``copies`` holds those made so far, by what they are copies of: what was one object is one in the copy too.
    """
    if isinstance(one, _LEAVES):
        return one
    if id(one) in copies:
        return copies[id(one)]
    if isinstance(one, tuple):
        parts = [_copied(part, copies) for part in one]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    try:
        twin = copy.copy(one)
    except Exception:  # of a class that cannot be copied (a lock): it is the same in both
        return one
    copies[id(one)] = twin
    if twin is one:
        return one
    for name, value in _attributes_of(one):
        object.__setattr__(twin, name, _copied(value, copies))
    if isinstance(one, dict):
        twin.update({key: _copied(value, copies) for key, value in one.items()})
    elif isinstance(one, list):
        twin[:] = [_copied(value, copies) for value in one]
    elif isinstance(one, deque):
        twin.clear()
        twin.extend(_copied(value, copies) for value in one)
    return twin


def _attributes_of(one: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of an object's attributes, those in slots included."""
    yield from getattr(one, "__dict__", {}).items()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__") and hasattr(one, name):
                yield name, getattr(one, name)


def _exchanged(
    values: dict[int | str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = {name: value for name, value in values.items() if isinstance(name, str)}
    return tuple(values.get(place, one) for place, one in enumerate(args)), {**kwargs, **named}
