"""Python state that a region's forward can reach: attributes, containers, closures, globals, classes and iterators."""

from __future__ import annotations

import builtins
import dis
import enum
import itertools
import sys
import types
import warnings
import weakref
from array import array
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from itertools import islice
from operator import is_
from typing import Any

import torch
from torch import nn

from sac.region.fingerprint import PLAIN, by_class
from sac.region.rng import is_random_source
from sac.tensors import detached, has_graph

# -- State beside the modules themselves: globals that the code of their classes names, and attributes of the
#    classes

# Note [Globals and classes]
#
# `CALLS[0] += 1` and `Block.calls += 1` in a forward are state as much as `self.calls += 1` is, and are put back with
# it (Note [Python state]). Which globals there are is read once from the code of a class: the names that its methods
# look up, and those of the functions of the same file that they call. Names of modules and of classes are left out.
# Functions of other files are not followed, nor are the classes of torch.

_LOOKS_UP = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
MISSING = object()
_CONSTANT = (types.ModuleType, type)
_OURS_AND_TORCH = frozenset({"torch", "sac"})

Globals = tuple["weakref.ref[types.FunctionType]", tuple[str, ...]]  # a function of a file, which knows its globals


def globals_of_class(kind: Any) -> tuple[Globals, ...]:
    """Return the names of globals that methods of a class of the user's look up, by file."""
    values = [value for base in kind.__mro__ if is_users(base) for value in vars(base).values()]
    return _globals_of([function for function in map(_function, values) if function is not None])


def globals_of_code(function: types.FunctionType) -> tuple[Globals, ...]:
    """Return the names of globals that a function looks up, by file; not of one of torch's or ours."""
    return () if is_library(function.__module__) else _globals_of([function])


def attributes_of_class(kind: type) -> dict[str, Any]:
    """Return what a class holds under names of the user's."""
    return {name: value for name, value in vars(kind).items() if name[:2] != "__"}


def is_users(kind: type) -> bool:
    """Return whether a class is neither torch's, nor ours, nor one of Python's own."""
    return not is_library(kind.__module__) and kind.__module__.partition(".")[0] not in sys.stdlib_module_names


def _globals_of(waiting: list[types.FunctionType]) -> tuple[Globals, ...]:
    names: dict[int, dict[str, None]] = {}  # by the file's globals
    one_of: dict[int, types.FunctionType] = {}
    seen: set[types.CodeType] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        held = function.__globals__
        file = id(held)
        one_of.setdefault(file, function)
        for name in _looked_up(function.__code__):
            value = held.get(name, MISSING)
            if isinstance(value, types.FunctionType) and value.__globals__ is held:
                waiting.append(value)
            if not isinstance(value, _CONSTANT) and not (value is MISSING and hasattr(builtins, name)):
                names.setdefault(file, {})[name] = None
    return tuple((weakref.ref(one_of[file]), tuple(found)) for file, found in names.items())


