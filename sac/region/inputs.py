"""The inputs of a region, kept from forward to backward so that the region can be run again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from sac.errors import Problem, RegionError
from sac.region.detach import copy_of, version_watch
from sac.region.gathering import Call
from sac.region.identity import Identity
from sac.region.parking import PackHooks, Parked, fetch, park
from sac.region.parts import PLAIN, sort_of
from sac.region.placements import Keeping, Stored
from sac.region.release import check_releasable, is_worth_it
from sac.region.state import UnseenWriteError
from sac.region.storages import describe, storage_sizes, version_of

Start = Callable[[torch.Tensor, int], torch.Tensor]


class _Alias(torch.autograd.Function):
    """The same tensor as a non-leaf, which a region may write to in place as it did in the forward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class _KeptTensor:
    """One tensor input: the data, whether it needs a gradient, and its version when the forward had ended.

    ``data`` is the caller's, or a copy if the region writes to it, or what hooks around the region made of it. Where a
    copy was ``stored`` before the forward, ``data`` goes when the forward is over.
    """

    __slots__ = ("alias", "data", "needs_grad", "position", "stored", "version", "written")

    def __init__(self, tensor: torch.Tensor, position: int) -> None:
        self.position = position
        self.needs_grad = tensor.requires_grad
        self.alias: torch.Tensor | None = tensor.detach() if tensor.requires_grad else tensor
        self.data: torch.Tensor | Parked | None = self.alias
        self.version = version_of(tensor)
        self.written = False
        self.stored: Stored | None = None

    @property
    def was_changed(self) -> bool:
        """Whether the caller's data was written to since the region began, unseen by the recorder."""
        return self.alias is not None and version_of(self.alias) != self.version

    def copy_onto(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Keep a copy of the data from here on; ``storages`` holds the copies made so far."""
        assert isinstance(self.data, torch.Tensor)
        if self.stored is not None:
            self.stored.drop()
            self.stored = None
        self.data, self.alias, self.written = _copied(self.data, storages), None, True

    def close(self, hooks: PackHooks | None, path: str) -> None:
        """The forward is over: check the version, or be content with what is stored."""
        was_changed = self.was_changed
        # A copy to the host is made while the region runs: a write that nobody saw coming may have been before it.
        if was_changed and not self.written and (self.stored is None or self.stored.bytes()[1]):
            assert self.alias is not None
            raise UnseenWriteError(
                Problem(
                    where=path or "region",
                    found=f"the region wrote to its input {self.position} ({describe(self.alias)}) in place, "
                    "unseen by the recorder",
                    fix="clone the input inside the region before writing to it",
                )
            )
        if self.stored is not None:
            self.written = self.written or was_changed
            self.alias = self.data = None
            self.stored.close(hooks)
        elif hooks is not None and isinstance(self.data, torch.Tensor):
            self.data = park(self.data, hooks)
            self.alias = version_watch(self.alias) if self.alias is not None else None  # what holds data is the hooks'

    def rebuild(
        self,
        storages: dict[int, torch.UntypedStorage],
        fetched: dict[Stored, torch.Tensor],
        path: str,
        start: Start | None,
    ) -> torch.Tensor:
        """Return the input for one recomputation; ``storages`` holds the copies made for it so far."""
        data = fetched[self.stored] if self.stored is not None else self._checked(path)
        if self.written and (self.stored is None or not self.stored.placed.fresh):
            data = _copied(data, storages)  # the recomputation will write to it too, and may not be the last
        if not self.needs_grad:
            return data.detach() if data.requires_grad else data  # the caller may have asked for a gradient since
        leaf = data.detach().requires_grad_()
        if start is not None:
            return start(leaf, self.position)
        return _Alias.apply(leaf) if self.written else leaf  # type: ignore[no-untyped-call]

    def _checked(self, path: str) -> torch.Tensor:
        assert self.data is not None
        data = fetch(self.data)
        if self.was_changed:
            assert self.alias is not None
            raise RegionError(
                Problem(
                    where=path or "region",
                    found=f"input {self.position} ({describe(data)}) was changed in place after the forward: it is at "
                    f"version {version_of(self.alias)}, backward expects version {self.version}",
                    fix="do not write to the input of a checkpointed region before backward, or pass a clone",
                )
            )
        return data


def _copied(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return ``tensor`` on a copy of its storage, the same copy for all tensors that share one."""
    if type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    storage = tensor.untyped_storage()
    copy = storages.setdefault(storage._cdata, copy_of(storage))
    return tensor.new_empty(0).set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())


class KeptInputs:
    """Arguments of one region call in any structure; tensors are kept without their graph.

    ``kind`` says what sort of inputs these are (Note [Which function is it]): equal for equal uses, None where no other
    use can be known to be equal. ``owners``: modules among the arguments that have buffers or parameters. A tensor
    that is passed more than once is kept once, under its first position, and is one tensor again in recomputation.
    """

    __slots__ = ("_call", "_keywords", "_leaves", "_spec", "kind", "owners", "tensors")

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
        known: dict[int, _KeptTensor] = {}
        kept_leaves = [*leaves]
        for position, leaf in enumerate(leaves):
            plain = type(leaf) is torch.Tensor  # asked first: whether it is a Parameter is a question that costs
            if plain or (isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter)):
                kept = known.get(id(leaf))
                if kept is None:
                    known[id(leaf)] = kept = _KeptTensor(leaf, position)
                elif self.kind is not None:  # the function may ask whether two of its arguments are one
                    self.kind += ((position, kept.position),)
                kept_leaves[position] = kept
        self.tensors = list(known.values())
        self._leaves: list[Any] | None = kept_leaves

    def _look_at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        identity = Identity()
        identity.add(args)
        identity.add(kwargs)
        self.owners = tuple(identity.owners)
        return identity.parts if identity.is_known else []

    def store(self, keeping: Keeping, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward: copy the chosen inputs to where they are to lie. ``args`` and ``kwargs`` as before."""
        assert self._leaves is not None, "stored after they were dropped"
        leaves = self.leaves_of(args, kwargs)
        self._call = call = Call()
        for position in keeping.choose(leaves):
            kept = self._leaves[position]
            if kept.stored is None:
                name = partial(argument_name, args, kwargs, position)
                if keeping.release:
                    check_releasable(leaves[position], leaves, name)
                kept.stored = Stored(leaves[position], keeping.placement, call, name)

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
            kept.close(hooks, path)

    def copy_storage(self, address: int) -> None:
        """The region is about to write to this storage: keep copies of the inputs that lie in it."""
        inside = [
            kept
            for kept in self.tensors
            if not kept.written and isinstance(kept.data, torch.Tensor) and address in storage_sizes(kept.data)
        ]
        if inside and inside[0].stored is not None and all(kept.stored is inside[0].stored for kept in inside):
            inside[0].stored.placed.settle()
            for kept in inside:
                kept.written = True
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
        leaves = [again[leaf] if isinstance(leaf, _KeptTensor) else leaf for leaf in self._leaves]
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

    def drop(self) -> None:
        """Let the data go: no recomputation will come."""
        for kept in self.tensors:
            if kept.stored is not None:
                kept.stored.drop()
        self._leaves, self.tensors = None, []


def argument_name(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> str:
    """Return how a call writes the leaf at ``position``: ``args[0]``, ``kwargs['mask']``, ``args[1]['x']``."""
    path, _ = tree_flatten_with_path((args, kwargs))[0][position]
    return ("kwargs" if keystr(path[:1]) == "[1]" else "args") + keystr(path[1:])
