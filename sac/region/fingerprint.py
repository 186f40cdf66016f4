"""Function fingerprints: whether a function is the same as in an earlier call."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import types
import weakref
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import nn

from sac.native.load import library
from sac.region.tables import STANDARD_COUNT, STANDARD_NAMES, AttributesHolder, ModuleTables, module_tables

# -- Parts of a fingerprint: plain values, weak references, tensor signatures, names in code

_Answer = TypeVar("_Answer")

PLAIN = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


class WeakIdentity(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that identifies one object, however it defines equality; only ``weak_identity`` makes them."""

    __slots__ = ("address",)
    address: int
    # A living object has only one of these, so they are compared by their own identity.
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


_living: dict[int, WeakIdentity] = {}  # by the address of the object


def weak_identity(value: Any) -> WeakIdentity:
    """Return the one reference that identifies ``value``; raises ``TypeError`` if its class allows no weak ones."""
    found = _living.get(id(value))
    if found is not None and found() is value:
        return found
    made = WeakIdentity(value, _forget)
    made.address = id(value)
    if found is not None:  # its object is gone, and its callback is about to run
        _living.pop(id(value), None)
    return _living.setdefault(id(value), made)


def _forget(dead: WeakIdentity, living: dict[int, WeakIdentity] = _living) -> None:
    # ``living`` is an argument because a process that ends may clear this module's names before its objects die.
    if living.get(dead.address) is dead:
        del living[dead.address]


@lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code, or code inside it, looks up as globals or attributes, each once."""
    inner = (name for constant in code.co_consts if type(constant) is types.CodeType for name in names_in(constant))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def by_class(ask: Callable[[Any], _Answer]) -> Callable[[Any], _Answer]:
    """Return ``ask``, a function of a class, with a cache that keeps no class alive."""
    answers: dict[int, _Answer] = {}
    living: dict[int, weakref.ref[type]] = {}

    def forget(address: int, dead: object) -> None:
        del answers[address], living[address]

    def remembered(cls: Any) -> _Answer:
        address = id(cls)
        if address in answers:
            return answers[address]
        answer = ask(cls)
        if address not in living:
            living[address] = weakref.ref(cls, partial(forget, address))
        answers[address] = answer
        return answer

    return remembered


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object: those in its dict and in ``__slots__``."""
    held = getattr(value, "__dict__", None)
    found = dict(held) if type(held) is dict else {}
    for name, slot in slots_of(type(value)).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    return found


def _slots_of(cls: Any) -> dict[str, Any]:
    """Return the descriptors of the attributes that objects of a class keep in ``__slots__``, by name."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        for name, descriptor in vars(base).items() if "__slots__" in vars(base) else ():
            if type(descriptor) is types.MemberDescriptorType and name not in ("__dict__", "__weakref__"):
                found.setdefault(name, descriptor)
    return found


slots_of = by_class(_slots_of)


def without_installed(name: str, value: Any) -> Any:
    """Return an attribute of a module, or None if it is a forward that sac installed, which is not user state.

    If the installed forward has replaced another one, this is returned.
    """
    if name == "forward" and _is_of_library(type(getattr(value, "__self__", None))):
        return getattr(value.__self__, "before", None)
    return value


def tensor_signature(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return the properties of a tensor that may decide which ops run on it, except its values."""
    return type(tensor), tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad


# -- Fingerprints of functions and arguments

# Note [Which function is it]
#
# A region can run without a dispatch mode once one of its calls has shown that it needs none (Note [Evidence]). The
# evidence is about one function, but a function is often a new object in each call: a lambda in a loop, a partial. Two
# function objects count as one function if they have the same code and the same parts. Parts are compared like this:
#
#   plain values, containers   by value, by contents
#   tensors                    by type, dtype, shape, device and whether they need a gradient
#   torch modules              by identity, and by the plain values and functions in them and in all their submodules
#   functions                  by code, closure, defaults, and the globals that the code names; functions of the same
#                              file that it names, in the same way
#   Python modules, classes    by identity, and by their attributes that the code names; those of torch and sac only by
#                              identity
#   other objects              by identity (dataclasses, namespaces and `UserDict`s: by class) and by their attributes,
#                              `_DEEPEST` objects deep
#
# An object that can neither be weakly referenced nor examined, or that has more than `_MOST` parts, makes the function
# unknown: each of its calls runs under the mode. Not examined are: globals that functions of other files read, objects
# in torch modules, and anything deeper than the limits above.
#
# Example. A loop calls `sac.checkpoint(lambda h: block(h) * scale, x)`. Each lambda is a new object with the same code
# object; `block` and `scale` are cells of its closure. With the same `block` and `scale=0.5` in both iterations, the
# fingerprints are equal: the second call can use the evidence of the first. With `scale=2.0`, with another block, or
# after `block.eval()`, it is another function.