@lru_cache(maxsize=1024)
def _looked_up(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals that code, or code inside it, looks up."""
    inner = (name for one in code.co_consts if isinstance(one, types.CodeType) for name in _looked_up(one))
    own = (step.argval for step in dis.get_instructions(code) if step.opname in _LOOKS_UP)
    return tuple(dict.fromkeys((*own, *inner)))


def _function(value: Any) -> types.FunctionType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if type(value) is types.FunctionType else None


def is_library(module: Any) -> bool:
    """Return whether a name of a module is one of torch's or ours."""
    return str(module).partition(".")[0] in _OURS_AND_TORCH


# -- Copies of iterators, so that a recomputation can draw from one what the forward drew

# Those of Python's own containers and functions, and those of itertools: they tell what they are made of
# (`__reduce__`), those of itertools up to Python 3.13. Generators cannot be copied, nor what draws from one.
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
    """Return an iterator that will give the same objects as ``value``.

    Raises ``TypeError`` if there can be no copy.
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
    return [*value] if type(value) is list else _part(value)  # a cycle puts what it has seen into its list


# -- Python state that a region's forward can reach: attributes, containers and closures, put back for recomputation

# Note [Python state]
#
# A recomputation that runs Python has to find every object as the forward found it, and must not change any for good:
# a counter advances once, a memory that the forward rebinds is read as it was, an adapter that the training loop
# switches between forward and backward is the one of the forward. So the state that the region can reach is noted when
# the forward begins, put back while Python runs again, and restored to what it is now afterwards.
#
# What is reached: attributes of the region's modules and their tables of sub-modules; their classes, and the globals
# that these name (Note [Globals and classes]); what a function holds (closure, defaults, attributes, bound object,
# arguments of a partial); and from there lists, dicts, sets, deques, short arrays, the attributes of objects, those in
# `__slots__` too, and modules that nobody has registered, but for their parameters: those in a list, say. Not reached:
# what libraries keep in objects of their own (torch, the standard library), generators, modules that the region itself
# is a part of, and more than `_MOST_MODULES` modules and `_MOST` objects.
#
# Noting is shallow and by reference: what an object held, not what that looks like. Tensors are noted by identity too;
# writes to their memory are another matter (Note [Buffers advance once]). A tensor with a graph is not held, since that
# could be a graph of an earlier step: a leaf on the same data stands for it. A copy stands for an iterator.
#
# Example. A block with `self.memory = h.detach()` in its forward: at the start of step 3 `memory` is the tensor of step
# 2. The forward of step 3 reads that and rebinds the name. In backward the recomputation finds the tensor of step 2
# under `memory`, rebinds the name to the h it has made itself, and when it is over `memory` is the tensor of step 3.

_MOST = 1024  # objects and containers that are looked into
_MOST_MODULES = 64  # modules that are not registered with the region
_LONGEST = 4096  # entries of a container that is noted
_STANDARD = frozenset(
    vars(nn.Module())
)  # what nn.Module itself puts into a module's dict: noted elsewhere, or not ours
_STANDARD_COUNT = len(_STANDARD)
_FUNCTIONS = (types.FunctionType, types.MethodType, partial)
_WITHOUT_STATE = PLAIN | {type, types.ModuleType, types.BuiltinFunctionType, property}  # as a rule; asked first
_IGNORED = (type, types.ModuleType, types.BuiltinFunctionType, nn.Module, weakref.ref, property, enum.Enum)
_OF_CLASSES = (property, classmethod, staticmethod)
# Classes of the standard library whose attributes are the user's; all others keep state that is not to be exchanged.
_PLAIN_HOLDERS = (types.SimpleNamespace, UserDict, UserList)


class _Leaf:
    """Stands for a tensor with a graph, which is not held: its data as a leaf of its own."""

    __slots__ = ("_data", "_original")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._original = weakref.ref(tensor)
        self._data = detached(tensor)

    def is_for(self, value: Any) -> bool:
        return self._original() is value

    def made(self) -> torch.Tensor:
        leaf = detached(self._data)
        return leaf.requires_grad_() if leaf.is_floating_point() or leaf.is_complex() else leaf


class _Iterator:
    """Stands for an iterator, from which the forward may draw."""

    __slots__ = ("_copy",)

    def __init__(self, value: Any) -> None:
        self._copy = copy_of_iterator(value)

    def is_for(self, _: Any) -> bool:
        """Return whether a value is the iterator as it was: nobody can tell."""
        return False

    def made(self) -> Any:
        return copy_of_iterator(self._copy)


_STAND_INS = (_Leaf, _Iterator)


class ReachableState:
    """What a region's Python could reach when its forward began; see Note [Python state].

    ``tensors``: those reached that are neither parameters nor buffers, by id. ``generators``: torch's random generators
    reached; ``others``: those of Python and NumPy.
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

    def __init__(self, modules: Sequence[nn.Module], *roots: Any) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.generators: list[torch.Generator] = []
        self.others: list[Any] = []
        self._holders: list[_Holder] = []
        self._seen: set[int] = set()
        self._waiting: list[Any] = []
        self._left = _MOST
        self._left_modules = _MOST_MODULES
        self._modules = modules
        self._own: set[int] | None = None
        kinds: dict[type, None] = {}
        for module in modules:
            self._note_module(module)
            kinds[type(module)] = None
        for kind in kinds:
            self._note_class(kind)
        for root in roots:
            self._reach(root)
            if type(root) is types.FunctionType:
                self._note_globals(globals_of_code(root))
        while self._waiting:
            with suppress(Exception):  # objects that raise when they are looked at hold nothing that we know of
                self._look_into(self._waiting.pop())
        self._seen, self._modules, self._own = set(), (), None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to put back."""
        return not self._holders

    def enter_on(self, stack: ExitStack) -> None:
        """Put everything back as it was, and as it is now when ``stack`` is left."""
        for holder in self._holders:
            now = holder.now()
            stack.callback(holder.put, now)  # whether it differs now or not: the recomputation may change it
            if holder.differs(now):
                holder.put(holder.before())

    def keep_changes(self) -> None:
        """Hold from now on what has changed since this was made, as it is now."""
        self._holders = [holder.again() for holder in self._holders if holder.differs(holder.now())]
        self.tensors, self.generators, self.others = {}, [], []

    def put_back(self) -> None:
        """Let all that is held be as it was noted, for good."""
        for holder in self._holders:
            holder.put(holder.before())

    def drop(self) -> None:
        """Hold nothing any more."""
        self._holders, self.tensors, self.generators, self.others = [], {}, [], []

    # Noting

    def _note_module(self, module: nn.Module) -> None:
        held = module.__dict__
        children = held.get("_modules")
        if children:
            self._add(_DictHolder(children))
        if len(held) <= _STANDARD_COUNT or not _is_open(type(module)):
            return
        # The standard entries come first, except where something was set before nn.Module.__init__ ran.
        if next(iter(held)) != "training":
            self._add(_DictHolder(held, _STANDARD))
            own = [*held.items()]
        else:
            own = [*islice(held.items(), _STANDARD_COUNT, None)]
            if held.get("_is_fsdp_managed_module"):
                own = [(name, value) for name, value in own if not _is_of_flat_parameter(value)]
                self._add(_ManagedAttributesHolder(held, own))
            else:
                self._add(_OwnAttributesHolder(held, own))
        for name, value in own:
            if type(value) not in PLAIN:
                if name == "forward" and is_library(type(getattr(value, "__self__", None)).__module__):
                    value = getattr(value.__self__, "before", None)  # what sac has put there is not the user's state
                self._reach(value)

    def _note_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if _is_users(base) and id(base) not in self._seen:
                self._seen.add(id(base))
                self._note_names(_ClassHolder(base))
        self._note_globals(_globals_by_class(kind))

    def _note_globals(self, found: tuple[Globals, ...]) -> None:
        for reference, names in found:
            if (function := reference()) is not None:
                self._note_names(_EntriesHolder(function.__globals__, names))

    def _note_names(self, holder: _NamesHolder) -> None:
        self._add(holder)
        for value in holder.now().values():
            if type(value) not in PLAIN and not isinstance(value, _OF_CLASSES):
                self._reach(value)

    def _add(self, holder: _Holder) -> None:
        self._holders.append(holder)

    def _reach(self, value: Any) -> None:
        """Note ``value`` if it is a tensor or a generator, and put it on the list if it holds something."""
        kind = type(value)
        if kind in _WITHOUT_STATE or (kind is types.FunctionType and not _may_hold(value)):
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                self.tensors[id(value)] = value
        elif id(value) in self._seen:
            pass
        elif isinstance(value, nn.Module):
            self._reach_module(value)
        elif isinstance(value, _IGNORED):
            pass
        elif isinstance(value, torch.Generator):
            self._seen.add(id(value))
            self.generators.append(value)
        elif self._left > 0:
            self._left -= 1
            self._seen.add(id(value))
            self._waiting.append(value)

    def _reach_module(self, module: nn.Module) -> None:
        """Note a module that stands in none of the region's tables of modules, with those below it."""
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
        for one in below:
            self._seen.add(id(one))
            self._note_module(one)
            self._note_class(type(one))
            self._add(_EntriesHolder(one.__dict__, ("training",)))
            if type(one._buffers) is dict:
                self._add(_DictHolder(one._buffers))
                self._reach_all(one._buffers.values())

    def _look_into(self, value: Any) -> None:
        kind = type(value)
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
        if _is_open(kind):
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
        if type(held) is dict and held:
            self._add(_DictHolder(held))
            self._reach_all(held.values())
        slots = slots_of(type(value))
        if slots:
            holder = _SlotsHolder(value, slots)
            self._add(holder)
            self._reach_all(holder.now().values())

    def _reach_all(self, values: Iterable[Any]) -> None:
        for value in tuple(values):
            self._reach(value)


class _Holder:
    """Something that holds other things: what it held, and how to put that back."""

    __slots__ = ()

    def now(self) -> Any:
        """Return what is held now, not to be changed by what happens next."""
        raise NotImplementedError

    def before(self) -> Any:
        """Return what was held when the forward began."""
        raise NotImplementedError

    def differs(self, now: Any) -> bool:
        """Return whether that is something else than ``now``."""
        raise NotImplementedError

    def put(self, wanted: Any) -> None:
        """Let just ``wanted`` be held."""
        raise NotImplementedError

    def again(self) -> _Holder:
        """Return a note of what the same place holds now."""
        raise NotImplementedError


class _DictHolder(_Holder):
    """A dictionary, but for the entries ``apart``."""

    __slots__ = ("_apart", "_held", "_target")

    def __init__(self, target: dict[Any, Any], apart: frozenset[str] = frozenset()) -> None:
        self._target = target
        self._apart = apart
        self._held = _with_leaves(_entries(target))

    def now(self) -> dict[Any, Any]:
        return _entries(self._target)

    def before(self) -> dict[Any, Any]:
        now = self.now()
        return {key: _made(value, now.get(key)) for key, value in self._held.items()}

    def differs(self, now: dict[Any, Any]) -> bool:
        held, apart = self._held, self._apart
        if len(now) == len(held) and all(map(is_, now, held)) and all(map(is_, now.values(), held.values())):
            return False  # as a rule; the rest is for leaves, and for names that are equal and not one object
        if [*now] != [*held]:
            return True
        return any(not _is_same(value, now[key]) and key not in apart for key, value in held.items())

    def put(self, wanted: dict[Any, Any]) -> None:
        target, apart = self._target, self._apart
        now = _entries(target)
        if len(now) == len(wanted) and all(map(is_, now, wanted)) and all(map(is_, now.values(), wanted.values())):
            return
        if [*now] == [*wanted]:  # as a rule the names are the same, and keep their order
            changed = {key: value for key, value in wanted.items() if now[key] is not value and key not in apart}
            for key, value in changed.items():
                dict.__setitem__(target, key, value)
            return
        kind = OrderedDict if isinstance(target, OrderedDict) else dict  # not the methods of the user's own class
        kept = {key: value for key, value in now.items() if key in apart}
        kind.clear(target)
        for key, value in wanted.items():
            kind.__setitem__(target, key, kept.pop(key) if key in kept else value)
        for key, value in kept.items():
            kind.__setitem__(target, key, value)

    def again(self) -> _DictHolder:
        return _DictHolder(self._target, self._apart)


class _OwnAttributesHolder(_DictHolder):
    """The entries of a module's dict after the standard ones."""

    __slots__ = ()

    def __init__(self, target: dict[str, Any], own: list[tuple[str, Any]]) -> None:
        self._target = target
        self._apart = _STANDARD
        self._held = _with_leaves(dict(own))

    def now(self) -> dict[str, Any]:
        return dict(islice(self._target.items(), _STANDARD_COUNT, None))

    def put(self, wanted: dict[str, Any]) -> None:
        target = self._target
        now = self.now()
        if len(now) == len(wanted) and all(map(is_, now.values(), wanted.values())) and [*now] == [*wanted]:
            return
        for name in now.keys() - wanted.keys():
            del target[name]
        target.update(wanted)

    def again(self) -> _OwnAttributesHolder:
        return _OwnAttributesHolder(self._target, [*self.now().items()])


class _ManagedAttributesHolder(_OwnAttributesHolder):
    """The same of a module in a unit of FullyShardedDataParallel, which keeps parameters there while it has them whole.

    Those are views of its flat parameter. It makes them, and takes them away, whenever it gathers or lets go.
    """

    __slots__ = ()

    def now(self) -> dict[str, Any]:
        return {name: value for name, value in super().now().items() if not _is_of_flat_parameter(value)}

    def again(self) -> _ManagedAttributesHolder:
        return _ManagedAttributesHolder(self._target, [*self.now().items()])


class _SequenceHolder(_Holder):
    """A list or a deque."""

    __slots__ = ("_held", "_target")

    def __init__(self, target: Any) -> None:
        self._target = target
        self._held = [_noted(value) for value in target]

    def now(self) -> list[Any]:
        return [*self._target]

    def before(self) -> list[Any]:
        now = [*self._target]
        now += [None] * (len(self._held) - len(now))
        return [_made(value, other) for value, other in zip(self._held, now, strict=False)]

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


class _SetHolder(_Holder):
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


class _BytesHolder(_Holder):
    """A short array of numbers: of Python's, or of NumPy's."""

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


class _CellHolder(_Holder):
    """A cell of a closure."""

    __slots__ = ("_cell", "held")

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell
        self.held = _noted(self.now())

    def now(self) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # not bound
            return MISSING

    def before(self) -> Any:
        return _made(self.held, self.now())

    def differs(self, now: Any) -> bool:
        return not _is_same(self.held, now)

    def put(self, wanted: Any) -> None:
        if wanted is MISSING:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = wanted

    def again(self) -> _CellHolder:
        return _CellHolder(self._cell)


class _NamesHolder(_Holder):
    """What is held under names, of which some may be unset."""

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
        return {name: _made(value, now.get(name)) for name, value in self._held.items()}

    def differs(self, now: dict[str, Any]) -> bool:
        held = self._held
        return now.keys() != held.keys() or any(not _is_same(value, now[name]) for name, value in held.items())

    def put(self, wanted: dict[str, Any]) -> None:
        now = self.now()
        for name in now.keys() - wanted.keys():
            self._delete(name)
        for name, value in wanted.items():
            if now.get(name, MISSING) is not value:
                self._set(name, value)


class _SlotsHolder(_NamesHolder):
    """The attributes of an object that lie in ``__slots__``."""

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


class _ClassHolder(_NamesHolder):
    """The attributes of a class."""

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
    """Some of the entries of a dictionary: of the globals of a file, for one."""

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
    """Return whether something may be held by a function that is neither plain nor its class (as `super()` needs)."""
    if function.__closure__ is not None and function.__code__.co_freevars != ("__class__",):
        return True
    held = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return any(type(one) not in PLAIN for one in held) or _has_attributes(function)


def _has_attributes(function: types.FunctionType) -> bool:
    return bool(function.__dict__) or function.__name__ in function.__code__.co_names


def _is_numpy_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and type(value) is getattr(numpy, "ndarray", None) and not value.dtype.hasobject


def _entries(target: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a dictionary, without the methods of the user's own class."""
    if type(target) is dict:
        return dict(target)
    if not isinstance(target, dict):  # the modules of a scripted one
        return dict(target.items())
    return dict((OrderedDict if isinstance(target, OrderedDict) else dict).items(target))


def _with_leaves(held: dict[Any, Any]) -> dict[Any, Any]:
    for key, value in held.items():
        if type(value) not in PLAIN and (noted := _noted(value)) is not value:
            held[key] = noted
    return held


def _noted(value: Any) -> Any:
    """Return what is held of ``value``: itself, or what stands for it."""
    if type(value) in ITERATORS:
        try:
            return _Iterator(value)
        except (TypeError, RuntimeError):  # what was iterated over has changed
            return value
    return _Leaf(value) if isinstance(value, torch.Tensor) and has_graph(value) else value


def _is_of_flat_parameter(value: Any) -> bool:
    return type(value) is torch.Tensor and value._is_view() and getattr(value._base, "_is_flat_param", False)


def _is_same(held: Any, now: Any) -> bool:
    return held.is_for(now) if type(held) in _STAND_INS else held is now


def _made(held: Any, now: Any) -> Any:
    """Return what is to be put back for ``held``."""
    if type(held) not in _STAND_INS:
        return held
    return now if held.is_for(now) else held.made()


def holds_state(value: Any) -> bool:
    """Return whether an object may hold state of the user's: a container, or of a class that is open."""
    return isinstance(value, (list, dict, set, deque)) or (
        not isinstance(value, (*_IGNORED, *_FUNCTIONS)) and _is_open(type(value))
    )


def _dict_of(value: Any) -> Any:
    try:
        return getattr(value, "__dict__", None)
    except Exception:  # of a class that raises whatever it is asked
        return None


def attributes_in(value: Any) -> dict[str, Any]:
    """Return what an object holds under names: in its dict and in ``__slots__``."""
    held = _dict_of(value)
    found = dict(held) if type(held) is dict else {}
    for name, slot in slots_of(type(value)).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    return found


def _slots_of(kind: Any) -> dict[str, Any]:
    """Return the descriptors of the attributes that objects of a class keep in ``__slots__``, by name."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        for name, descriptor in vars(base).items():
            if isinstance(descriptor, types.MemberDescriptorType) and name not in ("__dict__", "__weakref__"):
                found.setdefault(name, descriptor)
    return found


def _is_open_class(kind: Any) -> bool:
    """Return whether objects of a class hold the user's state: not those of torch, of sac and the standard library.

    Layers of ``torch.nn`` do: anybody may put attributes on them.
    """
    if issubclass(kind, nn.Module):
        return not is_library(kind.__module__) or kind.__module__.startswith("torch.nn.modules.")
    return issubclass(kind, _PLAIN_HOLDERS) or is_users(kind)


slots_of = by_class(_slots_of)
_is_open = by_class(_is_open_class)
_globals_by_class = by_class(globals_of_class)
_is_users = by_class(is_users)
