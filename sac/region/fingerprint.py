"""When a function is the same as in an earlier call: what it is made of, compared by identity."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import types
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache, partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn

# -- What identities are made of: plain values, references to objects, sorts of tensors, names in code

_Answer = TypeVar("_Answer")

PLAIN = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


class WeakIdentity(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that stands for one object, whatever the object says of equality; made by ``same`` only."""

    __slots__ = ("address",)
    address: int
    # As long as the object lives there is one of these, so they need not be compared by what they refer to.
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


_living: dict[int, WeakIdentity] = {}  # by the address of the object


def weak_identity(value: Any) -> WeakIdentity:
    """Return the one object that stands for ``value``; raises ``TypeError`` where its class does not allow that."""
    found = _living.get(id(value))
    if found is not None and found() is value:
        return found
    made = WeakIdentity(value, _forget)
    made.address = id(value)
    if found is not None:  # its object is gone, and it is about to be told
        _living.pop(id(value), None)
    return _living.setdefault(id(value), made)


def _forget(dead: WeakIdentity) -> None:
    if _living.get(dead.address) is dead:
        del _living[dead.address]


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds under names, slots included."""
    held = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{name}"  # as Python mangles it
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                held[name] = getattr(value, name)
    return held


@lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code, or code inside it, looks up as globals or attributes, each once."""
    inner = (name for constant in code.co_consts if type(constant) is types.CodeType for name in names_in(constant))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def by_class(ask: Callable[[Any], _Answer]) -> Callable[[Any], _Answer]:
    """Return ``ask``, which is asked of classes, with a memory of the answers that keeps no class alive."""
    answers: dict[int, _Answer] = {}
    living: dict[int, weakref.ref[type]] = {}

    def forget(address: int, dead: object) -> None:
        del answers[address], living[address]

    def remembered(kind: Any) -> _Answer:
        address = id(kind)
        if address in answers:
            return answers[address]
        answer = ask(kind)
        if address not in living:
            living[address] = weakref.ref(kind, partial(forget, address))
        answers[address] = answer
        return answer

    return remembered


