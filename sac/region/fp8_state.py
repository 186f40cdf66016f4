"""FP8 state of TransformerEngine: its autocast, and scales and histories of maxima, restored for recomputation."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from sac.errors import ConfigError, Problem
from sac.region.settings import RERUN, Settings
from sac.region.undo import UndoStack
from sac.tensors import copy_of, storage_address

# Note [FP8 state]
#
# With delayed scaling, a module of TransformerEngine quantises with scales that follow from the maxima of earlier
# steps, and writes its own maxima into a history. At the end of the outermost `autocast` all scales and histories are
# updated. Its kernels do this unseen by the dispatcher and by version counters. So by the time of a recomputation the
# scales are others, and a second run would write maxima into a history that has moved on. Restored are, while Python
# runs again:
#  - the scales and histories of the forwards of the region's modules. They are copied before each forward of the
#    region. The modules' attributes are part of the Python state (Note [Python state]);
#  - the state of `autocast`: enabled, recipe, group, depth, and whether the next module is the first one, which updates
#    the scales of backward;
#  - the tables of all scales that `autocast` updates. A recomputation finds only those of its own region there, and
#    none if the forward began inside an `autocast`, since the scales then move after the region;
#  - the queues of the library's own protocol, see below.
#
# The library's own protocol for checkpointing is not used: flags around both passes, under which each module appends a
# copy of its scales to a queue in forward and takes the first one from it in recomputation. The queue belongs to the
# module, so a module gets the scales of another call if backwards come in another order than forwards, if a region is
# nested, if a recomputation is repeated, or if it raises. The flags also make modules take other paths than in forward,
# and the end of the `autocast` around a recomputation updates all scales once more. If these flags are on around a
# region, they are part of the state, with the queues.
#
# Consequences. A region with such modules runs again as Python: replay would read the present scales. It runs to its
# end while FP8 is on, since the modules are not written to be interrupted. And it never is a reentrant region: a
# forward without grad mode leaves out the update at the end of an `autocast` in the region, and does not take note of
# which module is the first one.
#
# Example. Two micro-batches go forward, each under `autocast`, and backward begins with the second. At that time the
# scales have been updated twice. Its recomputation finds those from after the first update, the other one those from
# before it. When they are over, the scales are those from after the second update.

_MODULES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # newer and older
_METAS = ("fp8_meta", "_fp8_metas")  # attributes with the state of a module, and of an op of `te.ops`
_TENSORS = ("scale", "scale_inv", "amax_history")
_TABLES = ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer")
_HISTORIES = _TABLES[1]
_QUEUES = "fp8_tensors_recompute_buffer"
# Names differ by version. The fields were attributes of the class before they had an object of their own.
_READERS = ("get_autocast_state", "get_fp8_autocast_state")
_SETTERS = ("set_autocast_state", "set_fp8_autocast_state")
_DEPTHS = ("autocast_depth", "AUTOCAST_DEPTH", "FP8_AUTOCAST_DEPTH")
REASON = "its modules keep FP8 state (TransformerEngine); while FP8 is on, it runs to its end"

_NOT_RESTORED = (
    "FP8 is on around the region, and its scales and histories are not put back for recomputation: this version of "
    "TransformerEngine is not known (1.6 to 2.20 are)"
)
_FIX = "run this region without FP8, or call TransformerEngine's own checkpoint for it"


_State = tuple[tuple[Any, ...], int, list[tuple[Any, list[Any]]]]


class _Library:
    """Access to the state of a loaded TransformerEngine; raises ``AttributeError`` for a version without the names."""

    __slots__ = ("_depth", "_manager", "_put", "_read")

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._read = _first(manager, _READERS)
        self._put = _first(manager, _SETTERS)
        fields = self.fields
        self._depth = next((name for name in _DEPTHS if hasattr(fields, name)), _DEPTHS[0])
        for name in (self._depth, *_TABLES, _QUEUES):
            getattr(fields, name)

    @property
    def fields(self) -> Any:
        """The object that holds the state now: the library's `reset` makes another one."""
        return getattr(self._manager, "quantization_state", self._manager)

    def state(self) -> _State:
        """Return the state of autocast, its depth, and the queues with their contents."""
        return self._read(), getattr(self.fields, self._depth), [(one, [*one]) for one in getattr(self.fields, _QUEUES)]

    def put(self, state: _State) -> None:
        """Set what ``state`` returned."""
        autocast, depth, queues = state
        self._put(autocast)
        setattr(self.fields, self._depth, depth)
        if queues or getattr(self.fields, _QUEUES):
            setattr(self.fields, _QUEUES, [queue for queue, _ in queues])
            for queue, contents in queues:
                queue.clear()
                queue.extend(contents)

    def tables(self) -> list[dict[str, list[Any]]]:
        """Return the tables of all scales and histories."""
        return [getattr(self.fields, name) for name in _TABLES]

    def put_tables(self, tables: Iterable[dict[str, list[Any]]]) -> None:
        """Replace these tables."""
        for name, table in zip(_TABLES, tables, strict=True):
            setattr(self.fields, name, table)

    def tables_of(self, histories: set[int]) -> list[dict[str, list[Any]]]:
        """Return the tables without all entries but those of these histories, given by their ids."""
        found: list[dict[str, list[Any]]] = [{} for _ in _TABLES]
        for key, known in getattr(self.fields, _HISTORIES).items():
            own = [index for index, one in enumerate(known) if id(one) in histories]
            for table, whole in zip(found, self.tables(), strict=True):
                if own:
                    table[key] = [whole[key][index] for index in own]
        return found


