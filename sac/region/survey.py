"""Surveys: what a region's Python could reach in an earlier call. A later call only checks that it is the same."""

from __future__ import annotations

import contextvars
import threading
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from sac.native.load import library
from sac.region.fingerprint import PLAIN, slots_of, without_installed
from sac.region.globals_in_code import MISSING, is_library
from sac.region.holders import (
    ITERATORS,
    CellHolder,
    ClassesHolder,
    DictHolder,
    EntriesHolder,
    HooksHolder,
    SequenceHolder,
    SetHolder,
    entries_of,
    stand_in,
)
from sac.region.python_state import (
    FUNCTIONS,
    IGNORED,
    ReachableState,
    has_attributes,
    is_open,
    may_hold,
    module_class,
    user_bases,
)
from sac.region.rng import is_random_source
from sac.region.tables import (
    STANDARD_COUNT,
    STANDARD_NAMES,
    AttributesHolder,
    Holder,
    ModuleTables,
    TablesHolder,
)
from sac.torch_private import HOOKS, HOOKS_OF_ALL_MODULES

# Note [Surveys]
#
# Each call of a region takes the fingerprint of its modules and records what their Python can reach (Note [Which
# function is it], Note [Python state]). In most calls both are what they were in the call before. So the second call
# makes a survey: for each table that the record consists of (attributes, submodules, classes, named globals, plain
# dicts and lists, attributes of objects) how it is found from the root, which names it has, and what each entry must be
# so that the same tables are reached and the fingerprint is the same. With the C++ library, a later call compares the
# survey with what is there, in one pass. If all of it is as it was, the call has the function key of the call before,
# and its record is what the pass has found. In backward the record is compared in one pass too. It becomes the holders
# of Note [Python state] only if something differs.
#
# An entry must be
#   the same object     classes and properties; functions, with the same code and defaults; plain values of modules, or
#                       else the function key is looked up by the fingerprint, of which they are parts
#   of the same kind    objects that are not examined, such as weak references; tensors, which must not have a graph;
#                       other plain values
#   a way to a table    submodules, lists, dicts, objects, and functions with a closure: of the same class or code, and
#                       the same object wherever a table is reached twice. They may be other objects than before if
#                       their contents are as they were
#
# Between calls a survey holds names, plain values, classes and functions, but no tensor, module or container. What it
# asks for never changes. There is none, and each call does all the work, if a table is of another kind (a set with
# elements, a deque, `__slots__`), or if there are hooks, iterators, generators, modules that are not registered,
# tensors with graphs, or functions of the user among the attributes of a module.
#
# Example. A block has `self.scale = 0.5` and `self.seen = [loss]`. The survey has `scale`, which must be this very
# float, and a list with one tensor without a graph. A step that appends to the list finds a difference: its call does
# all the work again, and makes a new survey. A step that sets `scale` to 0.4 takes the fingerprint again. A step that
# exchanges the tensor in the list finds no difference: the record of that call holds the new tensor.
#
# Note [Versions]
#
# Python 3.10 and 3.11 give a dict another version whenever it is made or an entry is added, removed or exchanged, and
# never use one twice. There is one exception: the quick way of 3.11 to set an attribute frees the old value, which may
# run Python, before the dict gets its new version. An object whose class has a `__setattr__`, as nn.Module has, is not
# set that way, nor is a class: only their dicts are known by their versions. Such a dict, if it has the version of its
# row's last comparison, has the same names and the very same values, and it is this dict. Only what lies behind its
# values may differ and is looked at again: the class of an object, the code of a function, the graph of a tensor,
# whether a table of hooks is empty. A survey remembers such values without holding them. They are read only after the
# version was compared, and before any Python runs: until then the dict holds them. A class has a version too, which
# changes with it and with its bases, so what it gives its objects is looked up again only if it has another one. Later
# Pythons have no such versions, or share them with those who watch a dict: there each entry is compared in each call,
# as here if `survey_versions(False)` was called in a test.
#
# Example. In most steps nothing in `__dict__` of a module changes. Its 20 entries are then one comparison, and five
# looks at tables of hooks.

