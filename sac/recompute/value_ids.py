"""One number per tensor of a region that says where it came from: equal in both passes for equal values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from sac.checksums import Sums, sums_of
from sac.recompute.parameter_only import NOT_PARAMETERS, ParameterOnlyIds
from sac.tensors import (
    WeakStorages,
    layout_key,
    offset_in_storage,
    storage_address,
    tensor_parts,
    version_of,
    wrapped_parts,
)

if TYPE_CHECKING:
    from sac.recompute.table import CallSite

# Note [Value ids]
#
# Recomputation finds a saved value by what it was computed from, not by counting ops. So extra ops (FSDP's all-gathers,
# autocast's casts, `record_function`) shift nothing, and two calls that change places find their own values. Every
# storage has a value id, every call a signature:
#
#   signature = hash(op, arguments); a tensor argument is (value id of its storage, shape, stride, offset, dtype)
#   value id of an output = the signature (with its index, for several outputs); a write renames the storage it writes
#   value id of a parameter = its identity; of an input = its position; of anything else = the address of its storage
#
# A tensor of the last kind is external: its value id may differ between the passes although nothing is wrong (in
# forward, autocast reused a cast weight from an earlier region; in recomputation it casts the weight anew). A value
# computed from an external tensor is external too. If forward did not see the signature of a call, the call is matched
# by module, op and call number. Then every argument must agree in layout, and in value id unless one side is external.
# If the forward ran without grad mode, where a module may use other kernels, arguments need only agree in shape and
# dtype. A call without a match runs.
#
# Example. A region computes `h = x @ w` and `h` is saved; x is input 0, w a parameter. The value id of h is the call's
# signature, hash(mm, (id of input 0, layout of x), (id of w, layout of w)). In recomputation an extra op runs first (an
# all-gather, say): the signature of the mm is the same and h is served. If the region now computes `(x + 1) @ w`, the
# signature is new. The call number of the mm leads to h, but the ids of the first argument differ and neither is
# external. So the mm runs, h stays unmatched, and `RecomputeMode.check` raises.

NUMBERS = frozenset({bool, int, float, complex})
_PLAIN = frozenset({type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size})

_CONSTANT_NUMEL = 16

Description = tuple[Any, ...]


def number_key(value: complex) -> tuple[type, str]:
    """Return what differs for any two numbers that an op can tell apart.

    The numbers themselves do not: -1 and -2 have the same hash, and 1, 1.0 and True are equal, as are 0.0 and -0.0.
    """
    return type(value), repr(value)


class ValueIds:
    """The value ids of one pass over one region; see Note [Value ids]."""

    __slots__ = (
        "_by_storage",
        "_draws",
        "_elsewhere",
        "_inputs",
        "_moved",
        "_parameter_bytes",
        "_parameters",
        "_weak",
        "external",
        "external_storages",
        "input_ids",
        "packed",
        "parameter_addresses",
        "parameter_only",
        "producers",
        "recent",
        "saved_versions",
    )

    def __init__(self, owners: tuple[nn.Module, ...] = ()) -> None:
        self.parameter_only = ParameterOnlyIds(owners)
        self.input_ids: dict[int, list[tuple[int, int]]] = {}  # input position -> value id and offset of each part
        self._draws: dict[int, int] = {}
        self.external_storages = WeakStorages()  # the storages of external tensors
        self.make_tables()

    def make_tables(self) -> None:
        """Make the tables that each op reads and writes."""
        self._by_storage: dict[int, int] = {}
        self._inputs: set[int] = set()
        self._elsewhere: set[int] = set()
        self._moved: dict[int, int] = {}  # storage of an input -> how much larger its offset was in forward
        self._parameters: set[int] = set()
        self.external: set[int] = set()
        self.parameter_addresses: set[int] = set()
        self.producers: dict[int, Any] = {}  # value id -> call site of the op that produced it, for messages
        self._weak = WeakStorages()
        self.saved_versions: dict[int, int] = {}  # storage address -> version counter when its result was saved
        self.recent: set[int] = set()  # storage addresses of what autograd has saved since the last op
        # Per tensor that autograd saved: value id (None: not compared), whether it is external, its producer, its
        # offset in elements (-1: not compared), and its lazy bits.
        self.packed: list[tuple[int | None, bool, CallSite | None, int, int]] = []

    def sums_of(self, out: Any) -> Sums:
        """Return the checksums of the tensors in the result of an op."""
        return sums_of(out)

    def note_saved(self, part: Tensor) -> int:
        """Note the version of ``part``, a part of a result that is saved; return the address of its storage."""
        address = storage_address(part)
        self.saved_versions[address] = version_of(part)
        return address

    def not_as_saved(self, values: list[Any]) -> list[Any]:
        """Return those of the ``SavedValue`` that may differ from what their ops returned: here all of them."""
        return values

    def signatures(self) -> Collection[int]:
        """Return the value ids that an op has a part in, which may outlive this object."""
        return self.producers.keys()

    def tell_turn(self, *, is_paused: bool, inside: dict[int, CallSite] | None) -> None:
        """Tell the library, if it runs ops, that these are not the region's own now; see ``RerunState``.

        ``inside``: if a saved module runs, the call sites of its ops.
        """

    def name_input(self, tensor: torch.Tensor, position: int, *, lasts: bool = True) -> None:
        """Give the storage of a region's input the value id of its position.

        ``lasts``: the region holds the caller's tensor until backward. It does not if it keeps a copy elsewhere.
        """
        input_ids = self.input_ids[position] = []
        for part in tensor_parts(tensor):
            value_id = self._by_storage.setdefault(storage_address(part), hash(("input", position)))
            input_ids.append((value_id, offset_in_storage(part)))
            self._inputs.add(value_id)
            if not lasts:
                self._elsewhere.add(value_id)

    def name_input_again(self, tensor: torch.Tensor, input_ids: list[tuple[int, int]]) -> None:
        """Give an input of a recomputation the value id and offset from forward: the ``input_ids`` of its position.

        An input that was kept elsewhere comes back in its own storage, although it may have been a view of another
        input.
        """
        for part, (value_id, offset) in zip(tensor_parts(tensor), input_ids, strict=True):
            address = storage_address(part)
            self._by_storage[address] = value_id
            self._inputs.add(value_id)
            if offset != offset_in_storage(part):
                self._moved[address] = offset - offset_in_storage(part)
                self._weak.watch(part)

    def name_new(self, tensor: torch.Tensor, value_id: int) -> list[tuple[int, int]]:
        """Name storages that are new to the region after ``value_id``; return value id and offset of each part."""
        input_ids = []
        for number, part in enumerate(tensor_parts(tensor)):
            if storage_address(part) not in self._by_storage:
                self.name_output(part, hash((value_id, number)), False)
            input_ids.append((self.of(part), offset_in_storage(part)))
        return input_ids

    def of(self, tensor: torch.Tensor) -> int:
        """Return the value id of a tensor's storage."""
        cls = type(tensor)
        if cls is not Tensor and cls is not Parameter and hasattr(cls, "__tensor_flatten__"):
            return self._of_wrapper(tensor)
        return self.of_plain(tensor, cls, storage_address(tensor))

    def of_plain(self, tensor: Tensor, cls: type, key: int) -> int:
        """Return the value id of the storage at ``key``, which holds ``tensor``, of type ``cls``."""
        value_id = self._by_storage.get(key)
        if value_id is None:
            if cls is Parameter or (cls is not Tensor and isinstance(tensor, Parameter)):
                value_id = self._name_parameter(tensor, key)
                self.parameter_addresses.add(key)
            else:
                value_id = hash(("foreign", key))
                if value_id not in self.external:
                    self.external.add(value_id)
                    self.external_storages.watch(tensor)
                    self.parameter_only.name_foreign(value_id, key)
        elif cls is Parameter:
            self.parameter_addresses.add(key)
            if not self.is_persistent_id(
                value_id
            ):  # FSDP makes and fills the storage inside the region; the name stays
                value_id = self._name_parameter(tensor, key)
        return value_id

    def _name_parameter(self, tensor: Tensor, key: int) -> int:
        # The `data` of a parameter subclass may be a parameter too, and a different one in each pass (bitsandbytes).
        # That one needs no gradient. A parameter that needs one is the module's own; its data may be exchanged between
        # the passes (ZeRO-3).
        name = id(tensor) if type(tensor) is Parameter or tensor.requires_grad else key
        value_id = self._by_storage[key] = hash(("parameter", name))
        self._parameters.add(value_id)
        self.parameter_only.name_parameter(value_id, tensor)
        return value_id

    def see(self, args: tuple[Any, ...]) -> None:
        """Name a parameter before a view is made of it, so that the view's storage has the parameter's value id."""
        if args:
            value = args[0]
            if type(value) is not torch.Tensor and isinstance(value, Parameter):
                self.of(value)

    def name_constant(self, tensor: Any) -> None:
        """Name a small tensor made from Python numbers after those numbers, because its storage is new in each pass."""
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel() <= _CONSTANT_NUMEL:
            value_id = self._by_storage[storage_address(tensor)] = hash(("constant", str(tensor.tolist())))
            self.parameter_only.name_result(value_id, 0)

    def is_persistent(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in an input or a parameter to which nothing in the region has written."""
        return self.is_persistent_id(self._by_storage.get(storage_address(tensor)))

    def is_persistent_id(self, value_id: int | None) -> bool:
        """Whether ``value_id`` belongs to a parameter, or to an input that the region holds as it is."""
        return value_id in self._parameters or (value_id in self._inputs and value_id not in self._elsewhere)

    def source(self, tensor: torch.Tensor) -> str:
        """Return where the tensor's storage comes from: ``parameter``, ``input``, ``foreign``, or ``op``."""
        value_id = self._by_storage.get(storage_address(tensor))
        if value_id is None:
            return "parameter" if isinstance(tensor, Parameter) else "foreign"
        if value_id in self._parameters:
            return "parameter"
        return "input" if value_id in self._inputs else "op"

    def _of_wrapper(self, tensor: torch.Tensor) -> int:
        if isinstance(tensor, Parameter):
            value_id = hash(("parameter", id(tensor)))
            for part in wrapped_parts(tensor):
                self._by_storage.setdefault(storage_address(part), value_id)
            self._parameters.add(value_id)
            self.parameter_only.name_parameter(value_id, tensor)
            return value_id
        value_ids = [self.of(part) for part in wrapped_parts(tensor)]
        if value_ids and value_ids[0] in self._parameters and value_ids.count(value_ids[0]) == len(value_ids):
            return value_ids[0]  # a wrapped parameter without its graph, as recomputation compares it
        value_id = hash(tuple(value_ids))
        self.parameter_only.name_result(value_id, self.parameter_only.of_all(value_ids))
        if not self.external.isdisjoint(value_ids):
            self.external.add(value_id)
        return value_id

    def signature(self, key: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, bool, int]:
        """Return a call's signature, whether an external value went into it, and its ``ParameterOnlyIds.of``."""
        parts: list[Any] = [key]
        self._parameter_bytes = 0
        external = self._describe(args, parts)
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                external = self._describe((value,), parts) or external
        return hash(tuple(parts)), external, self._parameter_bytes

    def _describe(self, values: Any, parts: list[Any]) -> bool:
        external = False
        by_storage, moved = self._by_storage, self._moved
        for value in values:
            cls = type(value)
            if cls is Tensor or cls is Parameter:
                address = storage_address(value)
                value_id = by_storage.get(address)
                if value_id is None or cls is Parameter:
                    value_id = self.of_plain(value, cls, address)
                parts.append((value_id, self._metadata(value) if address in moved else layout_key(value)))
                external = external or value_id in self.external
                if self._parameter_bytes >= 0:
                    self._parameter_bytes = self.parameter_only.joined(self._parameter_bytes, value_id)
            elif cls in NUMBERS:
                parts.append(number_key(value))
            elif cls in _PLAIN:
                parts.append(value)
            elif isinstance(value, Tensor):
                value_id = self.of(value)
                parts.append((value_id, *self._metadata(value)))
                external = external or value_id in self.external
                self._parameter_bytes = self.parameter_only.joined(self._parameter_bytes, value_id)
            elif cls is list or cls is tuple:
                parts.append(len(value))
                external = self._describe(value, parts) or external
            else:
                parts.append(cls)  # a Generator, an Enum, a graph module: its type must do
        return external

    def _metadata(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the layout_key of ``tensor``, with the offset that it would have had in forward."""
        found = layout_key(tensor)
        moved = self._moved.get(storage_address(tensor), 0) if self._moved else 0
        if not moved:
            return found
        shape, stride, offset, dtype, bits = found
        return shape, stride, offset + moved, dtype, bits

    def draw(self, key: int, signature: int) -> int:
        """Return the signature of a call that draws random numbers: two draws with equal arguments differ."""
        number = self._draws[key] = self._draws.get(key, 0) + 1
        return hash((signature, "draw", number))

    def describe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Description:
        """Return what ``signature`` hashes, to be compared by parts: tensors as ``(value id, external, layout)``."""
        return tuple(self._describe_one(value) for value in (*args, *kwargs.values()))

    def _describe_one(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value_id = self.of(value)
            return value_id, value_id in self.external, self._metadata(value)
        if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
            return tuple(self._describe_one(part) for part in value)
        cls = type(value)
        return str(value) if cls in NUMBERS or cls in _PLAIN or isinstance(value, (list, tuple)) else cls.__name__

    def _name(self, tensor: torch.Tensor, value_id: int) -> None:
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            self._by_storage[id(tensor)] = value_id
            return
        address = storage._cdata
        if address not in self._by_storage:
            self._weak.add(storage)
        self._by_storage[address] = value_id

    def name_output(self, out: Any, signature: int, external: bool, made_of: int = NOT_PARAMETERS) -> None:
        """Name an op's result; ``made_of`` is what ``ParameterOnlyIds.of`` returns for it."""
        if isinstance(out, Tensor):
            if type(out) is Tensor or not hasattr(type(out), "__tensor_flatten__"):
                self._name(out, signature)
                if external:
                    self.external.add(signature)
                if made_of >= 0:
                    self.parameter_only.name_result(signature, made_of)
                return
            out = wrapped_parts(out)
        if isinstance(out, (tuple, list)):
            for index, part in enumerate(out):
                if part is not None:
                    self.name_output(part, hash((signature, index)), external, made_of)
