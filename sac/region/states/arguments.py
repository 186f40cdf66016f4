"""Objects that are handed to a region: a recomputation finds each as it was when the forward began."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from torch import nn

from sac.region.parts import PLAIN
from sac.region.states.reachable import attributes_in, holds_state

# Note [Objects as arguments]
#
# A block writes its keys and values into the cache that it is given, or puts its result into a field of a state that is
# passed from layer to layer (`state.h = layer(state)`). Recomputed on that object it would start from its own results.
# So such an object is kept as a copy of what it was when the forward began: of its objects and containers, and not of
# its tensors, which keep their graph (a trained prefix has its gradient). Each recomputation runs on a copy of that.
#
# The region must not hold the caller's object: what the region has put there has the region in its history, and such a
# circle, which leads through autograd's nodes, no collector would find.
#
# Lists, dicts, tuples and what else `torch.utils._pytree` takes apart are made anew for each recomputation anyway. An
# object is copied if it holds state of the user's (Note [Python state]): any class but those of torch, of sac and of
# the standard library. Objects of these are the same in forward and recomputation.

SHARED_STATES = "shared_kv_states"  # the argument by which layers hand keys and values on
_SHARED = (torch.Tensor, nn.Module, type, str, bytes, int, float)


class KeptObject:
    """An object among the arguments of a region, as it was when the forward began; see Note [Objects as arguments].

    ``tensors``: those that it holds.
    """

    __slots__ = ("_copy", "tensors")

    def __init__(self, value: Any) -> None:
        copies: dict[int, Any] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self._copy = _copied(value, copies, self.tensors)

    def rebuild(self) -> Any:
        """Return the object for one recomputation."""
        return _copied(self._copy, {}, {})


def is_kept_object(value: Any) -> bool:
    """Return whether an argument that is no tensor is kept as a copy."""
    return type(value) not in PLAIN and not isinstance(value, _SHARED) and holds_state(value)


def _copied(one: Any, copies: dict[int, Any], tensors: dict[int, torch.Tensor]) -> Any:
    """Return a copy of an object, of all objects and containers below it, but not of tensors, modules and plain values.

    ``copies`` holds those made so far, by what they are copies of: what was one object is one in the copy too.
    ``tensors`` gets what is met, by id.
    """
    if isinstance(one, torch.Tensor):
        tensors[id(one)] = one
        return one
    if type(one) in PLAIN or isinstance(one, _SHARED):
        return one
    if id(one) in copies:
        return copies[id(one)]
    if isinstance(one, tuple):
        parts = [_copied(part, copies, tensors) for part in one]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    if not holds_state(one):
        return one
    try:
        twin = copy.copy(one)
        attributes = attributes_in(one)
    except Exception:  # of a class that cannot be copied (a lock) or looked at: it is the same in both
        return one
    copies[id(one)] = twin
    if twin is one:
        return one
    for name, value in attributes.items():
        object.__setattr__(twin, name, _copied(value, copies, tensors))
    if isinstance(one, dict):
        for key, value in one.items():
            dict.__setitem__(twin, key, _copied(value, copies, tensors))
    elif isinstance(one, list):
        list.__setitem__(twin, slice(None), [_copied(value, copies, tensors) for value in one])
    elif isinstance(one, deque):
        deque.clear(twin)
        deque.extend(twin, [_copied(value, copies, tensors) for value in one])
    return twin
