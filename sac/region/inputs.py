"""The inputs of a region, kept from forward to backward so that the region can be run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from sac.errors import Problem, RegionError

PackHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Parked:
    """A tensor handed to the saved-tensor hooks that stood around the region: they decide where it lies."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]

    def fetch(self) -> torch.Tensor:
        """Return the tensor again."""
        return self.unpack(self.packed)


def park(tensor: torch.Tensor, hooks: PackHooks | None) -> torch.Tensor | Parked:
    """Return ``tensor`` itself, or what the surrounding saved-tensor hooks made of it."""
    return tensor if hooks is None else Parked(hooks[0](tensor), hooks[1])


def fetch(kept: torch.Tensor | Parked) -> torch.Tensor:
    """Return the tensor behind ``kept``."""
    return kept.fetch() if isinstance(kept, Parked) else kept


def surrounding_hooks() -> PackHooks | None:
    """Return the innermost saved-tensor hooks now active (``save_on_cpu``, an outer region), if torch tells them.

    Private name ``_top_saved_tensors_default_hooks`` (torch 2.4 to 2.13): its absence means that the hooks around a
    region do not see what the region keeps, as in ``torch.utils.checkpoint``.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(False) if top is not None else None


class _Alias(torch.autograd.Function):
    """The same tensor as a non-leaf, which a region may write to in place as it did in the forward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class _KeptTensor:
    """One tensor input: the data, whether it needs a gradient, and its version when the forward had ended."""

    __slots__ = ("alias", "data", "needs_grad", "position", "version", "written")

    def __init__(self, tensor: torch.Tensor, position: int) -> None:
        self.position = position
        self.needs_grad = tensor.requires_grad
        self.alias: torch.Tensor | None = tensor.detach() if tensor.requires_grad else tensor
        self.data: torch.Tensor | Parked = self.alias
        self.version = version_of(tensor)
        self.written = False

    def copy_onto(self, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """Return the data on a copy of its storage; ``storages`` holds the copies made so far."""
        return _copied(fetch(self.data), storages)

    def rebuild(self, storages: dict[int, torch.UntypedStorage], path: str) -> torch.Tensor:
        """Return the input for one recomputation; ``storages`` holds the copies made for it so far."""
        data = fetch(self.data)
        if self.alias is not None and version_of(self.alias) != self.version:
            raise RegionError(
                Problem(
                    where=path or "region",
                    found=f"input {self.position} ({describe(data)}) was changed in place after the forward: it is at "
                    f"version {version_of(self.alias)}, backward expects version {self.version}",
                    fix="do not write to the input of a checkpointed region before backward, or pass a clone",
                )
            )
        if self.written:  # the recomputation will write to it too, and may not be the last
            data = _copied(data, storages)
        if not self.needs_grad:
            return data
        leaf = data.detach().requires_grad_()
        return _Alias.apply(leaf) if self.written else leaf  # type: ignore[no-untyped-call]


def _copied(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return ``tensor`` on a copy of its storage, the same copy for all tensors that share one."""
    if type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    storage = tensor.untyped_storage()
    copy = storages.setdefault(storage._cdata, storage.clone())
    return tensor.new_empty(0).set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())


class KeptInputs:
    """Arguments of one region call in any structure; tensors are kept without their graph.

    ``kind`` says what sort of inputs these are (dtypes, shapes, gradients, plain values): equal for equal uses.
    """

    __slots__ = ("_leaves", "_spec", "kind", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._spec = tree_flatten((args, kwargs))
        self.tensors: list[_KeptTensor] = []
        self._leaves: list[Any] | None = leaves
        kind: list[Any] = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                kind.append((type(leaf), leaf.dtype, leaf.shape, leaf.requires_grad))
                if not isinstance(leaf, torch.nn.Parameter):
                    leaves[position] = kept = _KeptTensor(leaf, position)
                    self.tensors.append(kept)
            else:
                kind.append(leaf if type(leaf) in (bool, int, float, str) else type(leaf))
        self.kind = tuple(kind)

    def close(self, hooks: PackHooks | None, path: str) -> None:
        """At the end of the forward: check versions, and hand the data to the surrounding hooks."""
        for kept in self.tensors:
            if kept.alias is not None and version_of(kept.alias) != kept.version:
                raise RegionError(
                    Problem(
                        where=path or "region",
                        found=f"the region wrote to its input {kept.position} ({describe(kept.alias)}) in place, "
                        "unseen by the recorder",
                        fix="clone the input inside the region before writing to it",
                    )
                )
            if hooks is not None and isinstance(kept.data, torch.Tensor):
                kept.data = park(kept.data, hooks)

    def copy_storage(self, address: int) -> None:
        """The region is about to write to this storage: keep copies of the inputs that lie in it."""
        storages: dict[int, torch.UntypedStorage] = {}
        for kept in self.tensors:
            if not kept.written and isinstance(kept.data, torch.Tensor) and address in storage_sizes(kept.data):
                kept.data, kept.written, kept.alias = kept.copy_onto(storages), True, None

    def rebuild(self, path: str) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[int, torch.Tensor]]]:
        """Return ``(args, kwargs)`` for one recomputation, each tensor a fresh leaf, and the tensors by position."""
        if self._leaves is None:
            raise AssertionError("a region's inputs were used after they were dropped")
        storages: dict[int, torch.UntypedStorage] = {}
        leaves = [leaf.rebuild(storages, path) if isinstance(leaf, _KeptTensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs, [(kept.position, leaves[kept.position]) for kept in self.tensors]

    def bytes(self) -> int:
        """Return the bytes of the storages in which the inputs lie, each counted once."""
        sizes: dict[int, int] = {}
        for kept in self.tensors:
            if isinstance(kept.data, torch.Tensor):
                sizes.update(storage_sizes(kept.data))
        return sum(sizes.values())

    def drop(self) -> None:
        """Let the data go: no recomputation will come."""
        self._leaves, self.tensors = None, []


def storage_sizes(tensor: torch.Tensor) -> dict[int, int]:
    """Return the address and the bytes of each storage that holds data of ``tensor``."""
    if type(tensor) is not torch.Tensor and hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return {address: size for name in names for address, size in storage_sizes(getattr(tensor, name)).items()}
    if tensor.layout is not torch.strided:
        return {id(tensor): tensor.numel() * tensor.element_size()}
    storage = tensor.untyped_storage()
    return {storage._cdata: storage.nbytes()}


def shares_storage(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Return whether ``tensor`` lies in a storage in which one of ``others`` lies."""
    mine = storage_sizes(tensor).keys()
    return any(not mine.isdisjoint(storage_sizes(other)) for other in others)


def version_of(tensor: torch.Tensor) -> int:
    """Return the tensor's version counter; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and shape as errors print them: ``float32[2, 8]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
