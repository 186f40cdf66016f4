"""The inputs of a region, held until backward."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from sac.errors import Problem, RegionError
from sac.outer_hooks import PackHooks
from sac.region.fingerprint import FUNCTIONS, PLAIN, FunctionFingerprint, attributes_of, tensor_signature
from sac.region.holders import ITERATORS, copy_of_iterator
from sac.region.module_state import UnseenWriteError, spare_of
from sac.region.python_state import holds_state
from sac.region.rng import is_random_source
from sac.stores.backward_order import CallNode
from sac.stores.saved_tensor import SavedLeaves, SavedTensor
from sac.stores.store import InputStoring, StoredInput
from sac.tensors import describe, shares_storage, storage_sizes, version_of
from sac.torch_private import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

# -- One tensor input of a region

Start = Callable[[torch.Tensor, int], torch.Tensor]


class SavedInput(SavedTensor):
    """One tensor input, with its version when the region began.

    ``value`` is the caller's data, a copy if the region writes to it, or the object that the hooks around the region
    returned for it. If a copy was ``stored`` before the forward, ``value`` is released when the forward is over. A
    small input without a gradient, such as a mask or a counter, has a ``spare`` copy: another region may write to the
    input before backward.
    """

    __slots__ = ("needs_grad", "position", "spare", "stored", "value", "version", "watched", "written")

    def __init__(self, tensor: torch.Tensor, position: int) -> None:
        self.position = position
        self.needs_grad = tensor.requires_grad
        self.value = self.watched = tensor.detach() if tensor.requires_grad else tensor
        self.version = version_of(tensor)
        self.written = False
        self.stored: StoredInput | None = None
        self.spare = None if self.needs_grad else spare_of(tensor)

    def copy(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """See ``SavedTensor``."""
        if self.stored is not None:
            self.stored.drop()
        self.stored = self.spare = None
        super().copy(storages)

    def check_writes(self, others: Sequence[SavedInput], path: str) -> None:
        """Raise if the region wrote to this input unseen and no valid copy exists; ``others``: the region's inputs.

        A copy to the host runs while the region runs, so the write may have come before it. If two inputs share a
        storage, a write through one changes the other too; separate copies would not reproduce that.
        """
        if self.written or not self.was_changed:
            return
        assert self.watched is not None
        aliases = [other.watched for other in others if other is not self and other.watched is not None]
        if self.stored is not None and not self.stored.bytes()[1] and not shares_storage(self.watched, aliases):
            return
        raise UnseenWriteError(self.unseen(path))

    def unseen(self, path: str) -> Problem:
        """Return the problem that the region wrote to this input, of which there is no copy."""
        assert isinstance(self.value, torch.Tensor)
        return Problem(
            where=path or "region",
            found=f"the region wrote to its input {self.position} ({describe(self.value)}) in place, unseen by the "
            "recorder",
            fix="clone the input inside the region before writing to it",
        )

    def close(self, hooks: PackHooks | None) -> None:
        """The forward is over and its writes are checked: release the caller's data where a copy is stored."""
        if self.stored is not None:
            self.written = self.written or self.was_changed
            self.drop()
            self.stored.close(hooks)
        elif hooks is not None:
            self.pack_with_outer_hooks(hooks)

    def rebuild(
        self,
        storages: dict[int, torch.UntypedStorage],
        fetched: dict[StoredInput, torch.Tensor],
        path: str,
        start: Start | None,
    ) -> torch.Tensor:
        """Return the input for one recomputation; ``storages`` holds the copies made for that recomputation so far."""
        data = fetched[self.stored] if self.stored is not None else self._checked(path)
        if self.stored is None or not self.stored.tensor.fresh:
            data = self.own(data, storages)  # the recomputation writes to it too, and may not be the last one
        if start is not None and self.needs_grad:
            return start(data.detach().requires_grad_(), self.position)
        return self.leaf(data)

    def _checked(self, path: str) -> torch.Tensor:
        data = self.fetch()
        if self.spare is not None and self.spare.was_changed:
            assert self.spare.copy is not None
            return self.spare.placed_on(self.spare.copy)
        if self.was_changed:
            assert self.watched is not None
            raise RegionError(
                Problem(
                    where=path or "region",
                    found=f"input {self.position} ({describe(data)}) was changed in place after the forward: it is at "
                    f"version {version_of(self.watched)}, backward expects version {self.version}",
                    fix="do not write to the input of a checkpointed region before backward, or pass a clone",
                )
            )
        return data