def _first(manager: Any, names: Sequence[str]) -> Any:
    return getattr(manager, next((name for name in names if hasattr(manager, name)), names[0]))


def _manager() -> Any:
    """Return the class with the state of a loaded TransformerEngine, None if it is not loaded."""
    for name in _MODULES:
        if name in sys.modules and (found := getattr(sys.modules[name], "FP8GlobalStateManager", None)) is not None:
            return found
    return None


@lru_cache(maxsize=1)
def _library_of(manager: Any) -> _Library:
    """Return access to the library's state. Cached, because names of a loaded library do not change."""
    return _Library(manager)


def _library(where: str) -> _Library | None:
    """Return access to the library's state; None if it is not loaded, or its state is unknown while FP8 is off.

    Raises ``ConfigError``, with ``where`` as the place, if the state is unknown while FP8 is on.
    """
    manager = _manager()
    if manager is None:
        return None
    try:
        return _library_of(manager)
    except AttributeError:
        if not manager.is_fp8_enabled():
            return None
        raise ConfigError(Problem(where, _NOT_RESTORED, fix=_FIX)) from None


def check_fp8(where: str) -> None:
    """Raise ``ConfigError`` if FP8 is on in a version of TransformerEngine whose state cannot be restored."""
    _library(where)


def keeps_fp8_state(owners: Iterable[nn.Module]) -> bool:
    """Return whether any of these modules is one of TransformerEngine's that can run in FP8."""
    return _manager() is not None and any(name in vars(owner) for owner in owners for name in _METAS)


def for_fp8(settings: Settings, owners: Iterable[nn.Module]) -> Settings:
    """Return the settings of a call with such modules; see Note [FP8 state]."""
    is_on = _manager().is_fp8_enabled() or any(getattr(owner, "fp8", False) for owner in owners)
    return replace(settings, engine=RERUN, use_reentrant=False, early_stop=settings.early_stop and not is_on)


class Fp8State:
    """The FP8 state that a region's forward starts from; see Note [FP8 state]."""

    __slots__ = ("_copies", "_library", "_owns_modules", "_scaling", "_state", "addresses")

    def __init__(self, library: _Library, owners: Sequence[nn.Module]) -> None:
        self._library = library
        self._state = library.state()
        metas = [vars(owner)[name] for owner in owners for name in _METAS if name in vars(owner)]
        self._owns_modules = bool(metas)
        self._scaling = [
            (state, name, tensor)
            for meta in metas
            for state in _scaling_in(meta)
            for name in _TENSORS
            if isinstance(tensor := getattr(state, name, None), torch.Tensor)
        ]
        storages = {storage_address(tensor): tensor.untyped_storage() for _, _, tensor in self._scaling}
        self._copies = [(storage, copy_of(storage)) for storage in storages.values()]
        self.addresses = storages.keys()

    def enter_on(self, stack: UndoStack) -> None:
        """Restore the state of the forward; restore the current state when ``stack`` is left."""
        library, (_, depth, _) = self._library, self._state
        stack.callback(library.put, library.state())
        if self._owns_modules:
            stack.callback(library.put_tables, library.tables())
            histories = {id(tensor) for _, _, tensor in self._scaling}
            library.put_tables(({}, {}, {}) if depth else library.tables_of(histories))
        for state, name, tensor in self._scaling:
            if (now := getattr(state, name)) is not tensor:
                stack.callback(setattr, state, name, now)
                setattr(state, name, tensor)
        for storage, copy in self._copies:
            stack.overwrite(storage, copy)
        library.put(self._state)

    def drop(self) -> None:
        """Release everything."""
        self._scaling, self._copies = [], []


def fp8_state_of(owners: Sequence[nn.Module], where: str) -> Fp8State | None:
    """Return the FP8 state before a forward of these modules; None if TransformerEngine is not loaded.

    Raises as ``check_fp8`` does.
    """
    library = _library(where)
    return None if library is None else Fp8State(library, owners)


def _scaling_in(meta: Any) -> Iterator[Any]:
    """Yield the objects that hold the scales and histories of forwards."""
    if isinstance(meta, dict):
        state = meta.get("scaling_fwd")
        if isinstance(getattr(state, "amax_history", None), torch.Tensor):
            yield state
        for value in meta.values():
            yield from _scaling_in(value)
