"""Regions of functions and modules: what earlier calls have shown of each, and which of them a call is one of."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from torch import nn

from sac.full.compiled_inside import count_compiled
from sac.policy.model import Policy
from sac.region.identity import Identity
from sac.region.parts import PLAIN, same
from sac.region.settings import Settings
from sac.selective.kind import Kind, Region
from sac.selective.table import Table

# Note [What a function changes itself]
#
# Two calls are of one function if all that the function holds is the same (Note [Which function is it]). A function
# that counts its calls would be another one each time. But what a call changes itself is not the same in recomputation
# either, so it cannot be what decides which ops run; wherever a first call is seen to change something, that is no part
# of the function's identity from then on.

FULL = Policy(name="full", source="full")
FULL_TABLE = Table(FULL, ())
_MOST_REGIONS = 1024
_OF_ONE_FUNCTION = ()  # the mark of all calls of a region that serves one function only

_regions: dict[Hashable, Region] = {}
_kinds: dict[Hashable, Kind] = {}
_changing: dict[Hashable, dict[Hashable, frozenset[int]]] = {}  # which parts a function changes; see `_skeleton`


def run_as_region(
    function: Callable[..., Any], settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``function(*args, **kwargs)`` as a region, by what earlier calls of the same function have shown."""
    identity = _identify(function)
    owners = tuple(identity.owners)
    key = _key(identity) if identity.is_known else None
    region = _regions.get(key) if key is not None else None
    if region is not None:
        return region.run(function, owners, _OF_ONE_FUNCTION, settings, args, kwargs)
    region = Region(_kind_of(function), _name_of(function))
    output = region.run(function, owners, _OF_ONE_FUNCTION, settings, args, kwargs)
    if key is not None:
        _note_changes(identity, _identify(function))
        _put(_regions, _key(identity), region)
    return output


def run_modules(
    region: Region,
    function: Callable[..., Any],
    modules: nn.Module | tuple[nn.Module, ...],
    settings: Settings,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run ``function(*args, **kwargs)``, which calls ``modules``, as a call of ``region``.

    The modules may have been changed since its last call: by an attribute, a hook, a part put into training.
    """
    is_first = not region.stats.calls
    output = _run_modules(region, function, modules, settings, args, kwargs)
    if is_first:
        region.stats.compiled_graphs = count_compiled(output, (args, kwargs))
    return output


def _run_modules(
    region: Region,
    function: Callable[..., Any],
    modules: nn.Module | tuple[nn.Module, ...],
    settings: Settings,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    identity = _identify(modules)
    owners = tuple(identity.owners)
    if not identity.is_known:
        return region.run(function, owners, None, settings, args, kwargs)
    key = _key(identity)
    mark = region.marks.get(key)
    if mark is not None:
        return region.run(function, owners, mark, settings, args, kwargs)
    mark = _put(region.marks, key, object())
    output = region.run(function, owners, mark, settings, args, kwargs)
    after = _identify(modules)
    _note_changes(identity, after)
    _put(region.marks, _key(after), mark)
    return output


def _identify(function: Any) -> Identity:
    identity = Identity()
    identity.look_at(function)
    return identity


def _key(identity: Identity) -> Hashable:
    parts = identity.parts
    known = _changing.get(parts[0])  # as a rule None: most functions change nothing
    for place in known.get(_skeleton(parts), ()) if known else ():
        parts = [*parts[:place], None, *parts[place + 1 :]]
    return tuple(parts)


def _skeleton(parts: list[Any]) -> Hashable:
    """Return what stays the same of a function that changes plain values: what it holds beside them."""
    return len(parts), tuple(part for part in parts if type(part) not in PLAIN)


def _note_changes(before: Identity, after: Identity) -> None:
    skeleton = _skeleton(after.parts)
    if after.is_known and skeleton == _skeleton(before.parts):
        pairs = enumerate(zip(before.parts, after.parts, strict=True))
        changed = {place for place, (one, other) in pairs if one != other}
        if changed:
            known = _changing.get(after.parts[0]) or _put(_changing, after.parts[0], {})
            _put(known, skeleton, known.get(skeleton, frozenset()) | changed)


def _kind_of(function: Any) -> Kind:
    """Return one kind for all functions of the same code, and for all modules of a class."""
    while type(function) in (partial, types.MethodType):
        function = function.func if type(function) is partial else function.__func__
    key = same(function.__code__ if type(function) is types.FunctionType else type(function))
    return _kinds.get(key) or _put(_kinds, key, Kind(FULL_TABLE, "full"))


def _name_of(function: Any) -> str:
    """Return how messages name the region."""
    is_function = type(function) in (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    name: str = function.__qualname__ if is_function else type(function).__name__
    return name


def _put(known: dict[Hashable, Any], key: Hashable, value: Any) -> Any:
    if len(known) >= _MOST_REGIONS:
        known.clear()
    known[key] = value
    return value
