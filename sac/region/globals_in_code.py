"""Names of globals, and of attributes of Python modules, that the code of functions and classes looks up."""

from __future__ import annotations

import builtins
import dis
import enum
import re
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

# Note [Globals and classes]
#
# `CALLS[0] += 1` and `Block.calls += 1` in a forward change state just as `self.calls += 1` does, and are restored with
# it (Note [Python state]). The globals are read from the code of a class: the names that its methods look up, and the
# names that functions look up, if the methods name these. They are read again when a function, class or module that was
# followed has been exchanged. Of a Python module that the code names or imports, these are the attributes that it names
# too; of a class, its attributes. Torch and the standard library are not followed, and neither
# are other installed packages.
#
# Example. A method runs `scale = Scaling.now() * settings.scale`. `Scaling` is a class of the same package, whose
# attributes are recorded, and the globals that `now` looks up; `settings` is a Python module, of which `scale` is.

_LOOKS_UP = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
_LOOKS_UP_ON = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
_BETWEEN = frozenset({"COPY", "DUP_TOP", "EXTENDED_ARG", "CACHE"})  # may stand between a name and its attribute
_OF_LOCALS = ("LOAD_FAST", "STORE_FAST", "LOAD_DEREF", "STORE_DEREF")  # also two of them in one step
_STORES = frozenset({"STORE_FAST", "STORE_DEREF", "STORE_FAST_STORE_FAST"})
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_HOLD_FUNCTIONS = (property, classmethod, staticmethod, types.MethodType)
MISSING = object()  # stands for a value that is not there
_OURS_AND_TORCH = frozenset({"torch", "sac"})
_RESTORED_ELSEWHERE = frozenset({"transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"})

_Weak = weakref.ref[Any]
Globals = tuple["weakref.ref[Any]", tuple[str, ...]]  # a Python module, or a function (for its globals), and names


def globals_of_class(cls: Any) -> NamesInCode:
    """Return the names of globals that methods of a user's class look up."""
    return NamesInCode((), [base for base in cls.__mro__ if is_users(base)])


def globals_of_code(*functions: types.FunctionType) -> NamesInCode:
    """Return the names of globals that functions look up."""
    return NamesInCode(functions, ())


def is_users(cls: type) -> bool:
    """Return whether a class is from user code: not from torch, sac or the standard library."""
    return not is_library_or_standard(cls.__module__)