FUNCTIONS = frozenset({types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial})
_SINGLE = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)  # live with their type
_HOLDERS = (types.SimpleNamespace, UserDict, UserList)  # identified by their contents
_SEQUENCES = (tuple, list, set, frozenset, deque)
_MOST = 512
_DEEPEST = 3
_NESTED = 30  # levels of containers and functions; more could overflow Python's stack
# Torch modules that need no dispatch mode whatever their attributes are, and how many entries their dict has. If the
# user has added no attributes, only `training` is examined.
_BUILT_IN: dict[type, int] = {
    kind: STANDARD_COUNT + len(kind.__constants__)
    for kind in (nn.Linear, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.GELU, nn.SiLU, nn.ReLU, nn.Softmax)
}


class FunctionFingerprint:
    """Builds the fingerprint of functions or arguments; see Note [Which function is it].

    ``parts``: the parts, flat. ``is_known``: whether the parts are complete. ``owners``: the torch modules found and
    their submodules, whose state is restored for recomputation. ``tables``: the tables of all ``owners``; None if
    they were not found together.
    """

    __slots__ = ("_code_names", "_left", "_nested", "_objects", "_seen", "is_known", "owners", "parts", "tables")

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.is_known = True
        self.owners: list[nn.Module] = []
        self.tables: ModuleTables | None = None
        self._left = _MOST
        self._nested = 0
        self._objects = 0
        self._seen: dict[int, int] = {}
        self._code_names: tuple[str, ...] = ()

    def taken(self) -> tuple[tuple[nn.Module, ...], ModuleTables | None]:
        """Return the owners and their tables, for one call: later calls must not find these tables."""
        tables, self.tables = self.tables, None
        return tuple(self.owners), tables

    def look_at(self, *values: Any) -> None:
        """Add ``values``. If an object raises when it is examined, the fingerprint is not known."""
        try:
            for value in values:
                self.add(value)
        except Exception:
            self.is_known = False

    def add(self, value: Any) -> None:
        """Add ``value`` and its contents."""
        cls = type(value)
        self._left -= 1
        if cls in PLAIN:
            self.parts.append(cls)
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
            _LOOKS.get(cls, FunctionFingerprint._add_other)(self, value)
            self._nested -= 1

    def _add_module(self, root: nn.Module) -> None:
        parts = self.parts
        parts.append(weak_identity(root))
        native: Any = library()
        if native is not None:
            found = native.modules_below(
                *(root, self._seen, _BUILT_IN, _living, weak_identity, STANDARD_NAMES, PLAIN, parts, self.owners),
                self._add_object,
            )
            if found is not None:
                self._take(module_tables(found))
                return
        helds, skipped = self._add_modules_below(root)
        helds.reverse()
        attributes = AttributesHolder(helds)
        are_usual = attributes.are_usual()
        names, values, objects = attributes.names[::-1], attributes.values[::-1], attributes.objects
        if are_usual and True not in skipped:
            self._add_values(names, values, objects)
        else:
            end = 0
            for held, is_skipped in zip(reversed(helds), skipped, strict=True):
                begin, end = end, end + max(len(held) - STANDARD_COUNT, 0)
                if is_skipped:
                    objects += [value for value in values[begin:end] if type(value) not in PLAIN]
                elif are_usual or next(iter(held)) == "training":
                    self._add_values(names[begin:end], values[begin:end], objects)
                else:  # something plain was set before nn.Module.__init__ ran
                    self._add_values([*held], [*held.values()], objects)
        self._take(ModuleTables(attributes), are_usual=are_usual)

    def _take(self, tables: ModuleTables, *, are_usual: bool = True) -> None:
        """Keep the tables of the modules found last, if they are usual and there are no other modules."""
        if tables.attributes is not None and (count := len(tables.attributes.tables)):
            self.tables = tables if are_usual and count == len(self.owners) else None

    def _add_modules_below(self, root: nn.Module) -> tuple[list[dict[str, Any]], list[bool]]:
        """Add a module and its submodules; return their dicts, and which ones are built in, without more attributes."""
        parts, seen = self.parts, self._seen
        helds: list[dict[str, Any]] = []
        skipped: list[bool] = []
        identities: dict[type, WeakIdentity] = {}
        waiting = [root]
        for module in waiting:  # not module.modules(): it builds the names of all of them
            if module is None or id(module) in seen:
                continue
            seen[id(module)] = len(seen)
            held, cls = module.__dict__, type(module)
            if "training" not in held:  # a scripted module keeps its state elsewhere
                self.is_known = False
                self.owners += module.modules()
                continue
            self.owners.append(module)
            helds.append(held)
            if cls not in identities:
                identities[cls] = weak_identity(cls)
            children, count = held["_modules"], len(held)
            if children or _BUILT_IN.get(cls) != count:
                waiting += children.values()
                skipped.append(False)
                parts += (identities[cls], held["training"], count, len(children))
            else:
                skipped.append(True)
                parts += (identities[cls], held["training"])
            if held["_forward_hooks"] or held["_forward_pre_hooks"]:
                parts += (tuple(module._forward_hooks), tuple(module._forward_pre_hooks))  # hook ids, which are unique
        return helds, skipped

    def _add_values(self, names: list[str], values: list[Any], objects: list[Any]) -> None:
        """Add the attributes of a module; append to ``objects`` those that may hold state."""
        parts = self.parts
        for name, value in zip(names, values, strict=True):
            if type(value) in PLAIN:
                parts.append(value)
            else:
                self._add_object(name, value, objects)

    def _add_object(self, name: str, value: Any, objects: list[Any]) -> None:
        """Add an attribute of a module that is not a plain value; append it to ``objects`` if it may hold state."""
        self.parts.append(None)
        if name == "forward":
            replaced = without_installed(name, value)
            if replaced is not None:
                objects.append(replaced)
            elif _is_of_sac(type(value.__self__)):
                return
        else:
            objects.append(value)
        if type(value) in FUNCTIONS:
            self._add_function_of_module(value)
        elif type(value) is torch.Generator:  # code anywhere may decide whether the module draws from it
            self.is_known = False

    def _add_function_of_module(self, value: Any) -> None:
        owner: Any = getattr(value, "__self__", None)
        if type(owner).__module__.startswith("sac."):  # a forward that sac installed: use the one that it replaced
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
        else:  # a bound method, a new object at each access
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
        """Add a Python module or class, and its attributes that the current code may read by name."""
        self.parts.append(weak_identity(value))
        if _is_library(value.__module__ if isinstance(value, type) else value.__name__):
            return
        for held in [vars(cls) for cls in value.__mro__[:-1]] if isinstance(value, type) else [vars(value)]:
            for name in self._code_names:
                if name in held:
                    self._add_global(held[name], {})

    def _add_other(self, value: Any) -> None:
        cls = type(value)
        if isinstance(value, (type, types.ModuleType)):
            self._add_named(value)
        elif isinstance(value, _SINGLE):
            self.parts.append(value)
        elif isinstance(value, numbers.Number) and isinstance(value, Hashable):
            self.parts += (weak_identity(cls), value)  # numpy's scalars, Decimal
        elif isinstance(value, _SEQUENCES):
            self._add_sequence(value)
            self._add_attributes(value)
        elif isinstance(value, dict):
            self.parts.append(weak_identity(cls))
            self._add_mapping(value)
            self._add_attributes(value)
        elif dataclasses.is_dataclass(value) or isinstance(value, _HOLDERS):
            self.parts.append(weak_identity(cls))
            self._add_attributes(value)
        else:
            is_held = self._add_weakly(value)
            if isinstance(value, enum.Enum) or _is_library(cls.__module__):
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
        """Add the attributes of an object; return whether it has any that were examined."""
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
    """Return whether a module's name belongs to torch or sac, whose state is not user state."""
    return str(module).partition(".")[0] in ("torch", "sac")


_is_of_library = by_class(lambda cls: _is_library(cls.__module__))
_is_of_sac = by_class(lambda cls: cls.__module__.startswith("sac."))
_LOOKS: dict[type, Callable[[FunctionFingerprint, Any], None]] = {
    types.FunctionType: FunctionFingerprint._add_function,
    types.MethodType: FunctionFingerprint._add_method,
    types.BuiltinFunctionType: FunctionFingerprint._add_builtin,
    partial: FunctionFingerprint._add_partial,
    slice: FunctionFingerprint._add_slice,
    **dict.fromkeys((tuple, list, set, frozenset, deque), FunctionFingerprint._add_sequence),
    **dict.fromkeys((dict, OrderedDict), FunctionFingerprint._add_mapping),
}
