"""The inputs of a region, kept from forward to backward so that the region can be run again."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from sac.region.identity import Identity
from sac.region.kept_tensor import KeptTensor, Start
from sac.region.parking import PackHooks
from sac.region.parts import PLAIN, sort_of
from sac.region.states.arguments import KeptObject, is_kept_object
from sac.region.storages import storage_sizes
from sac.region.stores.gathering import Call
from sac.region.stores.placements import Keeping, Stored
from sac.region.stores.release import check_releasable, is_worth_it


class KeptInputs:
    """Arguments of one region call in any structure; tensors are kept without their graph.

    ``kind`` says what sort of inputs these are (Note [Which function is it]): equal for equal uses, None where no other
    use can be known to be equal. ``owners``: modules among the arguments, and those below. A tensor that is passed
    more than once is kept once, under its first position, and is one tensor again in recomputation.
    """

    __slots__ = ("_call", "_keywords", "_leaves", "_objects", "_spec", "kind", "owners", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves: list[Any] = [*args, *kwargs.values()]
        kind: list[Any] = [len(args), *kwargs]
        self.owners: tuple[torch.nn.Module, ...] = ()
        self._keywords = tuple(kwargs)
        self._spec: Any = None  # as a rule there are but tensors and plain values: nothing to flatten
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                kind.append(sort_of(leaf))
            elif type(leaf) in PLAIN:
                kind += (type(leaf), leaf)
            else:
                leaves, self._spec = tree_flatten((args, kwargs))
                kind = self._look_at(args, kwargs)
                break
        self.kind: tuple[Any, ...] | None = tuple(kind) if kind else None
        self._call: Call | None = None
        known: dict[int, KeptTensor] = {}
        objects: dict[int, KeptObject] = {}
        kept_leaves = [*leaves]
        for position, leaf in enumerate(leaves):
            plain = type(leaf) is torch.Tensor  # asked first: whether it is a Parameter is a question that costs
            if plain or (isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)):
                kept = known.get(id(leaf))
                if kept is None:
                    known[id(leaf)] = kept = KeptTensor(leaf, position)
                elif self.kind is not None:  # the function may ask whether two of its arguments are one
                    self.kind += ((position, kept.position),)
                kept_leaves[position] = kept
            elif self._spec is not None and is_kept_object(leaf):
                kept_leaves[position] = objects[id(leaf)] = objects.get(id(leaf)) or KeptObject(leaf)
        self.tensors = list(known.values())
        self._objects = list(objects.values())
        self._leaves: list[Any] | None = kept_leaves

    def tensors_in_objects(self) -> dict[int, torch.Tensor]:
        """Return the tensors that objects among the arguments held when this was made, by id."""
        return {key: tensor for kept in self._objects for key, tensor in kept.tensors.items()}

    def _look_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        identity = Identity()
        identity.look_at(args, kwargs)
        self.owners = tuple(identity.owners)
        return identity.parts if identity.is_known else []

    def store(self, keeping: Keeping, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> None:
        """Before the forward: copy the chosen inputs to where they are to lie. ``args`` and ``kwargs`` as before.

        ``path`` names the region.
        """
        assert self._leaves is not None, "stored after they were dropped"
        leaves = self.leaves_of(args, kwargs)
        self._call = call = Call()
        for position in keeping.choose(leaves):
            kept = self._leaves[position]
            if kept.stored is None:
                name = partial(argument_name, args, kwargs, position)
                if keeping.release:
                    check_releasable(leaves[position], leaves, name)
                kept.stored = Stored(leaves[position], keeping.placement, call, (path, position), name)

    def leaves_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the leaves of the call, each at its position. ``args`` and ``kwargs`` as before."""
        return [*args, *kwargs.values()] if self._spec is None else tree_leaves((args, kwargs))

    def finish(self, keeping: Keeping, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After ``close``, if ``store`` was called: mark what the region returned, and release what is to be.

        See Note [Prefetched gathers] and Note [Released inputs].
        """
        if not self.tensors:
            return
        results = tree_leaves(output)
        if self._call is not None:
            self._call.mark(results)
        if keeping.release:
            leaves = self.leaves_of(args, kwargs)
            returned = {id(result) for result in results}
            for kept in self.tensors:
                tensor = leaves[kept.position]
                if kept.stored is None or kept.written or id(tensor) in returned:
                    continue
                if is_worth_it(tensor):
                    kept.stored.release(tensor)

    def close(self, hooks: PackHooks | None, path: str) -> None:
        """At the end of the forward: check versions, and hand the data to the surrounding hooks."""
        for kept in self.tensors:
            kept.check_writes(self.tensors, path)
        for kept in self.tensors:
            kept.close(hooks)

    def copy_storage(self, address: int) -> None:
        """The region is about to write to this storage: keep copies of the inputs that lie in it."""
        inside = [
            kept
            for kept in self.tensors
            if not kept.written and isinstance(kept.data, torch.Tensor) and address in storage_sizes(kept.data)
        ]
        if len(inside) == 1 and inside[0].stored is not None:
            inside[0].stored.placed.settle()
            inside[0].written = True
            return
        storages: dict[int, torch.UntypedStorage] = {}
        for kept in inside:  # together: what is written through one of them is seen through the others
            kept.copy_onto(storages)

    def rebuild(
        self, path: str, start: Start | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[int, torch.Tensor]]]:
        """Return ``(args, kwargs)`` for one recomputation, and the tensors by position.

        ``start`` is given the leaf made of each input that needs a gradient, with its position, and returns the tensor
        that is to stand for it.
        """
        if self._leaves is None:
            raise AssertionError("a region's inputs were used after they were dropped")
        storages: dict[int, torch.UntypedStorage] = {}
        fetched = {kept.stored: kept.stored.fetch(path) for kept in self.tensors if kept.stored is not None}
        again = {kept: kept.rebuild(storages, fetched, path, start) for kept in self.tensors}
        objects = {kept: kept.rebuild() for kept in self._objects}
        leaves = [
            again[leaf] if isinstance(leaf, KeptTensor) else objects[leaf] if isinstance(leaf, KeptObject) else leaf
            for leaf in self._leaves
        ]
        args, kwargs = self.unflatten(leaves)
        for stored in fetched:
            stored.placed.prefetch()
        return args, kwargs, [(kept.position, again[kept]) for kept in self.tensors]

    def unflatten(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` with these leaves."""
        if self._spec is not None:
            return tree_unflatten(leaves, self._spec)  # type: ignore[no-any-return]
        split = len(leaves) - len(self._keywords)
        return tuple(leaves[:split]), dict(zip(self._keywords, leaves[split:], strict=True))

    def bytes(self) -> tuple[int, int]:
        """Return the bytes held on devices (whole storages, each counted once) and those held for one on the host."""
        sizes: dict[int, int] = {}
        host: dict[int, int] = {}
        for kept in self.tensors:
            if kept.stored is not None:
                sizes[id(kept.stored)], host[id(kept.stored)] = kept.stored.bytes()
            elif isinstance(kept.data, torch.Tensor):
                sizes.update(storage_sizes(kept.data))
        return sum(sizes.values()), sum(host.values())

    def bytes_among(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of those storages of inputs in which some of ``tensors`` lie, each counted once."""
        sizes: dict[int, int] = {}
        for kept in self.tensors:
            if isinstance(kept.data, torch.Tensor):
                sizes.update(storage_sizes(kept.data))
        held = {address for tensor in tensors for address in storage_sizes(tensor)}
        return sum(size for address, size in sizes.items() if address in held)

    def drop(self) -> None:
        """Let the data go: no recomputation will come."""
        for kept in self.tensors:
            if kept.stored is not None:
                kept.stored.drop()
        self._leaves, self.tensors, self._objects = None, [], []


def argument_name(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> str:
    """Return how a call writes the leaf at ``position``: ``args[0]``, ``kwargs['mask']``, ``args[1]['x']``."""
    path, _ = tree_flatten_with_path((args, kwargs))[0][position]
    return ("kwargs" if keystr(path[:1]) == "[1]" else "args") + keystr(path[1:])