# -- Objects among the arguments of a region

# Note [Objects as arguments]
#
# A block writes its keys and values into a cache argument, or puts its result into a field of a state object that is
# passed from layer to layer (`state.h = layer(state)`). A recomputation on the same object would start from the block's
# own results. So the region keeps a copy of such an object as it was when the forward began. Its objects and containers
# are copied; its tensors are not, so they keep their graph (a trained prefix gets its gradient). Each recomputation
# runs on a new copy of that copy.
#
# The region must not hold the caller's object itself: a result of the region that is stored there has the region in its
# history. That would be a reference cycle through autograd's nodes, which the garbage collector does not find.
#
# Lists, dicts, tuples and other containers that `torch.utils._pytree` flattens are rebuilt for each recomputation
# anyway. An object is copied if it holds user state (Note [Python state]): its class is not from torch, sac or the
# standard library. Objects of those classes are the same in forward and recomputation. An iterator is copied too, if
# that is possible: the region draws from it.

SHARED_STATES = "shared_kv_states"  # the argument through which layers pass on keys and values
_SHARED = (torch.Tensor, nn.Module, type, str, bytes, int, float)


class SavedObject:
    """An object among the arguments of a region, as it was when the forward began; see Note [Objects as arguments].

    ``tensors``: the tensors that the object holds, by id.
    """

    __slots__ = ("_copy", "tensors")

    def __init__(self, value: Any) -> None:
        copies: dict[int, Any] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self._copy = _copied(value, copies, self.tensors)

    def rebuild(self) -> Any:
        """Return the object for one recomputation."""
        return _copied(self._copy, {}, {})


def is_kept_object(value: Any) -> bool:
    """Return whether an argument that is not a tensor is kept as a copy."""
    if type(value) in ITERATORS:
        return True
    return (
        type(value) not in PLAIN
        and not is_random_source(value)
        and not isinstance(value, _SHARED)
        and holds_state(value)
    )


def _copied(one: Any, copies: dict[int, Any], tensors: dict[int, torch.Tensor]) -> Any:
    """Copy an object and all objects and containers below it, but not tensors, modules and plain values.

    ``copies`` maps the id of each copied object to its copy, so an object that occurs twice is copied once. The tensors
    found are added to ``tensors``, by id.
    """
    if isinstance(one, torch.Tensor):
        tensors[id(one)] = one
        return one
    if type(one) in PLAIN or isinstance(one, _SHARED):
        return one
    if id(one) in copies:
        return copies[id(one)]
    if type(one) in ITERATORS:
        copies[id(one)] = _copied_iterator(one)
        return copies[id(one)]
    if isinstance(one, tuple):
        parts = [_copied(part, copies, tensors) for part in one]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    if not holds_state(one):
        return one
    try:
        twin = copy.copy(one)
        attributes = attributes_of(one)
    except Exception:  # its class cannot be copied (a lock) or inspected: forward and recomputation share the object
        return one
    copies[id(one)] = twin
    if twin is one:
        return one
    for name, value in attributes.items():
        object.__setattr__(twin, name, _copied(value, copies, tensors))
    if isinstance(one, dict):
        for key, value in one.items():
            dict.__setitem__(twin, key, _copied(value, copies, tensors))
    elif isinstance(one, list):
        list.__setitem__(twin, slice(None), [_copied(value, copies, tensors) for value in one])
    elif isinstance(one, deque):
        deque.clear(twin)
        deque.extend(twin, [_copied(value, copies, tensors) for value in one])
    return twin


def _copied_iterator(one: Any) -> Any:
    try:
        return copy_of_iterator(one)
    except TypeError:  # it draws from a generator: forward and recomputation share it
        return one


# -- All inputs of one region call