_USES = 16  # calls that a survey must be of use to, on average; to make one takes as long as three of them save
_MOST_CREDIT = 4 * _USES
_ENTRIES, _NAMES, _ITEMS, _CELLS, _ORDERED = range(5)  # `Form` in survey.h
_ROOT, _DICT_OF, _ASKED, _ITSELF, _CLASS, _OWNER, _GIVEN = range(7)  # `Source` in survey.h
_ANY, _PLAIN, _SAME, _PART, _KIND, _FUNCTION, _TENSOR, _EMPTY, _INSTALLED = range(9)  # `Look` in survey.h
_PARAMETERS, _BUFFERS, _LEADS, _MISSING, _CLOSURE = range(9, 14)
_LOOKED_INTO = (contextvars.ContextVar, threading.local, dict, list, deque, set, tuple, frozenset, bytearray, array)
_STANDARD_LOOKS = {"_parameters": _PARAMETERS, "_buffers": _BUFFERS, **dict.fromkeys(HOOKS, _EMPTY)}

# The class of a holder, its rows in the survey, and its names, if it has some, or the number of its cell.
_Part = tuple[Any, tuple[int, ...], Any]


class _UnusualError(Exception):
    """A survey does not cover what is there."""


class _Known(NamedTuple):
    survey: Any  # of the C++ library
    parts: tuple[_Part, ...]
    root: weakref.ref[nn.Module]
    key: object


class KnownCall(NamedTuple):
    """What a survey says of a call: its function key (None: look it up), its modules and their tables."""

    key: object | None
    owners: tuple[nn.Module, ...]
    tables: ModuleTables


class ReachedAgain:
    """What a call can reach, if that is as in an earlier call."""

    __slots__ = ("_parts", "_reached", "tensors")

    def __init__(self, reached: Any, parts: tuple[_Part, ...], tensors: list[torch.Tensor]) -> None:
        self._reached = reached
        self._parts = parts
        self.tensors = tensors  # in the order in which they are reached

    def holds(self) -> bool:
        """Return whether all is as it was when the call began; if not, ``holders`` may still find no difference."""
        return bool(self._reached.holds())

    def holders(self) -> list[Holder]:
        """Return the record as Python makes it, of when the call began."""
        table = self._reached.table
        return [_holder(kind, [*map(table, rows)], names) for kind, rows, names in self._parts]


class Surveys:
    """The survey of one region, if there is one."""

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._credit = _MOST_CREDIT

    def is_wanted(self, again: KnownCall | None) -> bool:
        """Return whether the next record should make a survey. ``again``: what ``taken`` has returned."""
        is_of_use = again is not None and again.key is not None
        return not is_of_use and self._credit >= _USES and library() is not None

    def taken(self, root: Any) -> KnownCall | None:
        """Return what the survey says of a call; None if the call has to look at everything."""
        known = self._known
        if known is None:
            return None
        found = known.survey.take(root) if known.root() is root else None
        if found is None:
            self._known = None
            return None
        is_same_function, reached, modules, (tables, *parameters), training, buffers, tensors = found
        if is_same_function and self._credit < _MOST_CREDIT:
            self._credit += 1
        again = ReachedAgain(reached, known.parts, tensors)
        held = TablesHolder(tables, 0, found=parameters)
        of_modules = ModuleTables(None, None, None, held, training, buffers, None, again)
        return KnownCall(known.key if is_same_function else None, modules, of_modules)

    def wanted_in(self, tables: ModuleTables, root: nn.Module, key: object) -> ModuleTables:
        """Return ``tables`` with the request that the record of this call makes a survey. ``key``: its function key."""

        def make(modules: Sequence[nn.Module], state: ReachableState, holders: list[Holder]) -> None:
            self._credit -= _USES
            try:
                self._known = _Draft(root, modules, holders).known(key, state)
            except Exception:  # what is unusual, and objects that raise when they are examined
                self._known = None

        return tables._replace(survey=make)


