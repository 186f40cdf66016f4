"""Records of single objects: what a container, a class, a module or a closure held, and how to restore it."""

from __future__ import annotations

import itertools
import types
import warnings
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain, islice
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from sac.native.load import library
from sac.region.fingerprint import PLAIN
from sac.region.globals_in_code import MISSING, is_of_torch
from sac.region.tables import STANDARD_COUNT, AttributesHolder, FoundEntries, Holder, TablesHolder
from sac.tensors import detached, has_graph
from sac.torch_private import HOOK_FLAGS, HOOKS

# -- Copies of iterators

# Iterators that can be copied: those of Python's own containers and functions, and those of itertools. Their
# `__reduce__` returns their parts (for itertools up to Python 3.13). Generators, and iterators that draw from a
# generator, cannot be copied.
_EMPTY: dict[Any, Any] = {}
_SOURCES: tuple[Any, ...] = (_EMPTY, _EMPTY.values(), _EMPTY.items(), [], (), set(), "", b"", bytearray(), range(0))
ITERATORS = frozenset(
    {
        *(type(iter(source)) for source in (*_SOURCES, range(1 << 70))),
        *(type(reversed(source)) for source in (*_SOURCES[:3], [])),
        *(enumerate, filter, map, reversed, zip),
        *(one for one in vars(itertools).values() if isinstance(one, type) and hasattr(one, "__next__")),
    }
)


def copy_of_iterator(value: Any) -> Any:
    """Return an iterator that yields the same objects as ``value``.

    Raises ``TypeError`` if it cannot be copied.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        make, given, *state = value.__reduce__()
    made = make(*map(_part, given))
    if state and state[0] is not None:
        made.__setstate__(_state(state[0]))
    return made


def _part(value: Any) -> Any:
    if type(value) in ITERATORS:
        return copy_of_iterator(value)
    if hasattr(type(value), "__next__"):
        raise TypeError(f"an iterator of type {type(value).__name__} cannot be copied")
    return value


def _state(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_state, value))
    return [*value] if type(value) is list else _part(value)  # itertools.cycle appends to its list


# -- Stand-ins: what is recorded in place of tensors with a graph and iterators

_WITHOUT_STAND_IN = PLAIN | {type, types.ModuleType, property, types.FunctionType}  # common types, checked first


class _Leaf:
    """Replaces a tensor with a graph, which is not held: a leaf on the same data."""

    __slots__ = ("_data", "_original")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._original = weakref.ref(tensor)
        self._data = detached(tensor)

    def is_for(self, value: Any) -> bool:
        return value is not None and self._original() is value  # a dead reference returns None

    def made(self) -> torch.Tensor:
        leaf = detached(self._data)
        return leaf.requires_grad_() if leaf.is_floating_point() or leaf.is_complex() else leaf


class _Iterator:
    """Replaces an iterator, from which the forward may draw."""

    __slots__ = ("_copy",)

    def __init__(self, value: Any) -> None:
        self._copy = copy_of_iterator(value)

    def is_for(self, _: Any) -> bool:
        """Return False: whether a value is the iterator in its earlier state cannot be determined."""
        return False

    def made(self) -> Any:
        return copy_of_iterator(self._copy)


_STAND_INS = (_Leaf, _Iterator)


def entries_of(target: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a dictionary, without calling methods of a user's subclass."""
    if type(target) is dict:
        return dict(target)
    if not isinstance(target, dict):  # the modules of a scripted module
        return dict(target.items())
    return dict((OrderedDict if isinstance(target, OrderedDict) else dict).items(target))


def _with_leaves(held: dict[Any, Any]) -> dict[Any, Any]:
    for key, value in held.items():
        if type(value) not in _WITHOUT_STAND_IN and (noted := stand_in(value)) is not value:
            held[key] = noted
    return held


def stand_in(value: Any) -> Any:
    """Return what to record for ``value``: the value itself, or a ``_Leaf`` or ``_Iterator`` in its place."""
    if type(value) in ITERATORS:
        try:
            return _Iterator(value)
        except (TypeError, RuntimeError):  # it cannot be copied, or its container has changed
            return value
    return _Leaf(value) if issubclass(type(value), torch.Tensor) and has_graph(value) else value


