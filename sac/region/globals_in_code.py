"""Names of globals, and of attributes of Python modules, that the code of functions and classes looks up."""

from __future__ import annotations

import builtins
import dis
import enum
import re
import sys
import types
import weakref
from contextlib import suppress
from functools import lru_cache
from typing import Any

from torch import nn

# Note [Globals and classes]
#
# `CALLS[0] += 1` and `Block.calls += 1` in a forward change state just as `self.calls += 1` does, and are restored with
# it (Note [Python state]). The globals are read once from the code of a class: the names that its methods look up, and
# the names that functions look up, if the methods name these. Of a Python module that the code names, these are the
# attributes that it names too; of a class, its attributes. Torch and the standard library are not followed, and neither
# are other installed packages.
#
# Example. A method runs `scale = Scaling.now() * settings.scale`. `Scaling` is a class of the same package, whose
# attributes are recorded, and the globals that `now` looks up; `settings` is a Python module, of which `scale` is.

_LOOKS_UP = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
_LOOKS_UP_ON = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
_BETWEEN = frozenset({"COPY", "DUP_TOP", "EXTENDED_ARG", "CACHE"})  # may stand between a name and its attribute
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
MISSING = object()  # stands for a value that is not there
_OURS_AND_TORCH = frozenset({"torch", "sac"})
_RESTORED_ELSEWHERE = frozenset({"transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"})

Globals = tuple["weakref.ref[Any]", tuple[str, ...]]  # a Python module, or a function (for its globals), and names


def globals_of_class(cls: Any) -> tuple[Globals, ...]:
    """Return the names of globals that methods of a user's class look up, by file."""
    values = [value for base in cls.__mro__ if is_users(base) for value in vars(base).values()]
    return globals_of_code(*(function for value in values for function in _functions(value)))


def globals_of_code(*functions: types.FunctionType) -> tuple[Globals, ...]:
    """Return the names of globals that functions look up, by file."""
    names = _NamesInCode()
    names.waiting += functions
    return names.found()


def is_users(cls: type) -> bool:
    """Return whether a class is from user code: not from torch, sac or the standard library."""
    return not is_library_or_standard(cls.__module__)


class _NamesInCode:
    """Collects the names that functions, and those that they call, look up; see Note [Globals and classes]."""

    def __init__(self) -> None:
        self.waiting: list[types.FunctionType] = []
        self._names: dict[int, dict[str, None]] = {}  # by the id of the table that holds them
        self._owners: dict[int, Any] = {}  # id of a table -> the Python module whose it is, or a function of the file
        self._seen: set[types.CodeType] = set()

    def found(self) -> tuple[Globals, ...]:
        """Return the names, by the table that holds them, after following all that is waiting."""
        while self.waiting:
            function = self.waiting.pop()
            if function.__code__ not in self._seen:
                self._seen.add(function.__code__)
                self._look_at(function)
        return tuple((weakref.ref(self._owners[table]), tuple(names)) for table, names in self._names.items())

    def _look_at(self, function: types.FunctionType) -> None:
        self.waiting += _inside(function)
        held = function.__globals__
        if is_library_or_standard(held.get("__name__")):
            return
        for name, *attributes in _looked_up(function.__code__):
            owner: Any = function
            table = held
            value = held.get(name, MISSING)
            while type(value) is types.ModuleType and attributes and _is_followed(vars(value), held):
                owner, table, name = value, vars(value), attributes.pop(0)
                value = table.get(name, MISSING)
            if value is not MISSING or not hasattr(builtins, name):
                self._note(owner, table, name, value, function)

    def _note(self, owner: Any, table: dict[str, Any], name: str, value: Any, function: types.FunctionType) -> None:
        """Note a name that the code of ``function`` looks up, and follow what it stands for."""
        cls = type(value)
        if issubclass(cls, types.ModuleType):
            return
        if issubclass(cls, type):
            if not is_users(value) or issubclass(value, enum.Enum):
                return
            if not issubclass(value, nn.Module):  # the classes of the region's modules are looked at anyway
                methods = [method for one in vars(value).values() for method in _functions(one)]
                self.waiting += [one for one in methods if one.__globals__ is function.__globals__]
        elif cls is types.FunctionType and _is_followed(value.__globals__, function.__globals__):
            self.waiting.append(value)
        self._owners.setdefault(id(table), owner)
        self._names.setdefault(id(table), {})[name] = None


def _is_followed(module: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether what ``module`` holds is followed from code of ``other``: not if another package is installed."""
    if module is other:
        return True
    package, others = (str(one.get("__name__")).partition(".")[0] for one in (module, other))
    if package == others:
        return True
    file = module.get("__file__")
    return not is_library_or_standard(package) and isinstance(file, str) and not _INSTALLED.search(file)


@lru_cache(maxsize=1024)
def _looked_up(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the globals that code, or code inside it, looks up, each with the attributes that it looks up on it."""
    found: dict[tuple[str, ...], None] = {}
    path: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in _LOOKS_UP:
            path = (step.argval,)
        elif path and step.opname in _LOOKS_UP_ON:
            path = (*path, step.argval)
        elif step.opname not in _BETWEEN:
            path = ()
        if path:
            found[path] = None
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found.update(dict.fromkeys(_looked_up(one)))
    return tuple(found)


def _functions(value: Any) -> list[types.FunctionType]:
    """Return the functions that the value of a class attribute consists of."""
    cls = type(value)
    if cls is property:
        held = [value.fget, value.fset, value.fdel]
    elif cls in (classmethod, staticmethod, types.MethodType):
        held = [value.__func__]
    else:
        held = [value]
    return [one for one in held if type(one) is types.FunctionType]


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
