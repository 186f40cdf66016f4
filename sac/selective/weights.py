"""Which values of a region are made from parameters alone: those are made again, and not kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from sac.selective.tensors import storage_address, storage_bytes, tensor_parts, tensors_of, wrapped_parts

# Note [Made from parameters alone]
#
# A value into which nothing but parameters and constants goes is the same in recomputation, and as large as a weight: a
# dequantised or cast weight, a merged adapter, a weight gathered from its shards. To keep it would undo the
# quantisation or the sharding, in every region, until backward. So a rule that saves it is passed over. Kept are values
# that are small beside the parameter, as the scales of low-precision recipes are, and those that must be saved.
#
# What a parameter is made of counts as the parameter, since forwards use it without passing the parameter to any op:
# the tensors inside a wrapper subclass, and those that it carries as attributes (the quantisation state of
# bitsandbytes). They are looked up when the first tensor of unknown origin is met.

NOT_PARAMETERS = -1
SMALL_PART = 16  # a value is small if the parameter is this many times as large

_CARRIED_DEPTH = 3  # parameter -> its state -> the state of that


class Origins:
    """What went into each storage of a region, by its label.

    A label that is not known here has to do with an input, with something from outside, or with random numbers.
    """

    __slots__ = ("_bytes", "_owners", "_parts")

    def __init__(self, owners: tuple[nn.Module, ...]) -> None:
        self._owners = owners
        self._parts: dict[int, int] | None = None
        self._bytes: dict[int, int] = {}  # label -> bytes of the largest parameter in it; 0 of a constant

    def name_parameter(self, label: int, parameter: torch.Tensor) -> None:
        """``label`` stands for a parameter."""
        self._bytes[label] = _logical_bytes(parameter)

    def name_foreign(self, label: int, address: int) -> None:
        """``label`` stands for a storage from outside, at ``address``: that of a part of a parameter, perhaps."""
        if self._parts is None:
            self._parts = dict(_parts_of_parameters(self._owners))
        if address in self._parts:
            self._bytes[label] = self._parts[address]

    def name_result(self, label: int, parameter_bytes: int) -> None:
        """``label`` stands for a result of what ``parameter_bytes`` (see ``of``) was said."""
        if parameter_bytes >= 0:
            self._bytes[label] = parameter_bytes

    def of(self, label: int) -> int:
        """Return the bytes of the largest parameter in what is made from parameters alone, 0 for a constant.

        ``NOT_PARAMETERS`` for all else.
        """
        return self._bytes.get(label, NOT_PARAMETERS)

    def joined(self, made_of: int, label: int) -> int:
        """Return what ``of`` says of something made of ``label`` too, besides what it says of the rest."""
        if made_of < 0:
            return NOT_PARAMETERS
        found = self._bytes.get(label, NOT_PARAMETERS)
        return found if found < 0 else max(found, made_of)

    def of_all(self, labels: Iterable[int]) -> int:
        """Return what ``of`` says of something made of ``labels`` together."""
        made_of = 0
        for label in labels:
            made_of = self.joined(made_of, label)
        return made_of


def is_large(out: Any, parameter_bytes: int) -> bool:
    """Return whether a result made from parameters alone is too large beside the largest of them to be kept."""
    return parameter_bytes > 0 and SMALL_PART * sum(map(storage_bytes, tensors_of(out))) > parameter_bytes


def _logical_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # of a DTensor: of all shards, the same on every rank


def _parts_of_parameters(owners: Iterable[nn.Module]) -> Iterator[tuple[int, int]]:
    """Yield the address of each storage that belongs to a parameter of a kind of its own, and the parameter's bytes."""
    for owner in owners:
        for parameter in owner._parameters.values():
            if parameter is not None and type(parameter) is not Parameter:
                for part in (*tensor_parts(parameter), *_carried(parameter, _CARRIED_DEPTH)):
                    yield storage_address(part), _logical_bytes(parameter)


def _carried(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield the tensors among the attributes of ``value``, and among theirs."""
    for held in getattr(value, "__dict__", {}).values():
        if isinstance(held, torch.Tensor):
            yield from wrapped_parts(held) if hasattr(type(held), "__tensor_flatten__") else (held,)
        elif depth > 1 and hasattr(held, "__dict__") and not isinstance(held, (nn.Module, type)):
            yield from _carried(held, depth - 1)