def is_of_flat_parameter(value: Any) -> bool:
    """Return whether a tensor is a parameter that FullyShardedDataParallel has put into a module's dict."""
    return type(value) is torch.Tensor and value._is_view() and getattr(value._base, "_is_flat_param", False)


def _is_same(held: Any, now: Any) -> bool:
    return held.is_for(now) if type(held) in _STAND_INS else held is now


def _are_same_names(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Return whether two dictionaries have the same names in the same order; 1 and True are different ones."""
    return [*one] == [*other] and all(map(is_, map(type, one), map(type, other)))


def restored_value(held: Any, now: Any) -> Any:
    """Return the value to restore for ``held``."""
    if type(held) not in _STAND_INS:
        return held
    return now if held.is_for(now) else held.made()


# -- Records of single objects

STANDARD = frozenset(
    vars(nn.Module())
)  # the entries that nn.Module itself puts into a module's dict: recorded elsewhere, or not state of the user


class DictHolder(Holder):
    """A dictionary, except for its entries in ``apart``."""

    __slots__ = ("_held", "apart", "target")

    def __init__(
        self, target: dict[Any, Any], apart: frozenset[str] = frozenset(), held: dict[Any, Any] | None = None
    ) -> None:
        """``held``: the entries, if they are known; not those of now."""
        self.target = target
        self.apart = apart
        self._held = _with_leaves(entries_of(target)) if held is None else held

    def now(self) -> dict[Any, Any]:
        return entries_of(self.target)

    def before(self) -> dict[Any, Any]:
        now = self.now()
        return {key: restored_value(value, now.get(key)) for key, value in self._held.items()}

    def differs(self, now: dict[Any, Any]) -> bool:
        held, apart = self._held, self.apart
        if len(now) == len(held) and all(map(is_, now, held)) and all(map(is_, now.values(), held.values())):
            return False  # the usual case; the rest handles leaves, and names that are equal but not identical
        if not _are_same_names(now, held):
            return True
        return any(not _is_same(value, now[key]) and key not in apart for key, value in held.items())

    def put(self, wanted: dict[Any, Any]) -> None:
        target, apart = self.target, self.apart
        now = entries_of(target)
        if len(now) == len(wanted) and all(map(is_, now, wanted)) and all(map(is_, now.values(), wanted.values())):
            return
        if _are_same_names(now, wanted):  # the usual case: in the same order
            changed = {key: value for key, value in wanted.items() if now[key] is not value and key not in apart}
            for key, value in changed.items():
                dict.__setitem__(target, key, value)
            return
        cls = OrderedDict if isinstance(target, OrderedDict) else dict  # bypasses methods of a user's subclass
        kept = {key: value for key, value in now.items() if key in apart}
        cls.clear(target)
        for key, value in wanted.items():
            cls.__setitem__(target, key, kept.pop(key) if key in kept else value)
        for key, value in kept.items():
            cls.__setitem__(target, key, value)

    def again(self) -> DictHolder:
        return DictHolder(self.target, self.apart)


class OwnAttributesHolder(DictHolder):
    """The entries of a module's dict after the standard ones."""

    __slots__ = ()

    def __init__(self, target: dict[str, Any]) -> None:
        self.target = target
        self.apart = STANDARD
        self._held = _with_leaves(self.now())

    def now(self) -> dict[str, Any]:
        return dict(islice(self.target.items(), STANDARD_COUNT, None))

    def put(self, wanted: dict[str, Any]) -> None:
        target = self.target
        now = self.now()
        if len(now) == len(wanted) and all(map(is_, now.values(), wanted.values())) and [*now] == [*wanted]:
            return
        for name in now.keys() - wanted.keys():
            del target[name]
        target.update(wanted)

    def again(self) -> OwnAttributesHolder:
        return OwnAttributesHolder(self.target)


class ManagedAttributesHolder(OwnAttributesHolder):
    """The same for a module in a unit of FullyShardedDataParallel, which puts whole parameters into that dict.

    They are views of its flat parameter. FSDP adds them when it gathers and removes them when it frees the parameter.
    """

    __slots__ = ()

    def now(self) -> dict[str, Any]:
        return {name: value for name, value in super().now().items() if not is_of_flat_parameter(value)}

    def again(self) -> ManagedAttributesHolder:
        return ManagedAttributesHolder(self.target)


def attributes_of_class(cls: type) -> dict[str, Any]:
    """Return the attributes of a class, except those whose names start with two underscores."""
    return {name: value for name, value in vars(cls).items() if name[:2] != "__"}


class ClassesHolder(TablesHolder):
    """The attributes of classes; see ``ClassHolder``."""

    __slots__ = ("classes",)

    def __init__(self, classes: list[type], found: FoundEntries | None = None) -> None:
        self.classes = classes
        super().__init__([*map(vars, classes)], 0, classes, found)

    def recorded(self) -> Iterator[dict[str, Any]]:
        for recorded in super().recorded():
            yield {name: value for name, value in recorded.items() if name[:2] != "__"}

    def _entries(self, position: int) -> dict[str, Any]:
        return attributes_of_class(self.classes[position])

    def _put(self, position: int, wanted: dict[str, Any]) -> None:
        ClassHolder(self.classes[position]).put(wanted)


def changed_tables(holder: TablesHolder) -> list[Holder]:
    """Return a record of each table that differs, with its current contents."""
    if isinstance(holder, ClassesHolder):
        return [ClassHolder(holder.classes[position]) for position in holder.now()]
    kind = OwnAttributesHolder if isinstance(holder, AttributesHolder) else DictHolder
    return [kind(holder.tables[position]) for position in holder.now()]


_HOOKS_AND_FLAGS = (*HOOKS, *HOOK_FLAGS)
_ALL_HOOKS = itemgetter(*HOOKS)

HookTables = tuple[dict[int, Any], ...]  # those of a module, in the order of _HOOKS_AND_FLAGS
_NO_HOOKS: HookTables = tuple({} for _ in _HOOKS_AND_FLAGS)


class HooksHolder(Holder):
    """The hooks of modules, most of which have none, and those of all modules. A key is used only once in a process.

    What hooks collect is not part of the state: they run again, as in torch. Only what a hook has collected that was
    removed before the recomputation is put back after it.

    Hooks of torch come and go by themselves, and are left alone: that of a lazy module removes itself when it has done
    its work.
    """

    __slots__ = ("_held", "owners")

    def __init__(self, owners: list[dict[str, Any]], *, had_none: bool = False) -> None:
        """``had_none``: there were none, as is known; there may be some now."""
        self.owners = owners
        self._held = {} if had_none else self.now()

    @property
    def has_hooks(self) -> bool:
        """Whether there were any."""
        return bool(self._held)

    def without(self, now: dict[int, HookTables]) -> list[Any]:
        """Return the recorded hooks that have been removed since, according to ``now``."""
        return [
            hook
            for position, tables in self._held.items()
            for old, new in zip(tables[: len(HOOKS)], now.get(position, _NO_HOOKS), strict=False)
            for key, hook in old.items()
            if key not in new
        ]

    def now(self) -> dict[int, HookTables]:
        """Return the tables of those that have hooks, by position."""
        native: Any = library()
        has_hooks = None if native is None else native.any_entry(self.owners, HOOKS)
        if has_hooks is None:
            try:
                has_hooks = any(chain.from_iterable(map(_ALL_HOOKS, self.owners)))
            except KeyError:  # a module lacks a table
                has_hooks = any(held.get(name) for held in self.owners for name in HOOKS)
        if not has_hooks:
            return {}
        found = {}
        for position, held in enumerate(self.owners):
            for name in HOOKS:
                if held.get(name):
                    found[position] = tuple({**held[one]} for one in _HOOKS_AND_FLAGS)
                    break
        return found

    def before(self) -> dict[int, HookTables]:
        return self._held

    def differs(self, now: dict[int, HookTables]) -> bool:
        return bool(self._held or now) and any(
            [*map(list, _merged(self._held.get(one, _NO_HOOKS), now.get(one, _NO_HOOKS)))]
            != [*map(list, now.get(one, _NO_HOOKS))]
            for one in {**self._held, **now}
        )

    def put(self, wanted: dict[int, HookTables]) -> None:
        now = self.now()
        for position in {**wanted, **now}:
            present = now.get(position, _NO_HOOKS)
            merged = _merged(wanted.get(position, _NO_HOOKS), present)
            if [*map(list, merged)] != [*map(list, present)]:
                held = self.owners[position]
                for name, table in zip(_HOOKS_AND_FLAGS, merged, strict=True):
                    held[name].clear()
                    held[name].update(table)

    def again(self) -> HooksHolder:
        return HooksHolder(self.owners)


def _merged(wanted: HookTables, now: HookTables) -> HookTables:
    """Return ``wanted``, except for hooks of torch, of which those of ``now`` stay."""
    if [*map(list, wanted)] == [*map(list, now)]:
        return now
    count = len(HOOKS)
    hooks = [
        {key: hook for key, hook in old.items() if key in new or not is_of_torch(hook)}
        | {key: hook for key, hook in new.items() if is_of_torch(hook)}
        for old, new in zip(wanted[:count], now[:count], strict=True)
    ]
    keys = {key for table in hooks for key in table}
    flags = [
        {key: flag for key, flag in {**old, **new}.items() if key in keys}
        for old, new in zip(wanted[count:], now[count:], strict=True)
    ]
    return (*hooks, *flags)


class SequenceHolder(Holder):
    """A list or a deque."""

    __slots__ = ("_held", "target")

    def __init__(self, target: Any, held: list[Any] | None = None) -> None:
        """``held``: see ``DictHolder``."""
        self.target = target
        self._held = [stand_in(value) for value in target] if held is None else held

    def now(self) -> list[Any]:
        return [*self.target]

    def before(self) -> list[Any]:
        now = [*self.target]
        now += [None] * (len(self._held) - len(now))
        return [restored_value(value, other) for value, other in zip(self._held, now, strict=False)]

    def differs(self, now: list[Any]) -> bool:
        held = self._held
        return len(now) != len(held) or not all(map(_is_same, held, now))

    def put(self, wanted: list[Any]) -> None:
        target = self.target
        if isinstance(target, list):
            list.__setitem__(target, slice(None), wanted)
        else:
            deque.clear(target)
            deque.extend(target, wanted)

    def again(self) -> SequenceHolder:
        return SequenceHolder(self.target)


class SetHolder(Holder):
    """A set."""

    __slots__ = ("_held", "target")

    def __init__(self, target: set[Any], held: frozenset[Any] | None = None) -> None:
        """``held``: see ``DictHolder``."""
        self.target = target
        self._held = frozenset(target) if held is None else held

    def now(self) -> frozenset[Any]:
        return frozenset(self.target)

    def before(self) -> frozenset[Any]:
        return self._held

    def differs(self, now: frozenset[Any]) -> bool:
        return {*map(id, now)} != {*map(id, self._held)}  # 1 is not True

    def put(self, wanted: frozenset[Any]) -> None:
        set.clear(self.target)
        set.update(self.target, wanted)

    def again(self) -> SetHolder:
        return SetHolder(self.target)


class BytesHolder(Holder):
    """A short array of numbers: a bytearray, an ``array``, or a NumPy array."""

    __slots__ = ("_held", "target")

    def __init__(self, target: Any) -> None:
        self.target = target
        self._held = self.now()

    def now(self) -> bytes:
        return memoryview(self.target).tobytes()

    def before(self) -> bytes:
        return self._held

    def differs(self, now: bytes) -> bool:
        return now != self._held

    def put(self, wanted: bytes) -> None:
        target = self.target
        if wanted == self.now():
            return
        if isinstance(target, bytearray):
            target[:] = wanted
        elif isinstance(target, array):
            target[:] = array(target.typecode, wanted)
        else:
            target[...] = type(target)(target.shape, target.dtype, wanted)

    def again(self) -> BytesHolder:
        return BytesHolder(self.target)


class CellHolder(Holder):
    """A cell of a closure."""

    __slots__ = ("cell", "held")

    def __init__(self, cell: types.CellType, *held: Any) -> None:
        """``held``: see ``DictHolder``."""
        self.cell = cell
        (self.held,) = held or (stand_in(self.now()),)

    def now(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not bound
            return MISSING

    def before(self) -> Any:
        return restored_value(self.held, self.now())

    def differs(self, now: Any) -> bool:
        return not _is_same(self.held, now)

    def put(self, wanted: Any) -> None:
        if wanted is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = wanted

    def again(self) -> CellHolder:
        return CellHolder(self.cell)


class _NamesHolder(Holder):
    """Values under names, some of which may be unset."""

    __slots__ = ("_held", "target")

    def __init__(self, target: Any) -> None:
        self.target = target
        self._held = _with_leaves(self.now())

    def now(self) -> dict[str, Any]:
        raise NotImplementedError

    def _set(self, name: str, value: Any) -> None:
        raise NotImplementedError

    def _delete(self, name: str) -> None:
        raise NotImplementedError

    def before(self) -> dict[str, Any]:
        now = self.now()
        return {name: restored_value(value, now.get(name)) for name, value in self._held.items()}

    def differs(self, now: dict[str, Any]) -> bool:
        held = self._held
        if len(now) == len(held) and all(map(is_, now, held)) and all(map(is_, now.values(), held.values())):
            return False  # the usual case
        return now.keys() != held.keys() or any(not _is_same(value, now[name]) for name, value in held.items())

    def put(self, wanted: dict[str, Any]) -> None:
        now = self.now()
        if len(now) == len(wanted) and all(map(is_, now, wanted)) and all(map(is_, now.values(), wanted.values())):
            return
        for name in now.keys() - wanted.keys():
            self._delete(name)
        for name, value in wanted.items():
            if now.get(name, MISSING) is not value:
                self._set(name, value)


class SlotsHolder(_NamesHolder):
    """The attributes of an object in ``__slots__``."""

    __slots__ = ("_slots",)

    def __init__(self, target: Any, slots: dict[str, Any]) -> None:
        self._slots = slots
        super().__init__(target)

    def now(self) -> dict[str, Any]:
        found = {}
        for name, slot in self._slots.items():
            try:
                found[name] = slot.__get__(self.target)
            except AttributeError:
                continue
        return found

    def _set(self, name: str, value: Any) -> None:
        self._slots[name].__set__(self.target, value)

    def _delete(self, name: str) -> None:
        self._slots[name].__delete__(self.target)

    def again(self) -> SlotsHolder:
        return SlotsHolder(self.target, self._slots)


class LocalHolder(_NamesHolder):
    """The attributes of a ``threading.local``, of the thread that asks: the backward's may be another."""

    __slots__ = ()

    def now(self) -> dict[str, Any]:
        return dict(self.target.__dict__)

    def _set(self, name: str, value: Any) -> None:
        self.target.__dict__[name] = value

    def _delete(self, name: str) -> None:
        del self.target.__dict__[name]

    def again(self) -> LocalHolder:
        return LocalHolder(self.target)


class ClassHolder(_NamesHolder):
    """The attributes of a class, except those whose names start with two underscores."""

    __slots__ = ()

    def now(self) -> dict[str, Any]:
        return attributes_of_class(self.target)

    def _set(self, name: str, value: Any) -> None:
        type.__setattr__(self.target, name, value)

    def _delete(self, name: str) -> None:
        type.__delattr__(self.target, name)

    def again(self) -> ClassHolder:
        return ClassHolder(self.target)


class EntriesHolder(_NamesHolder):
    """Some entries of a dictionary, such as the globals of a file.

    ``owner``: a weak reference to the Python module that it belongs to, or to a function of the file.
    """

    __slots__ = ("names", "owner")

    def __init__(
        self,
        target: dict[str, Any],
        names: tuple[str, ...],
        owner: weakref.ref[Any] | None = None,
        held: dict[str, Any] | None = None,
    ) -> None:
        """``held``: see ``DictHolder``."""
        self.names = names
        self.owner = owner
        if held is None:
            super().__init__(target)
        else:
            self.target, self._held = target, held

    def now(self) -> dict[str, Any]:
        target = self.target
        return {name: target[name] for name in self.names if name in target}

    def _set(self, name: str, value: Any) -> None:
        self.target[name] = value

    def _delete(self, name: str) -> None:
        del self.target[name]

    def again(self) -> EntriesHolder:
        return EntriesHolder(self.target, self.names)
