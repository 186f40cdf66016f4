"""Python state that a region's forward can reach: attributes, containers, closures, globals, classes and iterators."""

from __future__ import annotations

import argparse
import contextvars
import enum
import sys
import threading
import types
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, compress, islice
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from sac.native.load import library
from sac.region.fingerprint import PLAIN, by_class, slots_of, without_installed
from sac.region.globals_in_code import (
    Globals,
    NamesInCode,
    functions_in,
    globals_of_class,
    globals_of_code,
    is_library,
    is_users,
)
from sac.region.holders import (
    ITERATORS,
    STANDARD,
    BytesHolder,
    CellHolder,
    ClassesHolder,
    ClassHolder,
    DictHolder,
    EntriesHolder,
    HooksHolder,
    LocalHolder,
    ManagedAttributesHolder,
    OwnAttributesHolder,
    SequenceHolder,
    SetHolder,
    SlotsHolder,
    changed_tables,
    entries_of,
    is_of_flat_parameter,
)
from sac.region.rng import is_random_source
from sac.region.tables import STANDARD_COUNT, AttributesHolder, Holder, ModuleTables, TablesHolder
from sac.region.undo import UndoStack
from sac.tensors import has_graph
from sac.torch_private import HOOKS_OF_ALL_MODULES

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
FUNCTIONS = (types.FunctionType, types.MethodType, partial)
_OF_FSDP = "_is_fsdp_managed_module"  # attribute of modules in a unit of FullyShardedDataParallel
_WITHOUT_STATE = PLAIN | {type, types.ModuleType, property}  # common types, checked first
IGNORED = (type, types.ModuleType, types.BuiltinFunctionType, nn.Module, weakref.ref, property, enum.Enum)
_OF_CLASSES = (property, classmethod, staticmethod)
# Classes of the standard library whose attributes belong to the user; the state of all others must not be exchanged.
_PLAIN_HOLDERS = (types.SimpleNamespace, argparse.Namespace, ChainMap, UserDict, UserList)