class RegionInputs(SavedLeaves):
    """Arguments of one region call in any structure; tensors are kept without their graph.

    ``signature``: the input signature (Note [Which function is it]), equal for equal uses; None where no other use can
    be known to be equal. ``owners``: modules among the arguments, and their submodules. A tensor that is passed more
    than once is kept once, under its first position, and is one tensor again in recomputation. ``call``: this call in
    the order of backward, if something of it is kept elsewhere.
    """

    __slots__ = ("_keywords", "_leaves", "_objects", "_spec", "call", "owners", "signature")
    tensors: list[SavedInput]

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves: list[Any] = [*args, *kwargs.values()]
        signature: list[Any] = [len(args), *kwargs]
        self.owners: tuple[torch.nn.Module, ...] = ()
        self._keywords = tuple(kwargs)
        self._spec: Any = None  # usually all arguments are tensors and plain values: nothing to flatten
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                signature.append(tensor_signature(leaf))
            elif type(leaf) in PLAIN:
                signature += (type(leaf), leaf)
            else:
                leaves, self._spec = tree_flatten((args, kwargs))
                signature = self._look_at(args, kwargs)
                break
        self.signature: tuple[Any, ...] | None = tuple(signature) if signature else None
        self.call: CallNode | None = None
        known: dict[int, SavedInput] = {}
        objects: dict[int, SavedObject] = {}
        kept_leaves = [*leaves]
        for position, leaf in enumerate(leaves):
            plain = type(leaf) is torch.Tensor  # checked first: isinstance(leaf, Parameter) is slow
            if plain or (isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)):
                kept = known.get(id(leaf))
                if kept is None:
                    known[id(leaf)] = kept = SavedInput(leaf, position)
                elif self.signature is not None:  # the function may check whether two of its arguments are one tensor
                    self.signature += ((position, kept.position),)
                kept_leaves[position] = kept
            elif self._spec is not None and is_kept_object(leaf):
                kept_leaves[position] = objects[id(leaf)] = objects.get(id(leaf)) or SavedObject(leaf)
        self.tensors = list(known.values())
        self._objects = list(objects.values())
        self._leaves: list[Any] | None = kept_leaves

    def shared(self) -> list[Any]:
        """Return the functions, methods and random generators among the arguments: recomputation gets the same ones."""
        leaves = self._leaves if self._spec is not None else None
        return [leaf for leaf in leaves or () if type(leaf) in FUNCTIONS or is_random_source(leaf)]

    def tensors_in_objects(self) -> dict[int, torch.Tensor]:
        """Return the tensors that objects among the arguments held when this was made, by id."""
        return {key: tensor for kept in self._objects for key, tensor in kept.tensors.items()}

    def _look_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        identity = FunctionFingerprint()
        identity.look_at(args, kwargs)
        self.owners = tuple(identity.owners)
        return identity.parts if identity.is_known else []

    def store(self, input_storing: InputStoring, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> None:
        """Before the forward: copy the chosen inputs to their store.

        ``args`` and ``kwargs`` are those of the constructor. ``path`` names the region.
        """
        assert self._leaves is not None, "stored after they were dropped"
        leaves = self.leaves_of(args, kwargs)
        self.call = call = CallNode()
        for position in input_storing.choose(leaves):
            kept = self._leaves[position]
            if kept.stored is None:
                name = partial(argument_name, args, kwargs, position)
                kept.stored = StoredInput(leaves[position], input_storing.store, call, (path, position), name)

    def follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward: find the calls before this one, to which backward comes next."""
        self.call = self.call or CallNode()
        for leaf in self.leaves_of(args, kwargs):
            if isinstance(leaf, torch.Tensor):
                self.call.follow(leaf)

    def leaves_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the leaves of the call, each at its position. ``args`` and ``kwargs`` are those of the constructor."""
        return [*args, *kwargs.values()] if self._spec is None else tree_leaves((args, kwargs))

    def finish(self, output: Any) -> None:
        """After ``close``, if ``store`` or ``follow`` was called: mark the results; see Note [Order of backward]."""
        if self.call is not None:
            self.call.mark(tree_leaves(output))

    def close(self, hooks: PackHooks | None, path: str) -> None:
        """At the end of the forward: check versions, and pass the data to the surrounding hooks."""
        for kept in self.tensors:
            kept.check_writes(self.tensors, path)
        for kept in self.tensors:
            kept.close(hooks)

    def without_copy(self) -> dict[int, SavedInput]:
        """Return the inputs of which there is no copy and whose version has not moved, by storage address."""
        return {
            address: kept
            for kept in self.tensors
            if kept.spare is None and not kept.was_changed
            for address in kept.sizes()
        }

    def copy(self, address: int | None = None) -> None:
        """See ``SavedLeaves``. A copy in a store is enough if it is the only input in that storage."""
        inside = [kept for kept in self.tensors if not kept.written and address in kept.sizes()]
        if len(inside) == 1 and inside[0].stored is not None:
            inside[0].stored.tensor.settle()
            inside[0].written = True
        else:
            super().copy(address)

    def rebuild(
        self, path: str, start: Start | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[int, torch.Tensor]]]:
        """Return ``(args, kwargs)`` for one recomputation, and the tensors as (position, tensor).

        ``start`` is called with the new leaf and the position of each input that needs a gradient; the recomputation
        gets the tensor that it returns.
        """
        if self._leaves is None:
            raise AssertionError("a region's inputs were used after they were dropped")
        storages: dict[int, torch.UntypedStorage] = {}
        fetched = {kept.stored: kept.stored.fetch() for kept in self.tensors if kept.stored is not None}
        again = {kept: kept.rebuild(storages, fetched, path, start) for kept in self.tensors}
        objects = {kept: kept.rebuild() for kept in self._objects}
        leaves = [
            again[leaf] if isinstance(leaf, SavedInput) else objects[leaf] if isinstance(leaf, SavedObject) else leaf
            for leaf in self._leaves
        ]
        args, kwargs = self.unflatten(leaves)
        for stored in fetched:
            stored.tensor.prefetch()
        return args, kwargs, [(kept.position, again[kept]) for kept in self.tensors]

    def unchanged(self) -> dict[int, torch.Tensor] | None:
        """Return the data of the tensors, by position, if nothing has to be done to rebuild them; None otherwise."""
        found: dict[int, torch.Tensor] = {}
        for kept in self.tensors:
            value = kept.value
            if type(value) is not torch.Tensor or kept.stored is not None or kept.written:
                return None
            if kept.was_changed or (kept.spare is not None and kept.spare.was_changed):
                return None
            found[kept.position] = value
        return found

    def unflatten(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` with these leaves."""
        if self._spec is not None:
            return tree_unflatten(leaves, self._spec)  # type: ignore[no-any-return]
        split = len(leaves) - len(self._keywords)
        return tuple(leaves[:split]), dict(zip(self._keywords, leaves[split:], strict=True))

    def bytes(self) -> tuple[int, int]:
        """Return the bytes held on devices (whole storages, each counted once), and on the host for a device."""
        sizes: dict[int, int] = {}
        host: dict[int, int] = {}
        for kept in self.tensors:
            if kept.stored is not None:
                sizes[id(kept.stored)], host[id(kept.stored)] = kept.stored.bytes()
            else:
                sizes.update(kept.sizes())
        return sum(sizes.values()), sum(host.values())

    def bytes_among(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of the inputs' storages that hold some of ``tensors``, each counted once."""
        held = {address for tensor in tensors for address in storage_sizes(tensor)}
        return sum(size for address, size in self.sizes().items() if address in held)

    def drop(self) -> None:
        """Release the data: no recomputation will come."""
        for kept in self.tensors:
            if kept.stored is not None:
                kept.stored.drop()
        self._leaves, self.tensors, self._objects = None, [], []


def argument_name(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> str:
    """Return how a call writes the leaf at ``position``: ``args[0]``, ``kwargs['mask']``, ``args[1]['x']``."""
    path, _ = tree_flatten_with_path((args, kwargs))[0][position]
    return ("kwargs" if keystr(path[:1]) == "[1]" else "args") + keystr(path[1:])