class NamesInCode:
    """The names that functions, and those that they call, look up, by file; see Note [Globals and classes].

    Holds nothing alive. ``found`` is right as long as ``holds`` returns True.
    """

    __slots__ = ("_classes", "_functions", "_links", "_names", "_owners", "_seen", "_waiting", "found")

    def __init__(self, functions: Iterable[types.FunctionType], classes: Iterable[type]) -> None:
        # What was followed: functions, with their code and the functions in them; classes, with their functions; names,
        # with the owner of their table and the function, class or module that they stood for, if they did.
        self._functions: list[tuple[_Weak, _Weak, tuple[_Weak, ...] | None]] = []
        self._classes: list[tuple[_Weak, tuple[_Weak, ...]]] = []
        self._links: dict[tuple[int, str], tuple[_Weak | None, str, _Weak | None]] = {}
        self._waiting = [*functions]
        self._names: dict[int, dict[str, None]] = {}  # by the id of the table that holds them
        self._owners: dict[int, Any] = {}  # id of a table -> the Python module whose it is, or a function of the file
        self._seen: dict[int, types.FunctionType] = {}
        for one in classes:
            self._waiting += self._functions_of(one)
        while self._waiting:
            function = self._waiting.pop()
            if self._seen.setdefault(id(function), function) is function and len(self._seen) > len(self._functions):
                self._look_at(function)
        self.found: tuple[Globals, ...] = tuple(
            (weakref.ref(self._owners[table]), tuple(names)) for table, names in self._names.items()
        )
        self._owners, self._seen = {}, {}

    def holds(self) -> bool:
        """Return whether all that was followed is still there, so that the same names would be found."""
        for cls, functions in self._classes:
            held = cls()
            if held is None or not _are(_functions_in_class(held), functions):
                return False
        for reference, code, inside in self._functions:
            function = reference()
            if function is None or function.__code__ is not code():
                return False
            if inside is not None and not _are(_inside(function), inside):
                return False
        for owner, name, target in self._links.values():
            table = sys.modules if owner is None else _table_of(owner())
            now = None if table is None else _followed(table.get(name))
            if table is None or now is not (None if target is None else target()):
                return False
        return True

    def _functions_of(self, cls: type) -> list[types.FunctionType]:
        found = _functions_in_class(cls)
        self._classes.append((weakref.ref(cls), tuple(map(weakref.ref, found))))
        return found

    def _look_at(self, function: types.FunctionType) -> None:
        inside = _inside(function)
        self._waiting += inside
        is_fixed = function.__closure__ is None and "__wrapped__" not in function.__dict__
        references = None if is_fixed else tuple(map(weakref.ref, inside))
        self._functions.append((weakref.ref(function), weakref.ref(function.__code__), references))
        held = function.__globals__
        if is_library_or_standard(held.get("__name__")):
            return
        for name, *attributes in _looked_up(function.__code__):
            owner: Any = function
            table: Any = held
            if type(name) is _Imported:
                owner, table, name = None, sys.modules, name.of(held)
                if not attributes:
                    self._look_up(owner, table, name)
                    continue
            value = self._look_up(owner, table, name)
            while type(value) is types.ModuleType and attributes and _is_followed(vars(value), held):
                owner, table, name = value, vars(value), attributes.pop(0)
                value = self._look_up(owner, table, name)
            if owner is not None and (value is not MISSING or not hasattr(builtins, name)):
                self._note(owner, table, name, value, function)

    def _look_up(self, owner: Any, table: dict[str, Any], name: str) -> Any:
        """Return what a name stands for. ``owner``: see ``_owners``; None for ``sys.modules``."""
        value = table.get(name, MISSING)
        if (id(table), name) not in self._links:
            target = _followed(value)
            references = [None if one is None else weakref.ref(one) for one in (owner, target)]
            self._links[id(table), name] = references[0], name, references[1]
        return value

    def _note(self, owner: Any, table: dict[str, Any], name: str, value: Any, function: types.FunctionType) -> None:
        """Note a name that the code of ``function`` looks up, and follow what it stands for."""
        cls = type(value)
        if issubclass(cls, types.ModuleType):
            return
        if issubclass(cls, type):
            if not is_users(value) or issubclass(value, enum.Enum):
                return
            if not issubclass(value, nn.Module):  # the classes of the region's modules are looked at anyway
                self._waiting += [one for one in self._functions_of(value) if one.__globals__ is function.__globals__]
        elif cls is types.FunctionType and _is_followed(value.__globals__, function.__globals__):
            self._waiting.append(value)
        self._owners.setdefault(id(table), owner)
        self._names.setdefault(id(table), {})[name] = None


def _are(found: Sequence[Any], references: Sequence[_Weak]) -> bool:
    return len(found) == len(references) and all(one is other() for one, other in zip(found, references, strict=True))


def _table_of(owner: Any) -> dict[str, Any] | None:
    """Return the globals that a Python module, or a function of a file, has; None if it is gone."""
    if owner is None:
        return None
    return vars(owner) if isinstance(owner, types.ModuleType) else owner.__globals__


def _followed(value: Any) -> Any:
    """Return a value that code is looked for in, None for any other."""
    is_one = issubclass(type(value), (types.FunctionType, types.ModuleType, type))  # a proxy is not asked for its class
    return value if is_one else None


