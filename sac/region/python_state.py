"""Python state that a region's forward can reach: attributes, containers, closures, globals, classes and iterators."""

from __future__ import annotations

import contextvars
import enum
import itertools
import sys
import threading
import types
import warnings
import weakref
from array import array
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress, islice
from operator import is_
from typing import Any

import torch
from torch import nn

from sac.native.load import library
from sac.region.fingerprint import PLAIN, by_class, slots_of, without_installed
from sac.region.globals_in_code import MISSING, Globals, globals_of_class, globals_of_code, is_library, is_users
from sac.region.rng import is_random_source
from sac.region.tables import STANDARD_COUNT, AttributesHolder, Holder, TablesHolder
from sac.region.undo import UndoStack
from sac.tensors import detached, has_graph
from sac.torch_private import HOOK_FLAGS, HOOKS, HOOKS_OF_ALL_MODULES

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


# -- Python state that a region's forward can reach

# Note [Python state]
#
# A recomputation that runs Python has to find every object as the forward found it, and must not change any object
# permanently: a counter advances once, a memory that the forward rebinds has its earlier value, and an adapter that the
# training loop switches between forward and backward is the adapter of the forward. So the state that the region can
# reach is recorded when the forward begins and restored while Python runs again. Afterwards the state from before the
# recomputation comes back.
#
# Reached are: attributes of the region's modules, their tables of submodules and of hooks (also of the hooks of all
# modules); their classes and what these name (Note [Globals and classes]); the contents of functions (closure,
# defaults, attributes, bound object, arguments of a partial); and from there lists, dicts, sets, deques, short arrays,
# attributes of objects (also in `__slots__`, and those of a `threading.local` in the thread that asks), and
# unregistered modules, such as modules in a list, except their parameters. Context variables are restored too
# (`ContextVariables` in ambient.py). Not reached are: internal objects of libraries (torch, the standard library),
# generators, modules that contain the region itself, and anything beyond `_MOST_MODULES` modules and `_MOST` objects.
#
# The record is shallow and by reference: which objects a container held, not their contents. Tensors are recorded by
# identity too; Note [Buffers advance once] covers writes to their memory. A tensor with a graph is not held, since the
# graph could belong to an earlier step: a leaf on the same data is recorded instead. For an iterator, a copy is
# recorded.
#
# Example. A block runs `self.memory = h.detach()` in its forward. At the start of step 3, `memory` is the tensor of
# step 2. The forward of step 3 reads it and rebinds the name. In backward, the recomputation finds the tensor of step 2
# under `memory` and rebinds the name to its own `h`. When it is over, `memory` is the tensor of step 3 again.

_MOST = 1024  # objects and containers that are examined
_MOST_MODULES = 64  # modules that are not registered with the region
_LONGEST = 4096  # entries of a container that is recorded
_STANDARD = frozenset(
    vars(nn.Module())
)  # the entries that nn.Module itself puts into a module's dict: recorded elsewhere, or not state of the user
_FUNCTIONS = (types.FunctionType, types.MethodType, partial)
_OF_FSDP = "_is_fsdp_managed_module"  # attribute of modules in a unit of FullyShardedDataParallel
_WITHOUT_STATE = PLAIN | {type, types.ModuleType, property}  # common types, checked first
_IGNORED = (type, types.ModuleType, types.BuiltinFunctionType, nn.Module, weakref.ref, property, enum.Enum)
_OF_CLASSES = (property, classmethod, staticmethod)
# Classes of the standard library whose attributes belong to the user; the state of all others must not be exchanged.
_PLAIN_HOLDERS = (types.SimpleNamespace, UserDict, UserList)


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


