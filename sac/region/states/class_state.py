"""State beside the modules themselves: globals that the code of their classes names, and attributes of the classes."""

from __future__ import annotations

import builtins
import dis
import sys
import types
import weakref
from functools import lru_cache
from typing import Any

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
