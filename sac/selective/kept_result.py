"""What one call of a saved module left behind: kept in forward, given out again in recomputation."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from sac.errors import Problem, RegionError
from sac.region.parts import PLAIN, attributes_of
from sac.region.storages import version_of
from sac.selective.kept_leaf import Argument, ArgumentView, HoldingObject, KeptLeaf, Serving, made
from sac.selective.tensors import layout_key, storage_address, storage_bytes, tensor_parts

# Note [What a saved module leaves behind]
#
# Autograd holds what the backward of the module reads. What the rest of the region reads of it is kept here, and given
# out in recomputation as if the module had run:
#  - a tensor that it returned, without its graph: it comes back as a leaf that needs a gradient as the original did;
#  - one of its arguments, or a view of one, that it returned: that is taken from the arguments of the recomputation;
#  - what it wrote to its arguments: the values after the call are kept, and written again;
#  - where random generators and the user's state providers stood after it.
#
# What the region writes in place to a kept tensor later must not be in it. A call that is watched sees such a write
# coming (Note [Whole modules]), and copies before it; the next calls copy as soon as the module returns. A write that
# nobody saw coming shows in the version counter: then the module is run again in recomputation, unseen by the region.

_DEEPEST = 3  # objects in one another that are looked into for tensors
_OPAQUE = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)


def given_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the leaves of a call's arguments, in an order that is the same for equal calls."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and type(leaf) not in PLAIN:
            return tree_leaves((args, kwargs))
    return leaves


def versions_of(leaves: list[Any]) -> list[int]:
    """Return the version counter of each leaf that is a tensor, 0 of the others."""
    return [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]


class KeptResult:
    """What one call of a saved module left behind; see the Note. ``where`` names the module in messages."""

    __slots__ = ("_arguments", "_leaves", "_spec", "_storages", "_views", "kept", "packs_before", "where", "writes")

    def __init__(self, out: Any, given: list[Any], before: list[int], where: str) -> None:
        self.where = where
        self.packs_before = 0
        self.kept: list[KeptLeaf] = []
        self._arguments = {id(leaf): place for place, leaf in enumerate(given) if type(leaf) not in PLAIN}
        plain = [(place, leaf) for place, leaf in enumerate(given) if type(leaf) in (torch.Tensor, Parameter)]
        self._storages = {storage_address(leaf): (place, leaf) for place, leaf in plain}
        self._views: list[ArgumentView] = []
        self._spec: Any = None
        if isinstance(out, torch.Tensor):
            self._leaves = [self._keep(out, 0)]
        else:
            leaves, self._spec = tree_flatten(out)
            self._leaves = [self._keep(leaf, 0) for leaf in leaves]
        self.writes: list[tuple[int, KeptLeaf]] = [
            (place, KeptLeaf(leaf))
            for place, leaf in enumerate(given)
            if isinstance(leaf, torch.Tensor) and version_of(leaf) != before[place]
        ]
        self.kept += [kept for _, kept in self.writes]
        self._arguments, self._storages = {}, {}

    def _keep(self, leaf: Any, depth: int) -> Any:
        """Return what stands for one leaf of the result."""
        if type(leaf) in PLAIN:
            return leaf
        if id(leaf) in self._arguments:
            return Argument(self._arguments[id(leaf)])
        if isinstance(leaf, torch.Tensor):
            found = self._storages.get(storage_address(leaf)) if type(leaf) is torch.Tensor else None
            if found is not None and _lies_in(leaf, found[1]):
                self._views.append(ArgumentView(leaf, found[1], found[0]))
                return self._views[-1]
            self.kept.append(KeptLeaf(leaf))
            return self.kept[-1]
        return leaf if isinstance(leaf, _OPAQUE) or depth == _DEEPEST else self._keep_object(leaf, depth)

    def _keep_object(self, leaf: Any, depth: int) -> Any:
        if isinstance(leaf, (dict, list, tuple, set, frozenset)):
            inside: Any = [*leaf.values()] if isinstance(leaf, dict) else [*leaf]
            if any(isinstance(one, torch.Tensor) for one in tree_leaves(inside)):
                raise RegionError(_hidden(leaf, self.where))
        count = len(self.kept)
        attributes = {}
        for name, value in attributes_of(leaf).items():
            leaves, spec = tree_flatten(value)
            attributes[name] = [self._keep(one, depth + 1) for one in leaves], spec
        return HoldingObject(type(leaf), attributes) if len(self.kept) > count else leaf

    @property
    def was_changed(self) -> bool:
        """Whether something that is kept was written to since, and nobody had made a copy."""
        return any(kept.was_changed for kept in self.kept)

    def serves(self, given: list[Any]) -> bool:
        """Return whether ``build`` gives what the module would return for these leaves of its arguments.

        It does not if nobody made a copy of what was written to since, if what is needed was let go, or if an argument
        of which a view was returned is laid out otherwise than in forward.
        """
        if self.was_changed or any(kept.data is None for kept in self.kept):
            return False
        return all(view.fits(given) for view in self._views)

    def copy(self) -> None:
        """Hold copies: the region writes to what the module returned."""
        storages: dict[int, torch.UntypedStorage] = {}
        for kept in self.kept:
            kept.copy(storages)

    def compact(self) -> None:
        """Let small parts of a large storage not hold all of it."""
        groups: dict[int, list[KeptLeaf]] = {}
        for kept in self.kept:
            if type(kept.data) is torch.Tensor and not kept.copied:
                groups.setdefault(storage_address(kept.data), []).append(kept)
        for group in groups.values():
            views = {layout_key(one.data): one.data for one in group if isinstance(one.data, torch.Tensor)}
            whole = max(map(storage_bytes, views.values()))
            if sum(view.numel() * view.element_size() for view in views.values()) < whole:
                for one in group:
                    one.compact()

    def addresses(self) -> set[int]:
        """Return the addresses of the storages that are held."""
        tensors = [kept.data for kept in self.kept if isinstance(kept.data, torch.Tensor)]
        return {storage_address(part) for tensor in tensors for part in tensor_parts(tensor)}

    def build(self, serving: Serving) -> Any:
        """Return what the module would have returned; its arguments are written to as it would have written to them."""
        for place, written in self.writes:
            written.write_to(serving.given[place], serving)
            serving.name(written, serving.given[place])
        leaves = [made(leaf, serving) for leaf in self._leaves]
        return leaves[0] if self._spec is None else tree_unflatten(leaves, self._spec)

    def drop(self) -> None:
        """Let all that is held go."""
        for kept in self.kept:
            kept.drop()


def _lies_in(tensor: torch.Tensor, argument: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a view of elements that ``argument``, which shares its storage, spans."""
    if tensor.dtype != argument.dtype or any(one.is_conj() or one.is_neg() for one in (tensor, argument)):
        return False
    first, last = _span(argument)
    begin, end = _span(tensor)
    return type(argument) is torch.Tensor and first <= begin and end <= last


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset())
    return start, start + sum((size - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _hidden(leaf: Any, where: str) -> Problem:
    return Problem(
        where=where,
        found=f"this module is saved as a whole and returned a {type(leaf).__qualname__}, in which tensors cannot be "
        "exchanged",
        fix="return tuples, lists, dicts, dataclasses or what is registered as a pytree, or save the ops in the module "
        "by rules with `ops`",
    )