class ReachableState:
    """The state that a region's Python could reach when its forward began; see Note [Python state].

    ``tensors``: reached tensors that are neither parameters nor registered buffers, by id. ``generators``: reached
    random generators of torch; ``others``: those of Python and NumPy. ``attributes``: a record, made just now for the
    fingerprint, of the attributes of all ``modules``, with the last one first; None if there is none.
    """

    __slots__ = (
        "_holders",
        "_left",
        "_left_modules",
        "_modules",
        "_own",
        "_seen",
        "_waiting",
        "generators",
        "others",
        "tensors",
    )

    def __init__(self, modules: Sequence[nn.Module], *roots: Any, attributes: AttributesHolder | None = None) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.generators: list[torch.Generator] = []
        self.others: list[Any] = []
        self._holders: list[Holder] = []
        self._seen: set[int] = set()
        self._waiting: deque[Any] = deque()  # the modules' own attributes come first, if there is too much
        self._left = _MOST
        self._left_modules = _MOST_MODULES
        self._modules = modules
        self._own: set[int] | None = None
        self._note_modules(modules, attributes, hooks=[HOOKS_OF_ALL_MODULES])
        for root in roots:
            self._note_root(root)
        while self._waiting:
            with suppress(Exception):  # an object that raises when it is examined is left alone
                self._look_into(self._waiting.popleft())
        self._seen, self._modules, self._own = set(), (), None

    def enter_on(self, stack: UndoStack) -> None:
        """Restore the recorded state; restore the current state when ``stack`` is left."""
        found: list[tuple[Holder, Any]] = []
        stack.callback(_put_all, found)
        for holder in self._holders:
            now = holder.now()
            if type(holder) is _HooksHolder and holder.has_hooks and (gone := holder.without(now)):
                ReachableState((), *gone).enter_on(stack)  # what they have collected stays as it is
            found.append((holder, now))  # even if nothing differs yet: the recomputation may change it
            if holder.differs(now):
                holder.put(holder.before())

    def has_changed(self) -> bool:
        """Return whether an object holds something else than it did."""
        return any(holder.differs(holder.now()) for holder in self._holders)

    def keep_changes(self) -> None:
        """Keep only the holders whose contents have changed, with their current contents."""
        holders, self._holders = self._holders, []
        for holder in holders:
            if isinstance(holder, TablesHolder):
                self._holders += _changed(holder)
            elif holder.differs(holder.now()):
                self._holders.append(holder.again())
        self.tensors, self.generators, self.others = {}, [], []

    def put_back(self) -> None:
        """Restore the recorded state permanently."""
        for holder in self._holders:
            holder.put(holder.before())

    def drop(self) -> None:
        """Release everything."""
        self._holders, self.tensors, self.generators, self.others = [], {}, [], []

    # Recording

    def _note_root(self, root: Any) -> None:
        """Record what a function, or another callable, can reach."""
        self._reach(root)
        while type(root) is partial:
            root = root.func
        if type(root) is types.MethodType:
            self._reach_values([type(root.__self__)])
            root = root.__func__
        elif not isinstance(root, (types.FunctionType, nn.Module, type(None))) and _is_open(type(root)):
            self._reach_values([type(root)])
            root = next((vars(base)["__call__"] for base in type(root).__mro__ if "__call__" in vars(base)), None)
        if type(root) is types.FunctionType:
            self._note_globals(globals_of_code(root))

    def _note_modules(
        self,
        modules: Sequence[nn.Module],
        attributes: AttributesHolder | None = None,
        *,
        hooks: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Record the attributes, submodules, hooks and classes of ``modules``, and the hooks in ``hooks``."""
        helds = [module.__dict__ for module in modules]
        classes = {cls: _module_class(cls) for cls in dict.fromkeys(map(type, modules))}
        if attributes is None or not all(known.is_open for known in classes.values()):
            tables = [
                held
                for module, held in zip(reversed(modules), reversed(helds), strict=True)
                if classes[type(module)].is_open
            ]
            attributes = AttributesHolder(tables)
            named = zip(reversed(attributes.names), reversed(attributes.values), strict=True)
            attributes.objects = [without_installed(name, one) for name, one in named if type(one) not in PLAIN]
            is_usual = attributes.are_usual()
        else:
            is_usual = True
        if is_usual and not any(map(_has_stand_in, attributes.objects)) and _OF_FSDP not in attributes.names:
            self._add(attributes)
            for value in attributes.objects:
                self._reach(value)
        else:
            for held in reversed(attributes.tables):
                self._note_module(held)
        self._note_submodules(helds)
        self._add(_HooksHolder([*hooks, *helds]))
        seen = self._seen
        bases = {base: None for cls in classes for base in _user_bases(cls) if id(base) not in seen}
        if bases:
            self._note_classes([*bases])
        for cls, known in classes.items():
            if known.is_users and (found := known.globals.of(cls)):
                self._note_globals(found)
            if known.slots:
                for module in modules:
                    if type(module) is cls:
                        self._note_slots(module, known.slots)

    def _note_module(self, held: dict[str, Any]) -> None:
        """Record the attributes of a module that cannot be compared together with those of others."""
        is_usual = next(iter(held)) == "training"  # or something was set before nn.Module.__init__ ran
        own = [*islice(held.items(), STANDARD_COUNT if is_usual else 0, None)]
        if not is_usual:
            self._add(_DictHolder(held, _STANDARD))
        elif held.get(_OF_FSDP):
            own = [(name, value) for name, value in own if not _is_of_flat_parameter(value)]
            self._add(_ManagedAttributesHolder(held))
        else:
            self._add(_OwnAttributesHolder(held))
        for name, value in own:
            if type(value) not in PLAIN:
                self._reach(without_installed(name, value))

    def _note_submodules(self, helds: list[dict[str, Any]]) -> None:
        tables = []
        for held in helds:
            if children := held.get("_modules"):
                if type(children) is dict:
                    tables.append(children)
                else:
                    self._add(_DictHolder(children))
        if tables:
            self._add(TablesHolder(tables, 0))

    def _note_classes(self, classes: list[type], *, with_methods: bool = True) -> None:
        """Record the attributes of classes. ``with_methods``: also what their methods hold."""
        together = []
        native: Any = library()
        for cls in classes:
            self._seen.add(id(cls))
            values = None if native is None else native.values_in_class(cls, with_methods, PLAIN)
            if values is None:
                values = _values_in_class(cls, with_methods)
            if values and any(map(_has_stand_in, values)):
                self._add(_ClassHolder(cls))
            else:
                together.append(cls)
            if values:
                self._reach_values(values)
        if together:
            self._add(_ClassesHolder(together))

    def _note_globals(self, found: tuple[Globals, ...]) -> None:
        for reference, names in found:
            if (owner := reference()) is not None:
                held = vars(owner) if isinstance(owner, types.ModuleType) else owner.__globals__
                holder = _EntriesHolder(held, names)
                self._add(holder)
                self._reach_values([held[name] for name in names if name in held])

    def _reach_values(self, values: Iterable[Any]) -> None:
        """Reach the values of a class or of a file."""
        for value in values:
            cls = type(value)
            if cls is types.FunctionType:
                if _may_hold(value):
                    self._reach(value)
            elif cls in PLAIN:
                pass
            elif issubclass(cls, type):
                if id(value) not in self._seen and not issubclass(value, enum.Enum):
                    named = [base for base in _user_bases(value) if id(base) not in self._seen]
                    if named:
                        self._note_classes(named, with_methods=False)
            elif not issubclass(cls, _OF_CLASSES):
                self._reach(value)

    def _add(self, holder: Holder) -> None:
        self._holders.append(holder)

    def _reach(self, value: Any) -> None:
        """Record ``value`` if it is a tensor or a generator; queue it if it may hold other objects."""
        cls = type(value)  # not `isinstance`, which asks a proxy for its class, and a lazy one then for its object
        if cls in _WITHOUT_STATE or (cls is types.FunctionType and not _may_hold(value)):
            return
        if issubclass(cls, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                self.tensors[id(value)] = value
        elif cls is types.BuiltinFunctionType:
            self._reach(value.__self__)  # `values.append`
        elif id(value) in self._seen:
            pass
        elif issubclass(cls, nn.Module):
            self._reach_module(value)
        elif issubclass(cls, _IGNORED):
            pass
        elif issubclass(cls, torch.Generator):
            self._seen.add(id(value))
            self.generators.append(value)
        elif self._left > 0:
            self._left -= 1
            self._seen.add(id(value))
            self._waiting.append(value)

    def _reach_module(self, module: nn.Module) -> None:
        """Record a module that is not registered in the region, with its submodules."""
        self._seen.add(id(module))
        if self._own is None:
            self._own = {*map(id, self._modules)}
        own = self._own
        if id(module) in own:
            return
        below = [*islice(module.modules(), self._left_modules + 1)]
        if len(below) > self._left_modules or any(id(one) in own for one in below):
            return
        self._left_modules -= len(below)
        self._seen.update(map(id, below))
        self._note_modules(below)
        for one in below:
            self._add(_EntriesHolder(one.__dict__, ("training",)))
            if type(one._buffers) is dict:
                self._add(_DictHolder(one._buffers))
                self._reach_all(one._buffers.values())

    def _look_into(self, value: Any) -> None:
        cls = type(value)
        if cls is contextvars.ContextVar:
            self._reach(value.get(None))
            return
        if isinstance(value, threading.local):
            self._add(_LocalHolder(value))
            self._reach_all(value.__dict__.values())
            return
        if isinstance(value, dict):
            if len(value) <= _LONGEST:
                self._add(_DictHolder(value))
                self._reach_all(_entries(value).values())
        elif isinstance(value, (list, deque)):
            if len(value) <= _LONGEST:
                self._add(_SequenceHolder(value))
                self._reach_all(value)
        elif isinstance(value, set):
            if len(value) <= _LONGEST:
                self._add(_SetHolder(value))
            return
        elif isinstance(value, (tuple, frozenset)):
            if len(value) <= _LONGEST:
                self._reach_all(value)
        elif isinstance(value, _FUNCTIONS):
            self._look_into_function(value)
            return
        elif is_random_source(value):
            self.others.append(value)
            return
        elif isinstance(value, (bytearray, array)) or _is_numpy_array(value):
            if memoryview(value).nbytes <= _LONGEST:
                self._add(_BytesHolder(value))
            return
        if _is_open(cls):
            self._note_attributes(value)

    def _look_into_function(self, value: Any) -> None:
        if type(value) is partial:
            self._reach_all((value.func, *value.args, *value.keywords.values()))
        elif type(value) is types.MethodType:
            self._reach(value.__func__)
            self._reach(value.__self__)
        elif not is_library(value.__module__):
            for cell in value.__closure__ or ():
                holder = _CellHolder(cell)
                self._add(holder)
                self._reach(holder.held)
            self._reach_all((*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
            if _has_attributes(value):
                self._add(_DictHolder(value.__dict__))
                self._reach_all(value.__dict__.values())

    def _note_attributes(self, value: Any) -> None:
        held = _dict_of(value)
        if type(held) is dict:  # also an empty one: a class may have the first value of an attribute
            self._add(_DictHolder(held))
            self._reach_all(held.values())
        if slots := slots_of(type(value)):
            self._note_slots(value, slots)

    def _note_slots(self, value: Any, slots: dict[str, Any]) -> None:
        holder = _SlotsHolder(value, slots)
        self._add(holder)
        self._reach_all(holder.now().values())

    def _reach_all(self, values: Iterable[Any]) -> None:
        for value in tuple(values):
            self._reach(value)


def _put_all(found: list[tuple[Holder, Any]]) -> None:
    """Replace the contents of holders; an error in one does not keep the others from it."""
    with UndoStack() as stack:
        for holder, contents in reversed(found):  # one object may have several: the first has what was there
            try:
                holder.put(contents)
            except BaseException as error:
                stack.callback(_raise, error)


def _raise(error: BaseException) -> None:
    raise error


class _DictHolder(Holder):
    """A dictionary, except for its entries in ``apart``."""

    __slots__ = ("_apart", "_held", "_target")

    def __init__(self, target: dict[Any, Any], apart: frozenset[str] = frozenset()) -> None:
        self._target = target
        self._apart = apart
        self._held = _with_leaves(_entries(target))

    def now(self) -> dict[Any, Any]:
        return _entries(self._target)

    def before(self) -> dict[Any, Any]:
        now = self.now()
        return {key: restored_value(value, now.get(key)) for key, value in self._held.items()}

    def differs(self, now: dict[Any, Any]) -> bool:
        held, apart = self._held, self._apart
        if len(now) == len(held) and all(map(is_, now, held)) and all(map(is_, now.values(), held.values())):
            return False  # the usual case; the rest handles leaves, and names that are equal but not identical
        if [*now] != [*held]:
            return True
        return any(not _is_same(value, now[key]) and key not in apart for key, value in held.items())

    def put(self, wanted: dict[Any, Any]) -> None:
        target, apart = self._target, self._apart
        now = _entries(target)
        if len(now) == len(wanted) and all(map(is_, now, wanted)) and all(map(is_, now.values(), wanted.values())):
            return
        if [*now] == [*wanted]:  # the usual case: the same names in the same order
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

    def again(self) -> _DictHolder:
        return _DictHolder(self._target, self._apart)


class _OwnAttributesHolder(_DictHolder):
    """The entries of a module's dict after the standard ones."""

    __slots__ = ()

    def __init__(self, target: dict[str, Any]) -> None:
        self._target = target
        self._apart = _STANDARD
        self._held = _with_leaves(self.now())

    def now(self) -> dict[str, Any]:
        return dict(islice(self._target.items(), STANDARD_COUNT, None))

    def put(self, wanted: dict[str, Any]) -> None:
        target = self._target
        now = self.now()
        if len(now) == len(wanted) and all(map(is_, now.values(), wanted.values())) and [*now] == [*wanted]:
            return
        for name in now.keys() - wanted.keys():
            del target[name]
        target.update(wanted)

    def again(self) -> _OwnAttributesHolder:
        return _OwnAttributesHolder(self._target)


class _ManagedAttributesHolder(_OwnAttributesHolder):
    """The same for a module in a unit of FullyShardedDataParallel, which puts whole parameters into that dict.

    They are views of its flat parameter. FSDP adds them when it gathers and removes them when it frees the parameter.
    """

    __slots__ = ()

    def now(self) -> dict[str, Any]:
        return {name: value for name, value in super().now().items() if not _is_of_flat_parameter(value)}

    def again(self) -> _ManagedAttributesHolder:
        return _ManagedAttributesHolder(self._target)


def attributes_of_class(cls: type) -> dict[str, Any]:
    """Return the attributes of a class, except those whose names start with two underscores."""
    return {name: value for name, value in vars(cls).items() if name[:2] != "__"}


class _ClassesHolder(TablesHolder):
    """The attributes of classes; see ``_ClassHolder``."""

    __slots__ = ("classes",)

    def __init__(self, classes: list[type]) -> None:
        self.classes = classes
        super().__init__([*map(vars, classes)], 0, classes)

    def recorded(self) -> Iterator[dict[str, Any]]:
        for recorded in super().recorded():
            yield {name: value for name, value in recorded.items() if name[:2] != "__"}

    def _entries(self, position: int) -> dict[str, Any]:
        return attributes_of_class(self.classes[position])

    def _put(self, position: int, wanted: dict[str, Any]) -> None:
        _ClassHolder(self.classes[position]).put(wanted)


def _changed(holder: TablesHolder) -> list[Holder]:
    """Return a record of each table that differs, with its current contents."""
    if isinstance(holder, _ClassesHolder):
        return [_ClassHolder(holder.classes[position]) for position in holder.now()]
    kind = _OwnAttributesHolder if isinstance(holder, AttributesHolder) else _DictHolder
    return [kind(holder.tables[position]) for position in holder.now()]


_HOOKS_AND_FLAGS = (*HOOKS, *HOOK_FLAGS)

HookTables = tuple[dict[int, Any], ...]  # those of a module, in the order of _HOOKS_AND_FLAGS
_NO_HOOKS: HookTables = tuple({} for _ in _HOOKS_AND_FLAGS)


class _HooksHolder(Holder):
    """The hooks of modules, most of which have none, and those of all modules. A key is used only once in a process.

    What hooks collect is not part of the state: they run again, as in torch. Only what a hook has collected that was
    removed before the recomputation is put back after it.

    Hooks of torch come and go by themselves, and are left alone: that of a lazy module removes itself when it has done
    its work.
    """

    __slots__ = ("_held", "_owners")

    def __init__(self, owners: list[dict[str, Any]]) -> None:
        self._owners = owners
        self._held = self.now()

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
        has_hooks = None if native is None else native.any_entry(self._owners, HOOKS)
        if has_hooks is None:
            has_hooks = any(held[name] for held in self._owners for name in HOOKS if name in held)
        if not has_hooks:
            return {}
        found = {}
        for position, held in enumerate(self._owners):
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
                held = self._owners[position]
                for name, table in zip(_HOOKS_AND_FLAGS, merged, strict=True):
                    held[name].clear()
                    held[name].update(table)

    def again(self) -> _HooksHolder:
        return _HooksHolder(self._owners)


def _merged(wanted: HookTables, now: HookTables) -> HookTables:
    """Return ``wanted``, except for hooks of torch, of which those of ``now`` stay."""
    if [*map(list, wanted)] == [*map(list, now)]:
        return now
    count = len(HOOKS)
    hooks = [
        {key: hook for key, hook in old.items() if key in new or not _is_of_torch(hook)}
        | {key: hook for key, hook in new.items() if _is_of_torch(hook)}
        for old, new in zip(wanted[:count], now[:count], strict=True)
    ]
    keys = {key for table in hooks for key in table}
    flags = [
        {key: flag for key, flag in {**old, **new}.items() if key in keys}
        for old, new in zip(wanted[count:], now[count:], strict=True)
    ]
    return (*hooks, *flags)


def _is_of_torch(hook: Any) -> bool:
    return is_library(getattr(getattr(hook, "func", hook), "__module__", None))


class _SequenceHolder(Holder):
    """A list or a deque."""

    __slots__ = ("_held", "_target")

    def __init__(self, target: Any) -> None:
        self._target = target
        self._held = [stand_in(value) for value in target]

    def now(self) -> list[Any]:
        return [*self._target]

    def before(self) -> list[Any]:
        now = [*self._target]
        now += [None] * (len(self._held) - len(now))
        return [restored_value(value, other) for value, other in zip(self._held, now, strict=False)]

    def differs(self, now: list[Any]) -> bool:
        held = self._held
        return len(now) != len(held) or not all(map(_is_same, held, now))

    def put(self, wanted: list[Any]) -> None:
        target = self._target
        if isinstance(target, list):
            list.__setitem__(target, slice(None), wanted)
        else:
            deque.clear(target)
            deque.extend(target, wanted)

    def again(self) -> _SequenceHolder:
        return _SequenceHolder(self._target)


class _SetHolder(Holder):
    __slots__ = ("_held", "_target")

    def __init__(self, target: set[Any]) -> None:
        self._target = target
        self._held = frozenset(target)

    def now(self) -> frozenset[Any]:
        return frozenset(self._target)

    def before(self) -> frozenset[Any]:
        return self._held

    def differs(self, now: frozenset[Any]) -> bool:
        return now != self._held

    def put(self, wanted: frozenset[Any]) -> None:
        set.clear(self._target)
        set.update(self._target, wanted)

    def again(self) -> _SetHolder:
        return _SetHolder(self._target)


class _BytesHolder(Holder):
    """A short array of numbers: a bytearray, an ``array``, or a NumPy array."""

    __slots__ = ("_held", "_target")

    def __init__(self, target: Any) -> None:
        self._target = target
        self._held = self.now()

    def now(self) -> bytes:
        return memoryview(self._target).tobytes()

    def before(self) -> bytes:
        return self._held

    def differs(self, now: bytes) -> bool:
        return now != self._held

    def put(self, wanted: bytes) -> None:
        target = self._target
        if wanted == self.now():
            return
        if isinstance(target, bytearray):
            target[:] = wanted
        elif isinstance(target, array):
            target[:] = array(target.typecode, wanted)
        else:
            target[...] = type(target)(target.shape, target.dtype, wanted)

    def again(self) -> _BytesHolder:
        return _BytesHolder(self._target)


class _CellHolder(Holder):
    """A cell of a closure."""

    __slots__ = ("_cell", "held")

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell
        self.held = stand_in(self.now())

    def now(self) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # not bound
            return MISSING

    def before(self) -> Any:
        return restored_value(self.held, self.now())

    def differs(self, now: Any) -> bool:
        return not _is_same(self.held, now)

    def put(self, wanted: Any) -> None:
        if wanted is MISSING:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = wanted

    def again(self) -> _CellHolder:
        return _CellHolder(self._cell)


class _NamesHolder(Holder):
    """Values under names, some of which may be unset."""

    __slots__ = ("_held", "_target")

    def __init__(self, target: Any) -> None:
        self._target = target
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


class _SlotsHolder(_NamesHolder):
    """The attributes of an object in ``__slots__``."""

    __slots__ = ("_slots",)

    def __init__(self, target: Any, slots: dict[str, Any]) -> None:
        self._slots = slots
        super().__init__(target)

    def now(self) -> dict[str, Any]:
        found = {}
        for name, slot in self._slots.items():
            try:
                found[name] = slot.__get__(self._target)
            except AttributeError:
                continue
        return found

    def _set(self, name: str, value: Any) -> None:
        self._slots[name].__set__(self._target, value)

    def _delete(self, name: str) -> None:
        self._slots[name].__delete__(self._target)

    def again(self) -> _SlotsHolder:
        return _SlotsHolder(self._target, self._slots)


class _LocalHolder(_NamesHolder):
    """The attributes of a ``threading.local``, of the thread that asks: the backward's may be another."""

    __slots__ = ()

    def now(self) -> dict[str, Any]:
        return dict(self._target.__dict__)

    def _set(self, name: str, value: Any) -> None:
        self._target.__dict__[name] = value

    def _delete(self, name: str) -> None:
        del self._target.__dict__[name]

    def again(self) -> _LocalHolder:
        return _LocalHolder(self._target)


class _ClassHolder(_NamesHolder):
    """The attributes of a class, except those whose names start with two underscores."""

    __slots__ = ()

    def now(self) -> dict[str, Any]:
        return attributes_of_class(self._target)

    def _set(self, name: str, value: Any) -> None:
        type.__setattr__(self._target, name, value)

    def _delete(self, name: str) -> None:
        type.__delattr__(self._target, name)

    def again(self) -> _ClassHolder:
        return _ClassHolder(self._target)


class _EntriesHolder(_NamesHolder):
    """Some entries of a dictionary, such as the globals of a file."""

    __slots__ = ("_names",)

    def __init__(self, target: dict[str, Any], names: tuple[str, ...]) -> None:
        self._names = names
        super().__init__(target)

    def now(self) -> dict[str, Any]:
        target = self._target
        return {name: target[name] for name in self._names if name in target}

    def _set(self, name: str, value: Any) -> None:
        self._target[name] = value

    def _delete(self, name: str) -> None:
        del self._target[name]

    def again(self) -> _EntriesHolder:
        return _EntriesHolder(self._target, self._names)


def _may_hold(function: types.FunctionType) -> bool:
    """Return whether a function may hold anything other than plain values and its class (which `super()` needs)."""
    code = function.__code__
    if function.__closure__ is not None and code.co_freevars != ("__class__",):
        return True
    if function.__defaults__ is not None or function.__kwdefaults__ is not None:
        held = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(type(one) not in PLAIN for one in held):
            return True
    return bool(function.__dict__) or function.__name__ in code.co_names


def _values_in_class(cls: type, with_methods: bool) -> list[Any]:
    """Return the attributes of a class that may hold state. ``with_methods``: also methods."""
    found = []
    for name, value in vars(cls).items():
        kind = type(value)
        if kind in PLAIN or (kind is types.FunctionType and not (with_methods and _may_hold(value))):
            continue
        if name[:2] != "__":
            found.append(value)
    return found


def _has_attributes(function: types.FunctionType) -> bool:
    return bool(function.__dict__) or function.__name__ in function.__code__.co_names


def _is_numpy_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and type(value) is getattr(numpy, "ndarray", None) and not value.dtype.hasobject


def _entries(target: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a dictionary, without calling methods of a user's subclass."""
    if type(target) is dict:
        return dict(target)
    if not isinstance(target, dict):  # the modules of a scripted module
        return dict(target.items())
    return dict((OrderedDict if isinstance(target, OrderedDict) else dict).items(target))


def _with_leaves(held: dict[Any, Any]) -> dict[Any, Any]:
    for key, value in held.items():
        if type(value) not in PLAIN and (noted := stand_in(value)) is not value:
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


def _user_bases(cls: type) -> Iterable[type]:
    """Return a class and its bases, as far as they are from user code."""
    flags = _flags_of_bases(cls)
    return compress(cls.__mro__, flags) if flags else ()


def _has_stand_in(value: Any) -> bool:
    cls = type(value)
    return cls in ITERATORS or (issubclass(cls, torch.Tensor) and has_graph(value))


def _is_of_flat_parameter(value: Any) -> bool:
    return type(value) is torch.Tensor and value._is_view() and getattr(value._base, "_is_flat_param", False)


def _is_same(held: Any, now: Any) -> bool:
    return held.is_for(now) if type(held) in _STAND_INS else held is now


def restored_value(held: Any, now: Any) -> Any:
    """Return the value to restore for ``held``."""
    if type(held) not in _STAND_INS:
        return held
    return now if held.is_for(now) else held.made()


def holds_state(value: Any) -> bool:
    """Return whether an object may hold user state: a container, or an instance of an open class."""
    return isinstance(value, (list, dict, set, deque)) or (
        not isinstance(value, (*_IGNORED, *_FUNCTIONS)) and _is_open(type(value))
    )


def _dict_of(value: Any) -> Any:
    try:
        return getattr(value, "__dict__", None)
    except Exception:  # its class raises for any attribute
        return None


def _is_open_class(cls: Any) -> bool:
    """Return whether objects of a class hold user state: the class is not from torch, sac or the standard library.

    Layers of ``torch.nn`` count as open: users may set attributes on them.
    """
    if issubclass(cls, nn.Module):
        return not is_library(cls.__module__) or cls.__module__.startswith("torch.nn.modules.")
    return issubclass(cls, _PLAIN_HOLDERS) or is_users(cls)


_is_open = by_class(_is_open_class)


class _GlobalsOfClass:
    """What ``globals_of_class`` has returned, and the ``forward`` that the class had; holds neither alive."""

    __slots__ = ("_forward", "_found")

    def __init__(self) -> None:
        self._forward: Any = None
        self._found: tuple[Globals, ...] | None = None

    def of(self, cls: Any) -> tuple[Globals, ...]:
        forward = getattr(cls, "forward", None)
        is_function = type(forward) is types.FunctionType
        found = self._found
        if found is None or (is_function and (self._forward is None or self._forward() is not forward)):
            return self._find(cls, forward if is_function else None)
        for owner, _ in found:
            if owner() is None:
                return self._find(cls, forward if is_function else None)
        return found

    def _find(self, cls: Any, forward: Any) -> tuple[Globals, ...]:
        self._forward = weakref.ref(forward) if forward is not None else None
        self._found = globals_of_class(cls)
        return self._found


def _users_among_bases(cls: Any) -> tuple[bool, ...]:
    flags = tuple(map(is_users, cls.__mro__))
    return flags if True in flags else ()


_flags_of_bases = by_class(_users_among_bases)


class _ModuleClass:
    """What is the same for all modules of a class; does not hold the class."""

    __slots__ = ("globals", "is_open", "is_users", "slots")

    def __init__(self, cls: Any) -> None:
        self.is_open = _is_open(cls)
        self.is_users = bool(_flags_of_bases(cls))  # the class or a base is from user code
        self.slots = slots_of(cls)
        self.globals = _GlobalsOfClass()


_module_class = by_class(_ModuleClass)
