"""Counts what autograd keeps while a module runs; it keeps the same as without."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from sac.region.handles import Handle
from sac.region.parking import PackHooks, surrounding_hooks
from sac.region.storages import storage_sizes


def counted(sizes: dict[int, int], module: nn.Module, inputs: Collection[int]) -> saved_tensors_hooks:
    """Return the context that puts the bytes of each storage that autograd keeps into ``sizes``, by its address.

    Left out is what lives without it too: the module's parameters and buffers, and the storages at ``inputs``.
    """
    theirs = surrounding_hooks()
    left_out = set(inputs)
    for tensor in (*module.parameters(), *module.buffers()):
        left_out.update(storage_sizes(tensor))
    return saved_tensors_hooks(partial(_pack, sizes, left_out, theirs), partial(_unpack, theirs))


def _pack(sizes: dict[int, int], left_out: set[int], theirs: PackHooks | None, tensor: torch.Tensor) -> Any:
    if not isinstance(tensor, nn.Parameter):
        sizes.update({address: size for address, size in storage_sizes(tensor).items() if address not in left_out})
    if theirs is not None:
        return theirs[0](tensor)
    handle = Handle(0, tensor)
    handle.keep(tensor)
    return handle


def _unpack(theirs: PackHooks | None, packed: Any) -> torch.Tensor:
    if theirs is not None:
        return theirs[1](packed)
    value: torch.Tensor = packed.kept_value("")
    return value
