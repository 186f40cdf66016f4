"""Values that are computed from parameters alone, such as casts of weights: not worth saving."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from sac.recompute.tape import Tape
from sac.tensors import storage_address, storage_bytes, tensor_parts, tensors_of

# -- Values of a region that are computed from parameters alone: recomputed, not kept

# Note [Made from parameters alone]
#
# A value computed only from parameters and constants is the same in recomputation, and as large as a weight: a
# dequantised or cast weight, a merged adapter, a weight gathered from its shards. Keeping it would undo the
# quantisation or the sharding, in every region, until backward. So a rule that saves it is ignored. Exceptions, which
# are kept: values that are small compared with the parameter, such as the scales of low-precision recipes, and values
# that must be saved.
#
# The components of a parameter count as the parameter, because forwards use them without passing the parameter to any
# op: the tensors inside a wrapper subclass, and those in its attributes (the quantisation state of bitsandbytes). They
# are looked up when the first tensor of unknown origin appears.

NOT_PARAMETERS = -1
SMALL_PART = 16  # a value is small if the parameter is at least this many times as large

_CARRIED_DEPTH = 3  # parameter -> its state -> the state's own state


class ParameterOnlyIds:
    """The parameters and constants behind each storage of a region, by value id.

    A value id that is missing here depends on an input, an external tensor or random numbers.
    """

    __slots__ = ("_owners", "_parts", "table")

    def __init__(self, owners: tuple[nn.Module, ...]) -> None:
        self._owners = owners
        self._parts: dict[int, int] | None = None
        self.table: dict[int, int] = {}  # value id -> bytes of the largest parameter behind it; 0 for a constant

    def name_parameter(self, value_id: int, parameter: torch.Tensor) -> None:
        """``value_id`` belongs to a parameter."""
        self.table[value_id] = _logical_bytes(parameter)

    def name_foreign(self, value_id: int, address: int) -> None:
        """``value_id`` belongs to an external storage at ``address``, possibly a component of a parameter."""
        if self._parts is None:
            self._parts = dict(_parts_of_parameters(self._owners))
        if address in self._parts:
            self.table[value_id] = self._parts[address]

    def name_result(self, value_id: int, parameter_bytes: int) -> None:
        """``value_id`` belongs to a result whose ``of`` is ``parameter_bytes``."""
        if parameter_bytes >= 0:
            self.table[value_id] = parameter_bytes

    def of(self, value_id: int) -> int:
        """Return the bytes of the largest parameter behind a value made from parameters alone, 0 for a constant.

        ``NOT_PARAMETERS`` for all other values.
        """
        return self.table.get(value_id, NOT_PARAMETERS)

    def joined(self, made_of: int, value_id: int) -> int:
        """Return ``of`` for something made of ``value_id`` and of values whose joint ``of`` is ``made_of``."""
        if made_of < 0:
            return NOT_PARAMETERS
        found = self.table.get(value_id, NOT_PARAMETERS)
        return found if found < 0 else max(found, made_of)

    def of_all(self, value_ids: Iterable[int]) -> int:
        """Return ``of`` for something made of all ``value_ids``."""
        made_of = 0
        for value_id in value_ids:
            made_of = self.joined(made_of, value_id)
        return made_of


def is_large(out: Any, parameter_bytes: int) -> bool:
    """Return whether a result made from parameters alone is too large, next to the largest of them, to be kept."""
    return parameter_bytes > 0 and SMALL_PART * sum(map(storage_bytes, tensors_of(out))) > parameter_bytes


def _logical_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # of a DTensor: the bytes of all shards, equal on every rank


def _parts_of_parameters(owners: Iterable[nn.Module]) -> Iterator[tuple[int, int]]:
    """Yield the address of each storage that belongs to a parameter of a subclass, and the parameter's bytes."""
    for owner in owners:
        for parameter in owner._parameters.values():
            if parameter is not None and type(parameter) is not Parameter:
                for part in (*tensor_parts(parameter), *_carried(parameter, _CARRIED_DEPTH)):
                    yield storage_address(part), _logical_bytes(parameter)


def _carried(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield the tensors among the attributes of ``value``, and among the attributes of those."""
    for held in getattr(value, "__dict__", {}).values():
        if isinstance(held, torch.Tensor):
            yield from tensor_parts(held)
        elif depth > 1 and hasattr(held, "__dict__") and not isinstance(held, (nn.Module, type)):
            yield from _carried(held, depth - 1)


# -- Parameter-only values of a tape; see Note [Made from parameters alone]


class ParameterOnlyValues:
    """Answers on demand for one tape: most values are never asked about."""

    __slots__ = ("_known", "_origins", "_tape")

    def __init__(self, tape: Tape, owners: tuple[nn.Module, ...]) -> None:
        self._tape = tape
        self._origins = ParameterOnlyIds(owners)
        self._known: dict[int, int] = {}

    def all_of(self, values: tuple[int, ...] | list[int]) -> int:
        """Return ``ParameterOnlyIds.of`` for something made of all these values."""
        made_of = 0
        for value in values:
            found = self._of(value)
            if found < 0:
                return NOT_PARAMETERS
            made_of = max(made_of, found)
        return made_of

    def _of(self, value: int) -> int:
        # Iterative, because a region may hold more ops than Python's recursion limit.
        known, tape = self._known, self._tape
        stack = [value]
        while stack:
            one = stack[-1]
            if one in known:
                stack.pop()
                continue
            entry = self._maker(one)
            if one in tape.constants:
                known[one] = 0
            elif entry is None:
                known[one] = self._of_leaf(one)
            elif getattr(tape.sites[entry], "is_random", False):
                known[one] = NOT_PARAMETERS
            else:
                reads = [read for read in self._reads(one, entry) if read != one]
                unknown = [read for read in reads if read not in known and read not in stack]
                if unknown and not any(known.get(read, 0) < 0 for read in reads):
                    stack.append(unknown[0])  # one at a time: the first that depends on an input decides
                    continue
                found = [known.get(read, NOT_PARAMETERS if read not in stack else 0) for read in reads]
                known[one] = NOT_PARAMETERS if any(each < 0 for each in found) else max(found, default=0)
            stack.pop()
        return known[value]

    def _reads(self, value: int, entry: int) -> list[int]:
        """Return what the entry that produced ``value`` reads, and what later entries that wrote to ``value`` read."""
        tape = self._tape
        writers = tape.writers.get(tape.roots[value], ()) if tape.writers else ()
        return [*tape.reads[entry], *(read for writer in writers for read in tape.reads[writer])]

    def _maker(self, value: int) -> int | None:
        tape = self._tape
        entry = bisect_right(tape.first_outputs, value) - 1
        if entry < 0 or value not in tape.results(entry):
            return None
        return entry

    def _of_leaf(self, value: int) -> int:
        leaf = self._tape.leaf(value)
        tensor: Tensor | None = leaf.tensor() if leaf is not None and leaf.position < 0 else None
        if tensor is None:
            return NOT_PARAMETERS
        if isinstance(tensor, Parameter):
            self._origins.name_parameter(value, tensor)
        else:
            self._origins.name_foreign(value, storage_address(tensor))
        return self._origins.of(value)