class _Draft:
    """A survey in the making, of a record that has just been made."""

    def __init__(self, root: nn.Module, modules: Sequence[nn.Module], holders: list[Holder]) -> None:
        self.root = root
        self.modules = modules
        self.holders = holders
        self.dicts = {id(one): one.__dict__ for one in modules}  # the tables of objects, by the id of the object
        self.tables: dict[int, Any] = {}  # tables that an entry must lead to, by id
        self.numbers: dict[int, int] = {}  # id of a table -> its row
        self.waiting: list[tuple[int, Any, int, int, Any]] = []  # source, what it is given, place, form, table
        self.cells: dict[int, int] = {}  # id of a cell -> its number in its function
        self.besides: set[int] = set()  # ids of the dicts of functions and dicts
        self.users = {base for one in modules for base in type(one).__mro__}  # whose methods are looked at
        self.guards: dict[int, tuple[Any, ...]] = {}
        self.tensors: dict[int, int] = {}  # id -> place
        self.place = 0  # of the entry that is looked at, among those of all rows
        self.module_tables = {id(one) for one in self.dicts.values()}

    def known(self, key: object, state: ReachableState) -> _Known:
        """Return the survey; raises if it does not cover ``state``."""
        native: Any = library()
        self._add_row(_ROOT, None, self.root.__dict__)
        parts = tuple(map(self._part, self.holders))
        for module in self.modules:
            self._guard_module(type(module))
        rows = tuple(map(self._row, self.waiting))
        reached = {id(one): one for one in (*state.tensors.values(), *state.parameters.values())}
        if state.generators or state.others or reached.keys() != self.tensors.keys():
            raise _UnusualError
        survey = native.Survey(
            type(self.root),
            rows,
            tuple(self.guards.values()),
            tuple(self.numbers[id(one.__dict__)] for one in self.modules),
            tuple(self.tensors[one] for one in reached),
            STANDARD_NAMES,
            PLAIN,
        )
        known = _Known(
            survey,
            tuple(
                (kind, tuple(map(self.numbers.__getitem__, ids)), self.cells[ids[0]] if kind is CellHolder else names)
                for kind, ids, names in parts
            ),
            weakref.ref(self.root),
            key,
        )
        self._check(known)
        return known

    def _check(self, known: _Known) -> None:
        """Raise if the survey does not find what is there."""
        found = known.survey.take(self.root)
        if found is None:
            raise _UnusualError
        is_same_function, reached, modules, *_ = found
        if not (is_same_function and reached.holds() and [*map(id, modules)] == [*map(id, self.modules)]):
            raise _UnusualError
        for number, (source, what, _, form, table) in enumerate(self.waiting):
            wanted = what if source == _CLASS else table.target if form == _NAMES else table
            if reached.table(number)[0] is not wanted:
                raise _UnusualError

    # The tables

    def _part(self, holder: Holder) -> tuple[Any, list[Any], Any]:
        """Return a holder's class, the ids of its tables, and its names; its tables become rows, or are to be found."""
        kind = type(holder)
        if isinstance(holder, ClassesHolder):
            for cls in holder.classes:
                self._add_row(_CLASS, cls, vars(cls), number=id(cls))
            return kind, [*map(id, holder.classes)], None
        if isinstance(holder, HooksHolder) and not holder.has_hooks:
            for one in holder.owners:
                if one is HOOKS_OF_ALL_MODULES:
                    self._add_row(_GIVEN, one, one)
            return kind, [*map(id, holder.owners)], None
        if isinstance(holder, EntriesHolder) and holder.owner is not None:
            number = id(holder)  # one file may have several
            self._add_row(_OWNER, holder.owner, holder, form=_NAMES, number=number)
            return kind, [number], holder.names
        if isinstance(holder, TablesHolder):
            found = holder.tables
        elif kind in (DictHolder, SequenceHolder, SetHolder):
            found = [holder.target]  # type: ignore[attr-defined]
        elif isinstance(holder, CellHolder):
            found = [holder.cell]
        else:
            raise _UnusualError
        self.tables.update((id(one), one) for one in found)
        return kind, [*map(id, found)], None

    def _add_row(
        self, source: int, what: Any, table: Any, place: int = 0, form: int = _ENTRIES, number: int = 0
    ) -> int:
        row = len(self.waiting)
        if self.numbers.setdefault(number or id(table), row) != row:
            raise _UnusualError
        self.waiting.append((source, what, place, form, table))
        return row

    def _row(self, given: tuple[int, Any, int, int, Any]) -> tuple[Any, ...]:
        """Return a row for the library. Tables that its entries lead to are added to those that wait."""
        source, what, place, form, table = given
        first = 0
        look: Callable[[int, Any, Any], tuple[int, Any]] = self._look_at_entry
        if form == _ITEMS:
            names, values = None, [*table]
        elif form == _CELLS:
            values = [CellHolder(one).now() for one in table.__closure__ or ()]
            names = tuple(range(len(values)))
        elif form == _NAMES:
            names, values = table.names, [table.target.get(name, MISSING) for name in table.names]
        else:
            held = entries_of(table) if isinstance(table, dict) else table
            names, values = (*held,), [*held.values()]
            if source == _GIVEN:
                first, look = len(names), _look_at_hooks
            elif id(table) in self.module_tables:
                first, look = STANDARD_COUNT, self._look_at_attribute
            elif not all(type(name) in PLAIN for name in names):
                raise _UnusualError
        begin = self.place
        looks: list[tuple[int, Any]] = []
        for at, (name, value) in enumerate(zip(names or values, values, strict=True)):
            self.place = begin + at
            if source == _CLASS and name[:2] == "__":
                looks.append((_ANY, None))
            elif source == _CLASS and type(value) is types.FunctionType and what not in self.users:
                looks.append((_SAME, value))  # it names the same globals
            else:
                looks.append(look(at, name, value))
        self.place = begin + len(looks)
        return source, what, place, form, first, names, bytes(look for look, _ in looks), tuple(one for _, one in looks)

    # Their entries: what each must be, and the object, class or row that the library compares it with

    def _look(self, value: Any) -> tuple[int, Any]:
        """Look at the entry of a container or an object."""
        cls = type(value)
        if cls in PLAIN:
            return _PLAIN, cls
        if cls is types.FunctionType:
            return self._look_at_function(value)
        elif cls is types.BuiltinFunctionType:
            if value.__self__ is None or isinstance(value.__self__, types.ModuleType):
                return _SAME, value
        elif issubclass(cls, torch.Tensor):
            return self._look_at_tensor(value)
        elif issubclass(cls, nn.Module):
            return _LEADS, (cls, self._led_to(_DICT_OF, self.dicts[id(value)]))  # one of the region
        elif issubclass(cls, type):
            if any(True for _ in user_bases(value)):
                self.guards.setdefault(id(value), (value, None, False, False, None, None))
            return _SAME, value
        elif cls is list or (cls is set and not value):
            return _LEADS, (cls, self._led_to(_ITSELF, value, _ITEMS))
        elif issubclass(cls, dict):
            return self._look_at_dict(value)
        elif issubclass(cls, tuple):
            if _is_plain(value):
                return _SAME, value
            if cls is tuple:  # the record of what it holds is all that there is of it
                self.tables[id(value)] = value
                return _LEADS, (cls, self._led_to(_ITSELF, value, _ITEMS))
        elif issubclass(cls, (property, classmethod, staticmethod)):
            return _SAME, value  # with the same functions
        elif issubclass(cls, IGNORED):
            return _KIND, cls
        elif not isinstance(value, (*_LOOKED_INTO, *FUNCTIONS, torch.Generator)) and cls not in ITERATORS:
            return self._look_at_object(value)
        raise _UnusualError

    def _look_at_function(self, value: types.FunctionType) -> tuple[int, Any]:
        if not may_hold(value) or (is_library(value.__module__) and not value.__dict__):
            return _FUNCTION, value
        is_plain = all(map(_is_plain, value.__defaults__ or ()))
        if is_library(value.__module__) or value.__kwdefaults__ is not None or not is_plain:
            raise _UnusualError
        if (row := self.numbers.get(id(value))) is None:
            row = self._add_row(_ITSELF, None, value, place=self.place, form=_CELLS)
            for number, cell in enumerate(value.__closure__ or ()):
                self.numbers.setdefault(id(cell), row)
                self.cells.setdefault(id(cell), number)
            if has_attributes(value):
                self._add_dict_of(value)
        return _CLOSURE, (value, row, has_attributes(value))

    def _look_at_dict(self, value: dict[Any, Any]) -> tuple[int, Any]:
        cls = type(value)
        is_new = id(value) not in self.numbers
        row = self._led_to(_ITSELF, value, _ORDERED if issubclass(cls, OrderedDict) else _ENTRIES)
        if is_open(cls):
            if slots_of(cls):
                raise _UnusualError
            self.guards.setdefault(id(cls), (cls, None, False, True, None, None))
            if is_new:
                self._add_dict_of(value)
        return _LEADS, (cls, row)

    def _add_dict_of(self, value: Any) -> None:
        """Add the attributes of an object that has a table besides; nothing else may lead to them."""
        if id(value.__dict__) in self.numbers:
            raise _UnusualError
        self._led_to(_source_of(type(value)), value.__dict__)
        self.besides.add(id(value.__dict__))

    def _look_at_tensor(self, value: Any) -> tuple[int, Any]:
        if type(value) not in (torch.Tensor, nn.Parameter) or stand_in(value) is not value:
            raise _UnusualError
        self.tensors.setdefault(id(value), self.place)
        return _TENSOR, type(value)

    def _look_at_object(self, value: Any) -> tuple[int, Any]:
        cls = type(value)
        if is_random_source(value) or slots_of(cls) or cls.__module__.partition(".")[0] == "numpy":
            raise _UnusualError
        if not is_open(cls):
            return _KIND, cls
        held = value.__dict__
        self.guards.setdefault(id(cls), (cls, None, False, True, None, None))
        return _LEADS, (cls, self._led_to(_source_of(cls), held))

    def _look_at_entry(self, at: int, name: Any, value: Any) -> tuple[int, Any]:
        return (_MISSING, None) if value is MISSING else self._look(value)

    def _look_at_attribute(self, at: int, name: str, value: Any) -> tuple[int, Any]:
        """Look at the entry of a module's dict."""
        if at < STANDARD_COUNT and name != "training":
            if name == "_modules" and value:
                return self._look(value)
            return _EMPTY if name == "_modules" else _STANDARD_LOOKS.get(name, _ANY), None
        if type(value) in PLAIN:
            return _PART, value
        if name == "forward" and without_installed(name, value) is None:
            return _INSTALLED, type(value.__self__)
        if type(value) is types.FunctionType and (
            may_hold(value) or value.__kwdefaults__ or not is_library(value.__globals__.get("__name__"))
        ):
            raise _UnusualError  # what it holds, and the globals of its file, are parts of the fingerprint
        return self._look(value)

    def _led_to(self, source: int, table: Any, form: int = _ENTRIES) -> int:
        if id(table) not in self.tables or id(table) in self.besides:
            raise _UnusualError  # the record does not have it, or it is reached in two ways
        found = self.numbers.get(id(table))
        return self._add_row(source, None, table, place=self.place, form=form) if found is None else found

    def _guard_module(self, cls: type) -> None:
        known = module_class(cls)
        forward = getattr(cls, "forward", None)
        if known.slots or type(forward) is not types.FunctionType:
            raise _UnusualError
        globals_of_class = (known.globals, known.globals.of(cls)) if known.users else (None, None)
        self.guards[id(cls)] = (cls, forward, True, True, *globals_of_class)


