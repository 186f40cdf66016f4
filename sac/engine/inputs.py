"""The arguments of a region call until backward, also in an input store."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sac.engine.handles import WRITTEN
from sac.engine.objects import StandIn, is_own_object, not_leaf, tensors_of_copies, with_tensor
from sac.errors import Problem, RegionError
from sac.outer_hooks import fetch, is_written
from sac.stores.backward_order import CallNode
from sac.stores.store import InputStoring, StoredTensor, stored_input
from sac.tensors import (
    describe,
    storage_address,
    storage_bytes,
    tensor_parts,
    version_of,
)
from sac.torch_private import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten


class Inputs:
    """The arguments of a call until backward. ``bytes``: that they keep, and those of them in host memory."""

    bytes: tuple[int, int] = (0, 0)

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves: list[Any]
        self._spec: Any
        if any(isinstance(argument, (list, tuple, dict)) for argument in (*args, *kwargs.values())):
            self.leaves, self._spec = tree_flatten((args, kwargs))
        else:
            self.leaves, self._spec = [*args, *kwargs.values()], (len(args), [*kwargs])
        self.tensors = [(index, leaf) for index, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        read = [tensor for _, tensor in self.tensors]
        for index, leaf in enumerate(self.leaves):
            if is_own_object(leaf):  # a cache, to which a rerun would add again
                copies: dict[int, Any] = {}
                self.leaves[index] = StandIn(leaf, copies)
                read += tensors_of_copies(copies)
        self._before = [(tensor, version_of(tensor)) for tensor in read]
        self._versions: list[tuple[int, int, bool, bool]] = []
        firsts: dict[int, int] = {}
        for index, tensor in self.tensors:
            firsts.setdefault(id(tensor), index)
        # One tensor in several places is one tensor again.
        self._same = {index: firsts[id(tensor)] for index, tensor in self.tensors if firsts[id(tensor)] != index}
        self.stored: dict[int, StoredTensor] = {}  # those in a store, by index
        self._addresses: dict[int, int] = {}

    def store(self, storing: InputStoring, where: str, call: CallNode) -> None:
        """Copy the chosen inputs to their store before the forward."""
        leaves = [*self.leaves]
        shared = Counter(storage_address(tensor) for _, tensor in self.tensors)
        for index in storing.choose(leaves):
            if shared[storage_address(leaves[index])] > 1:
                continue  # a write through one of them is seen through the other
            self.stored[index] = stored_input(leaves[index], storing.store, call, (where, index))

    def written(self) -> list[Tensor]:
        """Return the tensors that have been written to since the forward began."""
        return [tensor for tensor, version in self._before if version_of(tensor) != version]

    def drop(self) -> None:
        """Hold nothing any more."""
        self.leaves, self.tensors, self.stored, self._before = [], [], {}, []

    def end(self, packed: Callable[[Tensor], Any]) -> None:
        """Hold the tensors as ``packed`` returns them."""
        self._versions = [
            (index, version_of(tensor), tensor.requires_grad, tensor.is_leaf) for index, tensor in self.tensors
        ]
        for index, tensor in self.tensors:
            stored = self.stored.get(index)
            if stored is None:
                self.leaves[index] = held = packed(tensor)
                if held is tensor and type(tensor) is Tensor and tensor.layout is torch.strided:
                    self._addresses[index] = storage_address(tensor)
            else:
                stored.settle()
                self.leaves[index] = stored
        others = [one for index, one in self.tensors if type(one) is not Parameter and index not in self.stored]
        held = [part for tensor in others for part in tensor_parts(tensor)]
        sizes = [stored.bytes for stored in self.stored.values()]
        here = sum({storage_address(tensor): storage_bytes(tensor) for tensor in held}.values())
        self.bytes = here + sum(size for size, _ in sizes), sum(size for _, size in sizes)
        self.tensors, self._before = [], []

    def changed(self, index: int, tensor: Tensor, function: Any, where: str) -> RegionError:
        """Return the error about an input that was written to; it is named as ``function`` does: ``p['mask']``."""
        args, kwargs = self._with(range(len(self.leaves)))
        try:
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):  # it has no signature
            arguments = {"args": args, "kwargs": kwargs}
        leaves = tree_flatten_with_path(arguments)[0]
        path: Any = next(path for path, leaf in leaves if leaf == index)
        name = f"{path[0].key}{keystr(path[1:])}"
        found = f"its input `{name}` ({describe(tensor)}) was changed in place after the forward"
        return RegionError(Problem(where, found, fix=WRITTEN))

    def _with(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments and keywords with these leaves."""
        if isinstance(self._spec, tuple):
            count, names = self._spec
            return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs

    def again(self, where: str, function: Any, *, written: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for a rerun; ``written``: the region writes to inputs, whose contents are put back."""
        leaves = [with_tensor(leaf) for leaf in self.leaves]
        for index, version, requires_grad, is_leaf in self._versions:
            tensor = leaves[index]
            has_moved = index in self._addresses and storage_address(tensor) != self._addresses[index]
            if has_moved or is_written(tensor, version):
                raise self.changed(index, fetch(tensor), function, where)
            if index in self._same:
                leaves[index] = leaves[self._same[index]]
            elif type(tensor) is not Parameter:
                leaves[index] = again = fetch(tensor).detach().requires_grad_(requires_grad)
                if written and requires_grad and not is_leaf:
                    leaves[index] = not_leaf(again)
        return self._with(leaves)