def _is_followed(module: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether what ``module`` holds is followed from code of ``other``: not if another package is installed."""
    if module is other:
        return True
    package, others = (str(one.get("__name__")).partition(".")[0] for one in (module, other))
    if package == others:
        return True
    file = module.get("__file__")
    return not is_library_or_standard(package) and isinstance(file, str) and not _INSTALLED.search(file)


class _Imported(NamedTuple):
    """A Python module that code imports by this name; ``level``: how many dots are before it."""

    name: str
    level: int

    def of(self, held: dict[str, Any]) -> str:
        """Return the name of the module, imported from a file that has these globals."""
        if not self.level:
            return self.name
        package = held.get("__package__") or str(held.get("__name__")).rpartition(".")[0]
        parent = package.rsplit(".", self.level - 1)[0]
        return f"{parent}.{self.name}" if self.name else parent


@lru_cache(maxsize=1024)
def _looked_up(code: types.CodeType) -> tuple[tuple[Any, ...], ...]:
    """Return the globals that code, or code inside it, looks up, each with the attributes that it looks up on it.

    A Python module that the code imports counts as a global.
    """
    return tuple(_paths_in(code, {}))


def _paths_in(code: types.CodeType, local: dict[str, tuple[Any, ...]]) -> dict[tuple[Any, ...], None]:
    """``local``: names of local variables of the code around this code, and what the code has imported under them."""
    found: dict[tuple[Any, ...], None] = {}
    local = dict(local)
    path: tuple[Any, ...] = ()
    module: tuple[Any, ...] = ()  # from which IMPORT_FROM takes names
    wanted: tuple[Any, Any] = (0, None)  # the last two constants: of an import its level, and the names that it takes
    for step in dis.get_instructions(code):
        if step.opname in _LOOKS_UP:
            path = (step.argval,)
        elif step.opname == "IMPORT_NAME":
            level, names = wanted
            path = module = (_Imported(step.argval if names else step.argval.partition(".")[0], level),)
        elif step.opname == "IMPORT_FROM" and module:
            path = (*module, step.argval)
            module = path if not wanted[1] else module  # `import a.b.c as d` takes b from a, and c from this
        elif step.opname in _LOOKS_UP_ON and path:
            path = (*path, step.argval)
        elif step.opname.startswith(_OF_LOCALS):
            first, last = step.argval if isinstance(step.argval, tuple) else (step.argval, step.argval)
            if step.opname.startswith("STORE") and path and type(path[0]) is _Imported:
                local[first] = path
            path = () if step.opname in _STORES else local.get(last, ())
        elif step.opname not in _BETWEEN:
            path = ()
        if step.opname.startswith("LOAD_") and isinstance(step.argval, (int, tuple, type(None))):
            wanted = wanted[1], step.argval
        if path:
            found[path] = None
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found.update(_paths_in(one, local))
    return found


def functions_in(value: Any) -> list[types.FunctionType]:
    """Return the functions that the value of a class attribute consists of."""
    cls = type(value)
    if cls is property:
        held = [value.fget, value.fset, value.fdel]
    elif cls in _HOLD_FUNCTIONS:
        held = [value.__func__]
    else:
        held = [value]
    return [one for one in held if type(one) is types.FunctionType]


def _functions_in_class(cls: type) -> list[types.FunctionType]:
    found: list[types.FunctionType] = []
    for value in vars(cls).values():
        if type(value) is types.FunctionType:  # the usual case
            found.append(value)
        elif type(value) in _HOLD_FUNCTIONS:
            found += functions_in(value)
    return found


def _inside(function: types.FunctionType) -> list[types.FunctionType]:
    """Return the functions that a function holds, as a decorator holds the one that it wraps."""
    held = [getattr(function, "__wrapped__", None)]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not bound
            held.append(cell.cell_contents)
    return [one for one in held if type(one) is types.FunctionType]


def is_library(module: Any) -> bool:
    """Return whether ``module`` is the name of a module of torch or sac."""
    return str(module).partition(".")[0] in _OURS_AND_TORCH


def is_of_torch(hook: Any) -> bool:
    """Return whether a hook is a function of torch or sac."""
    return is_library(getattr(getattr(hook, "func", hook), "__module__", None))


def is_library_or_standard(module: Any) -> bool:
    """Return whether ``module`` names a module of torch, sac or the standard library, or one in Note [FP8 state]."""
    name = str(module)
    return is_library(name) or name.partition(".")[0] in sys.stdlib_module_names or name in _RESTORED_ELSEWHERE
