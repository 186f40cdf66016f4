"""Regions of functions: what earlier calls of ``sac.checkpoint`` have shown of one, and the modules behind it."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sac.policy.model import Policy
from sac.region.state import owners_of
from sac.selective.kind import Kind, Region
from sac.selective.table import Table

# Note [Which function is it]
#
# A region may go without a dispatch mode once a call of it has shown nothing that needs one (Note [Evidence]). A
# function is often a new object in each call (a lambda in a loop, a partial): two are the same if they have the same
# code and what they hold (closure, defaults, bound arguments) is the same: modules and other objects by identity, plain
# values by value, tensors by their sort. What cannot be compared so is no function we know: each of its calls runs
# under the mode.

FULL = Policy(name="full", source="full")
_KIND = Kind(Table(FULL, ()), "full")
_MOST_HELD = 64
_MOST_REGIONS = 1024

_regions: dict[Hashable, Region] = {}


@dataclass(frozen=True, slots=True)
class FunctionRegion:
    """The region of one call of a function. ``owners``: modules behind it with buffers or parameters."""

    region: Region
    owners: tuple[nn.Module, ...]
    training: tuple[bool, ...]


def region_of(function: Any) -> FunctionRegion:
    """Return the region of ``function``, the one of earlier calls where it is known to be the same function."""
    held = _Held()
    held.look_at(function)
    training = tuple(module.training for module in held.modules)
    owners = tuple({owner: None for module in held.modules for owner in owners_of(module)})
    identity = tuple(held.identity) if held.is_known else None
    region = _regions.get(identity) if identity is not None else None
    if region is None:
        region = Region(_KIND, getattr(function, "__qualname__", type(function).__name__))
        if identity is not None:
            if len(_regions) >= _MOST_REGIONS:
                _regions.clear()
            _regions[identity] = region
    return FunctionRegion(region, owners, training)


class _Held:
    """What a function holds, as one flat identity; see Note [Which function is it]."""

    __slots__ = ("identity", "is_known", "modules")

    def __init__(self) -> None:
        self.identity: list[Any] = []
        self.is_known = True
        self.modules: list[nn.Module] = []

    def look_at(self, value: Any) -> None:
        """Add ``value`` to the identity."""
        kind = type(value)
        self.identity.append(kind)
        if len(self.identity) > _MOST_HELD:
            self.is_known = False
        elif isinstance(value, nn.Module):
            self.modules.append(value)
            self.identity.append(weakref.ref(value))
        elif kind in (bool, int, float, str, bytes, type(None), torch.dtype, torch.device):
            self.identity.append(value)
        elif kind is types.FunctionType:
            self._look_at_function(value)
        elif kind is types.MethodType:
            self.look_at(value.__func__)
            self.look_at(value.__self__)
        elif kind is functools.partial:
            for part in (value.func, value.args, value.keywords):
                self.look_at(part)
        elif kind in (tuple, list):
            self.identity.append(len(value))
            for part in value:
                self.look_at(part)
        elif kind is dict:
            self.look_at(tuple(value))
            self.look_at(tuple(value.values()))
        elif isinstance(value, torch.Tensor):
            self.identity.append((value.dtype, value.shape, value.requires_grad))
        else:
            self._look_at_object(value)

    def _look_at_function(self, function: types.FunctionType) -> None:
        self.identity.append(weakref.ref(function.__code__))
        for cell in function.__closure__ or ():
            try:
                self.look_at(cell.cell_contents)
            except ValueError:  # not yet bound
                self.is_known = False
        for defaults in (function.__defaults__, function.__kwdefaults__):
            if defaults:
                self.look_at(defaults)

    def _look_at_object(self, value: Any) -> None:
        try:
            self.identity.append(weakref.ref(value))
            hash(self.identity[-1])
        except TypeError:
            self.is_known = False