def _source_of(cls: type) -> int:
    """Return how the dict of an object is found."""
    access = next(vars(base)["__getattribute__"] for base in cls.__mro__ if "__getattribute__" in vars(base))
    return _DICT_OF if isinstance(access, types.WrapperDescriptorType) else _ASKED


def _is_plain(value: Any) -> bool:
    cls = type(value)
    return cls in PLAIN or (issubclass(cls, tuple) and all(map(_is_plain, value)) and not is_open(cls))


def _look_at_hooks(at: int, name: str, value: Any) -> tuple[int, Any]:
    return (_EMPTY if name in HOOKS else _ANY), None


def _holder(kind: Any, tables: list[tuple[Any, list[Any], list[Any]]], names: Any) -> Holder:
    """Return a record of tables, each given with the names and values of its entries."""
    targets = [target for target, _, _ in tables]
    if kind is HooksHolder:
        return HooksHolder(targets, had_none=True)
    if issubclass(kind, TablesHolder):
        first = STANDARD_COUNT if kind is AttributesHolder else 0
        counts = [len(values) for _, _, values in tables]
        order = slice(None, None, -1 if first else 1)
        found = (
            [first + count for count in counts],
            counts,
            [*chain.from_iterable(one[order] for _, one, _ in tables)],
            [*chain.from_iterable(one[order] for _, _, one in tables)],
        )
        return TablesHolder(targets, 0, found=found) if kind is TablesHolder else kind(targets, found)
    ((target, keys, values),) = tables
    if kind is EntriesHolder:
        return EntriesHolder(target, names, held=dict(zip(keys, values, strict=True)))
    if kind is SequenceHolder:
        return SequenceHolder(target, values)
    if kind is SetHolder:
        return SetHolder(target, frozenset())
    if kind is CellHolder:
        return CellHolder(target.__closure__[names], dict(zip(keys, values, strict=True)).get(names, MISSING))
    return DictHolder(target, held=dict(zip(keys, values, strict=True)))