class ReachableState:
    """The state that a region's Python could reach when its forward began; see Note [Python state].

    ``tensors``: reached tensors that are neither parameters nor registered buffers, by id; ``parameters``: reached
    parameters. ``generators``: reached random generators of torch; ``others``: those of Python and NumPy. ``found``:
    the tables of all ``modules``, if they have been recorded just now for the fingerprint.
    """

    __slots__ = (
        "_holders",
        "_left",
        "_left_modules",
        "_modules",
        "_own",
        "_reached",
        "_seen",
        "_waiting",
        "generators",
        "others",
        "parameters",
        "tensors",
    )

    def __init__(self, modules: Sequence[nn.Module], *roots: Any, found: ModuleTables | None = None) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.parameters: dict[int, torch.Tensor] = {}
        self.generators: list[torch.Generator] = []
        self.others: list[Any] = []
        self._holders: list[Holder] = []
        self._reached: Any = None  # in place of the holders; see Note [Surveys]
        is_of_modules = all(root is None for root in roots)
        if found is not None and found.reached is not None:
            if is_of_modules:
                self._reached = found.reached
                for one in found.reached.tensors:
                    self._reach(one)
                return
            found = None
        self._seen: set[int] = set()
        self._waiting: deque[Any] = deque()  # the modules' own attributes come first, if there is too much
        self._left = _MOST
        self._left_modules = _MOST_MODULES
        self._modules = modules
        self._own: set[int] | None = None
        self._note_modules(modules, found, hooks=[HOOKS_OF_ALL_MODULES])
        for root in roots:
            self._note_root(root)
        while self._waiting:
            with suppress(Exception):  # an object that raises when it is examined is left alone
                self._look_into(self._waiting.popleft())
        self._seen, self._modules, self._own = set(), (), None
        if found is not None and found.survey is not None and is_of_modules:
            found.survey(modules, self, self._holders)

    def _recorded(self) -> list[Holder]:
        """Return the records of all objects."""
        if self._reached is not None:
            self._holders, self._reached = self._reached.holders(), None
        return self._holders

    def enter_on(self, stack: UndoStack) -> None:
        """Restore the recorded state; restore the current state when ``stack`` is left."""
        if (reached := self._reached) is not None and reached.holds():
            stack.callback(_put_reached, reached)
            return
        found: list[tuple[Holder, Any]] = []
        stack.callback(_put_all, found)
        for holder in self._recorded():
            now = holder.now()
            if type(holder) is HooksHolder and holder.has_hooks and (gone := holder.without(now)):
                ReachableState((), *gone).enter_on(stack)  # what they have collected stays as it is
            found.append((holder, now))  # even if nothing differs yet: the recomputation may change it
            if holder.differs(now):
                holder.put(holder.before())

    def has_changed(self) -> bool:
        """Return whether an object holds something else than it did."""
        if self._reached is not None and self._reached.holds():
            return False
        return any(holder.differs(holder.now()) for holder in self._recorded())

    def keep_changes(self) -> None:
        """Keep only the holders whose contents have changed, with their current contents."""
        if self._reached is not None and self._reached.holds():
            self.drop()
            return
        holders, self._holders = self._recorded(), []
        for holder in holders:
            if isinstance(holder, TablesHolder):
                self._holders += changed_tables(holder)
            elif holder.differs(holder.now()):
                self._holders.append(holder.again())
        self.tensors, self.parameters, self.generators, self.others = {}, {}, [], []

    def put_back(self) -> None:
        """Restore the recorded state permanently."""
        for holder in self._recorded():
            holder.put(holder.before())

    def drop(self) -> None:
        """Release everything."""
        self._holders, self._reached = [], None
        self.tensors, self.parameters, self.generators, self.others = {}, {}, [], []

    # Recording

    def _note_root(self, root: Any) -> None:
        """Record what a function, another callable, or a random generator, can reach."""
        self._reach(root)
        if is_random_source(root):
            return
        while type(root) is partial:
            root = root.func
        if type(root) is types.MethodType:
            self._reach_values([type(root.__self__)])
            root = root.__func__
        elif not isinstance(root, (types.FunctionType, nn.Module, type(None))) and is_open(type(root)):
            self._reach_values([type(root)])
            root = next((vars(base)["__call__"] for base in type(root).__mro__ if "__call__" in vars(base)), None)
        if type(root) is types.FunctionType:
            self._note_globals(globals_of_code(root).found)

    def _note_modules(
        self,
        modules: Sequence[nn.Module],
        found: ModuleTables | None = None,
        *,
        hooks: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Record the attributes, submodules, hooks and classes of ``modules``, and the hooks in ``hooks``."""
        helds = [*map(vars, modules)]
        kinds = (
            found.classes if found is not None and found.classes is not None else [*dict.fromkeys(map(type, modules))]
        )
        classes = dict(zip(kinds, map(module_class, kinds), strict=True))
        if found is None or found.attributes is None or not all(map(_IS_OPEN, classes.values())):
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
            attributes, is_usual = found.attributes, True
        if is_usual and not any(map(_has_stand_in, attributes.objects)) and _OF_FSDP not in attributes.names:
            self._add(attributes)
            for value in attributes.objects:
                self._reach(value)
        else:
            for held in reversed(attributes.tables):
                self._note_module(held)
        if found is None or found.submodules is None:
            self._note_submodules(helds)
        elif found.submodules.tables:
            self._add(found.submodules)
        self._add(HooksHolder([*hooks, *helds]))
        seen = self._seen
        bases = {
            base: None
            for cls, known in classes.items()
            if known.users
            for base in compress(cls.__mro__, known.users)
            if id(base) not in seen
        }
        if bases:
            self._note_classes([*bases])
        for cls, known in classes.items():
            if known.users and (reached := known.globals.of(cls)):
                self._note_globals(reached)
            if known.slots:
                for module in modules:
                    if type(module) is cls:
                        self._note_slots(module, known.slots)

    def _note_module(self, held: dict[str, Any]) -> None:
        """Record the attributes of a module that cannot be compared together with those of others."""
        is_usual = next(iter(held)) == "training"  # or something was set before nn.Module.__init__ ran
        own = [*islice(held.items(), STANDARD_COUNT if is_usual else 0, None)]
        if not is_usual:
            self._add(DictHolder(held, STANDARD))
        elif held.get(_OF_FSDP):
            own = [(name, value) for name, value in own if not is_of_flat_parameter(value)]
            self._add(ManagedAttributesHolder(held))
        else:
            self._add(OwnAttributesHolder(held))
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
                    self._add(DictHolder(children))
        if tables:
            self._add(TablesHolder(tables, 0))

    def _note_classes(self, classes: list[type], *, with_methods: bool = True) -> None:
        """Record the attributes of classes. ``with_methods``: also what their methods hold."""
        self._seen.update(map(id, classes))
        native: Any = library()
        found = None if native is None else native.entries_of_classes(classes, with_methods, PLAIN)
        values, entries = found if found is not None else (_values_in_classes(classes, with_methods), None)
        if any(map(_has_stand_in, values)):
            for cls in classes:
                self._add(ClassHolder(cls))
        else:
            self._add(ClassesHolder(classes, entries))
        self._reach_values(values)

    def _note_globals(self, found: tuple[Globals, ...]) -> None:
        for reference, names in found:
            if (owner := reference()) is not None:
                held = vars(owner) if isinstance(owner, types.ModuleType) else owner.__globals__
                holder = EntriesHolder(held, names, reference)
                self._add(holder)
                self._reach_values([held[name] for name in names if name in held])

    def _reach_values(self, values: Iterable[Any]) -> None:
        """Reach the values of a class or of a file."""
        for value in values:
            cls = type(value)
            if cls is types.FunctionType:
                if may_hold(value):
                    self._reach(value)
            elif cls in PLAIN:
                pass
            elif issubclass(cls, type):
                if id(value) not in self._seen and not issubclass(value, enum.Enum):
                    named = [base for base in user_bases(value) if id(base) not in self._seen]
                    if named:
                        self._note_classes(named, with_methods=False)
            elif cls in _OF_CLASSES:
                self._reach_values(functions_in(value))
            elif not issubclass(cls, _OF_CLASSES):
                self._reach(value)

    def _add(self, holder: Holder) -> None:
        self._holders.append(holder)

    def _reach(self, value: Any) -> None:
        """Record ``value`` if it is a tensor or a generator; queue it if it may hold other objects."""
        cls = type(value)  # not `isinstance`, which asks a proxy for its class, and a lazy one then for its object
        if cls in _WITHOUT_STATE or (cls is types.FunctionType and not may_hold(value)):
            return
        if issubclass(cls, torch.Tensor):
            (self.parameters if isinstance(value, nn.Parameter) else self.tensors)[id(value)] = value
        elif cls is types.BuiltinFunctionType:
            self._reach(value.__self__)  # `values.append`
        elif id(value) in self._seen:
            pass
        elif issubclass(cls, nn.Module):
            self._reach_module(value)
        elif issubclass(cls, IGNORED):
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
            self._add(EntriesHolder(one.__dict__, ("training",)))
            self._reach_all(one._parameters.values())
            if type(one._buffers) is dict:
                self._add(DictHolder(one._buffers))
                self._reach_all(one._buffers.values())

    def _look_into(self, value: Any) -> None:
        cls = type(value)
        if cls is contextvars.ContextVar:
            self._reach(value.get(None))
            return
        if isinstance(value, threading.local):
            self._add(LocalHolder(value))
            self._reach_all(value.__dict__.values())
            return
        if isinstance(value, dict):
            if len(value) <= _LONGEST:
                self._add(DictHolder(value))
                entries = entries_of(value)
                self._reach_all(entries)
                self._reach_all(entries.values())
        elif isinstance(value, (list, deque)):
            if len(value) <= _LONGEST:
                self._add(SequenceHolder(value))
                self._reach_all(value)
        elif isinstance(value, set):
            if len(value) <= _LONGEST:
                self._add(SetHolder(value))
                self._reach_all(value)
        elif isinstance(value, (tuple, frozenset)):
            if len(value) <= _LONGEST:
                self._reach_all(value)
        elif cls is types.MappingProxyType:
            if len(value) <= _LONGEST:
                self._reach_all(value.values())
        elif isinstance(value, FUNCTIONS):
            self._look_into_function(value)
            return
        elif is_random_source(value):
            self.others.append(value)
            return
        elif isinstance(value, (bytearray, array)) or _is_numpy_array(value):
            if memoryview(value).nbytes <= _LONGEST:
                self._add(BytesHolder(value))
            return
        if is_open(cls):
            self._note_attributes(value)

    def _look_into_function(self, value: Any) -> None:
        if type(value) is partial:
            self._reach_all((value.func, *value.args, *value.keywords.values()))
        elif type(value) is types.MethodType:
            self._reach(value.__func__)
            self._reach(value.__self__)
        elif not is_library(value.__module__):
            for cell in value.__closure__ or ():
                holder = CellHolder(cell)
                self._add(holder)
                self._reach(holder.held)
            self._reach_all((*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
            if has_attributes(value):
                self._add(DictHolder(value.__dict__))
                self._reach_all(value.__dict__.values())

    def _note_attributes(self, value: Any) -> None:
        held = _dict_of(value)
        if type(held) is dict:  # also an empty one: a class may have the first value of an attribute
            self._add(DictHolder(held))
            self._reach_all(held.values())
        if slots := slots_of(type(value)):
            self._note_slots(value, slots)

    def _note_slots(self, value: Any, slots: dict[str, Any]) -> None:
        holder = SlotsHolder(value, slots)
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


def _put_reached(reached: Any) -> None:
    """Put back what a recomputation has found as it was in the forward."""
    if not reached.holds():
        _put_all([(holder, holder.before()) for holder in reached.holders()])


def _raise(error: BaseException) -> None:
    raise error


def may_hold(function: types.FunctionType) -> bool:
    """Return whether a function may hold anything other than plain values and its class (which `super()` needs)."""
    code = function.__code__
    if function.__closure__ is not None and code.co_freevars != ("__class__",):
        return True
    if function.__defaults__ is not None or function.__kwdefaults__ is not None:
        held = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(type(one) not in PLAIN for one in held):
            return True
    return bool(function.__dict__) or function.__name__ in code.co_names


def _values_in_classes(classes: list[type], with_methods: bool) -> list[Any]:
    """Return the attributes of classes that may hold state. ``with_methods``: also methods."""
    found = []
    for name, value in chain.from_iterable(vars(cls).items() for cls in classes):
        kind = type(value)
        if kind in PLAIN or (kind is types.FunctionType and not (with_methods and may_hold(value))):
            continue
        if name[:2] != "__":
            found.append(value)
    return found


def has_attributes(function: types.FunctionType) -> bool:
    """Return whether a function has attributes, or may set some on itself."""
    code = function.__code__
    return bool(function.__dict__) or function.__name__ in code.co_names or function.__name__ in code.co_freevars


def _is_numpy_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and type(value) is getattr(numpy, "ndarray", None) and not value.dtype.hasobject


def user_bases(cls: type) -> Iterable[type]:
    """Return a class and its bases, as far as they are from user code."""
    flags = _flags_of_bases(cls)
    return compress(cls.__mro__, flags) if flags else ()


def _has_stand_in(value: Any) -> bool:
    cls = type(value)
    return cls in ITERATORS or (issubclass(cls, torch.Tensor) and has_graph(value))


def holds_state(value: Any) -> bool:
    """Return whether an object may hold user state: a container, or an instance of an open class."""
    return isinstance(value, (list, dict, set, deque)) or (
        not isinstance(value, (*IGNORED, *FUNCTIONS)) and is_open(type(value))
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


is_open = by_class(_is_open_class)


class _GlobalsOfClass:
    """What ``globals_of_class`` has found, until what it has followed is exchanged; holds nothing alive."""

    __slots__ = ("_found", "_search")

    def __init__(self) -> None:
        self._search: NamesInCode | None = None
        self._found: tuple[Globals, ...] = ()  # the C++ library compares it: another one if it was looked for again

    def of(self, cls: Any) -> tuple[Globals, ...]:
        if self._search is None or not self._search.holds():
            self._search = globals_of_class(cls)
            self._found = self._search.found
        return self._found


def _users_among_bases(cls: Any) -> tuple[bool, ...]:
    flags = tuple(map(is_users, cls.__mro__))
    return flags if True in flags else ()


_flags_of_bases = by_class(_users_among_bases)


class _ModuleClass:
    """What is the same for all modules of a class; does not hold the class."""

    __slots__ = ("globals", "is_open", "slots", "users")

    def __init__(self, cls: Any) -> None:
        self.is_open = is_open(cls)
        self.users = _flags_of_bases(cls)  # which of the class and its bases are from user code; () if none is
        self.slots = slots_of(cls)
        self.globals = _GlobalsOfClass()


module_class = by_class(_ModuleClass)
_IS_OPEN = attrgetter("is_open")