def tensor_signature(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return what of a tensor may decide which ops are run on it, but for its values."""
    return type(tensor), tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad


# -- What a function or an argument is, as far as that decides which ops a region runs

# Note [Which function is it]
#
# A region may go without a dispatch mode once a call of it has shown nothing that needs one (Note [Evidence]). The
# evidence is of one function, and a function is often a new object in each call: a lambda in a loop, a partial. Two are
# one function if they are made of the same code and of the same parts, which are compared like this:
#
#   plain values, containers   by what they hold
#   tensors                    by type, dtype, shape, device and whether they need a gradient
#   torch modules              by identity, and by what is plain or a function in them and in all below
#   functions                  by code, closure, defaults, and the globals that the code names; functions of the same
#                              file that it names, in the same way
#   Python modules, classes    by identity, and by their attributes that the code names; torch's and ours by identity
#   other objects              by identity (dataclasses, namespaces and `UserDict`s: by class) and by their attributes,
#                              `_DEEPEST` objects deep
#
# What can neither be held weakly nor be looked into, and what holds more than `_MOST` parts, is no function we know:
# each of its calls runs under the mode. Not looked at: what functions of other files read as globals, objects in torch
# modules, and what lies deeper than said above.

_FUNCTIONS = frozenset({types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial})
_SINGLE = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)  # live with their type
_HOLDERS = (types.SimpleNamespace, UserDict, UserList)  # what they are is what they hold
_SEQUENCES = (tuple, list, set, frozenset, deque)
_MOST = 512
_DEEPEST = 3
_NESTED = 30  # containers and functions in one another; more would be more than Python's stack holds
_STANDARD = len(vars(nn.Module()))  # what nn.Module itself puts into a module's dict, first of all
# Torch's own modules that need no dispatch mode whatever their attributes say, and how many entries their dict has: of
# these only `training` is looked at, if nobody has given them more.
_BUILT_IN: dict[type, int] = {
    kind: _STANDARD + len(kind.__constants__)
    for kind in (nn.Linear, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.GELU, nn.SiLU, nn.ReLU, nn.Softmax)
}


class FunctionFingerprint:
    """Collects the identity of functions or arguments; see Note [Which function is it].

    ``parts``: what they are, flat. ``is_known``: whether that is all of it. ``owners``: the torch modules met, and
    those below: what they own is put back in recomputation.
    """

    __slots__ = ("_code_names", "_left", "_nested", "_objects", "_seen", "is_known", "owners", "parts")

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.is_known = True
        self.owners: list[nn.Module] = []
        self._left = _MOST
        self._nested = 0
        self._objects = 0
        self._seen: dict[int, int] = {}
        self._code_names: tuple[str, ...] = ()

    def look_at(self, *values: Any) -> None:
        """Add ``values``. Objects that raise when they are looked at are no business of ours, and not known."""
        try:
            for value in values:
                self.add(value)
        except Exception:
            self.is_known = False

    def add(self, value: Any) -> None:
        """Add ``value`` and what it holds."""
        kind = type(value)
        self._left -= 1
        if kind in PLAIN:
            self.parts.append(kind)
            self.parts.append(value)
        elif self._left < 0 or self._nested > _NESTED:
            self.is_known = False
        elif isinstance(value, torch.Tensor):
            self.parts.append(tensor_signature(value))
        elif isinstance(value, nn.Module):
            self._add_module(value)
        elif id(value) in self._seen:
            self.parts.append(self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._nested += 1
            _LOOKS.get(kind, FunctionFingerprint._add_other)(self, value)
            self._nested -= 1

    def _add_module(self, root: nn.Module) -> None:
        parts, seen = self.parts, self._seen
        parts.append(weak_identity(root))
        waiting = [root]
        for module in waiting:  # by hand: module.modules() makes the names of all of them
            if module is None or id(module) in seen:
                continue
            seen[id(module)] = len(seen)
            held, kind = module.__dict__, type(module)
            if "training" not in held:  # a scripted module keeps what it holds elsewhere
                self.is_known = False
                self.owners += module.modules()
                continue
            self.owners.append(module)
            if held["_forward_hooks"] or held["_forward_pre_hooks"]:
                parts += (tuple(module._forward_hooks), tuple(module._forward_pre_hooks))  # their ids: none comes twice
            children = held["_modules"]
            if _BUILT_IN.get(kind) == len(held) and not children:
                parts += (kind, held["training"])
                continue
            parts += (weak_identity(kind), held["training"], len(children))
            waiting += children.values()
            # The standard entries come first, except where something plain was set before nn.Module.__init__ ran.
            for value in islice(held.values(), _STANDARD, None) if next(iter(held)) == "training" else held.values():
                if type(value) in PLAIN:
                    parts.append(value)
                else:
                    parts.append(None)
                    if type(value) in _FUNCTIONS:
                        self._add_function_of_module(value)
                    elif type(value) is torch.Generator:  # what makes a module draw from it may be anywhere
                        self.is_known = False

    def _add_function_of_module(self, value: Any) -> None:
        owner: Any = getattr(value, "__self__", None)
        if type(owner).__module__.startswith("sac."):  # a forward that we put there: what counts is the one before it
            value = owner.before
        if value is not None:
            self.add(value)

    def _add_sequence(self, value: Iterable[Any]) -> None:
        self.parts.append(weak_identity(type(value)))
        count = 0
        for one in value:
            self.add(one)
            count += 1
            if self._left < 0:
                self.is_known = False
                break
        self.parts.append(count)

    def _add_mapping(self, value: Mapping[Any, Any]) -> None:
        self._add_sequence(list(value))
        self._add_sequence(list(value.values()))

    def _add_slice(self, value: slice) -> None:
        self._add_sequence((value.start, value.stop, value.step))

    def _add_partial(self, value: Any) -> None:
        self._add_sequence([value.func, *value.args])
        self._add_mapping(value.keywords)
        self._add_mapping(value.__dict__)

    def _add_method(self, value: types.MethodType) -> None:
        self.add(value.__func__)
        self.add(value.__self__)

    def _add_builtin(self, value: Any) -> None:
        owner = value.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            self.parts.append(weak_identity(value))
        else:  # a method bound to something, made anew whenever it is asked for
            self.parts.append(value.__name__)
            self.add(owner)

    def _add_function(self, value: types.FunctionType) -> None:
        code = value.__code__
        self.parts.append(weak_identity(code))
        for cell in value.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not yet bound
                self.is_known = False
            else:
                self.add(held)
        for extra in (value.__defaults__, value.__kwdefaults__, value.__dict__):
            if extra:
                self.add(extra)
        self._add_globals(code, value.__globals__)

    def _add_globals(self, code: types.CodeType, held: dict[str, Any]) -> None:
        if _is_library(held.get("__name__")):
            return
        outer, self._code_names = self._code_names, names_in(code)
        for name in self._code_names:
            if name in held:
                self._add_global(held[name], held)
        self._code_names = outer

    def _add_global(self, value: Any, file: dict[str, Any]) -> None:
        if type(value) is types.FunctionType and value.__globals__ is not file:
            self.parts.append(weak_identity(value))
        else:
            self.add(value)

    def _add_named(self, value: Any) -> None:
        """Look at a Python module or class: what the code at hand may read of it by name."""
        self.parts.append(weak_identity(value))
        if _is_library(value.__module__ if isinstance(value, type) else value.__name__):
            return
        for held in [vars(kind) for kind in value.__mro__[:-1]] if isinstance(value, type) else [vars(value)]:
            for name in self._code_names:
                if name in held:
                    self._add_global(held[name], {})

    def _add_other(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, (type, types.ModuleType)):
            self._add_named(value)
        elif isinstance(value, _SINGLE):
            self.parts.append(value)
        elif isinstance(value, numbers.Number) and isinstance(value, Hashable):
            self.parts += (weak_identity(kind), value)  # numpy's scalars, Decimal
        elif isinstance(value, _SEQUENCES):
            self._add_sequence(value)
            self._add_attributes(value)
        elif isinstance(value, dict):
            self.parts.append(weak_identity(kind))
            self._add_mapping(value)
            self._add_attributes(value)
        elif dataclasses.is_dataclass(value) or isinstance(value, _HOLDERS):
            self.parts.append(weak_identity(kind))
            self._add_attributes(value)
        else:
            is_held = self._add_weakly(value)
            if isinstance(value, enum.Enum) or _is_library(kind.__module__):
                self.is_known = self.is_known and is_held
            else:
                found = self._add_attributes(value)
                self.is_known = self.is_known and (is_held or found)

    def _add_weakly(self, value: Any) -> bool:
        try:
            self.parts.append(weak_identity(value))
        except TypeError:
            self.parts.append(weak_identity(type(value)))
            return False
        return True

    def _add_attributes(self, value: Any) -> bool:
        """Look at what an object holds under names; return whether it holds something."""
        attributes = attributes_of(value)
        if not attributes:
            return False
        if self._objects >= _DEEPEST:
            self.is_known = self.is_known and self._add_weakly(value)
            return False
        self._objects += 1
        self._add_mapping(attributes)
        self._objects -= 1
        return True


def _is_library(module: Any) -> bool:
    """Return whether a module's name is one of torch or of this package, whose state is not the user's."""
    return str(module).partition(".")[0] in ("torch", "sac")


_LOOKS: dict[type, Callable[[FunctionFingerprint, Any], None]] = {
    types.FunctionType: FunctionFingerprint._add_function,
    types.MethodType: FunctionFingerprint._add_method,
    types.BuiltinFunctionType: FunctionFingerprint._add_builtin,
    partial: FunctionFingerprint._add_partial,
    slice: FunctionFingerprint._add_slice,
    **dict.fromkeys((tuple, list, set, frozenset, deque), FunctionFingerprint._add_sequence),
    **dict.fromkeys((dict, OrderedDict), FunctionFingerprint._add_mapping),
}
