"""In-place writes of a region to its inputs, and modules that are known to write."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn

from sac.errors import Problem, RegionError
from sac.region.fingerprint import by_class, names_in
from sac.tensors import describe, shares_storage

# -- History of arguments that a reentrant region wrote to without grad mode

_CLONE = "clone the input inside the region before writing to it"


def give_history(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Give ``tensor``, whose data is already right, the autograd history of ``source``; its base and views follow."""
    _Rewritten.apply(tensor, source)  # type: ignore[no-untyped-call]


class _Rewritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.is_view = tensor._is_view()
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The earlier values get no gradient. For a view, autograd (torch 2.13) needs explicit zeros: with None the
        # whole base would get no gradient. See test_a_view_that_the_region_wrote_to.
        return torch.zeros_like(grads[0]) if ctx.is_view else None, grads[0]


def check_writes(written: Mapping[int, torch.Tensor], path: str) -> None:
    """Raise ``RegionError`` if an argument that a region wrote to cannot get the history of the write.

    ``written``: these arguments by position. ``path`` names the region.
    """
    for position, tensor in written.items():
        if _lies_in_leaf(tensor):
            raise RegionError(
                Problem(
                    where=path or "region",
                    found=f"the region wrote in place to its input {position} ({describe(tensor)}), which lies in a "
                    "leaf that requires grad",
                    fix=_CLONE,
                )
            )
    for (first, one), (second, other) in combinations(written.items(), 2):
        if _overlap(one, other):
            raise RegionError(
                Problem(
                    where=path or "region",
                    found=f"the region wrote in place to memory that its inputs {first} and {second} share",
                    fix=_CLONE,
                )
            )


def _lies_in_leaf(tensor: torch.Tensor) -> bool:
    root = tensor if tensor._base is None else tensor._base
    return root.requires_grad and root.is_leaf


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not shares_storage(one, [other]):
        return False
    if not (type(one) is type(other) is torch.Tensor) or one.dtype != other.dtype:
        return True
    taken = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


# -- Modules that always need a recorder

# Note [Known before they run]
#
# A run shows whether a region needs a recorder, but only for the path that it takes: a layer that is skipped in the
# first call shows nothing. Some cases can be recognised from the region's modules: their code names an op that chooses
# (its result has to be kept, see promise 10) or `rrelu` (it writes to a tensor that autograd has already saved), or a
# layer writes to its own weight (`max_norm`). A false positive costs time but never changes a result. A write that is
# missed here is detected when it happens: see Note [The walk of a region] on unseen writes.

# The save-set `nondeterministic` without `mode`, a name that is also used for many other things.
_CHOOSING = frozenset(
    {
        *("topk", "sort", "msort", "argsort", "multinomial", "kthvalue", "median", "nanmedian", "argmax", "argmin"),
        *("bincount", "histc", "nonzero", "unique", "unique_consecutive"),
    }
)
_WRITING = frozenset(
    {
        "data",  # a write through it does not move the version
        *("rrelu", "rrelu_", "rrelu_with_noise", "RReLU"),
    }
)
_WRITING_BUFFERS_UNSEEN = frozenset(
    {
        *("data", "numpy", "batch_norm", "native_batch_norm", "sync_batch_norm", "SyncBatchNorm"),
        *("cudnn_batch_norm", "miopen_batch_norm", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats"),
    }
)


def writes_unseen(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules may fill or write unseen, according to its class and options."""
    return any(_class_writes(type(one)) or getattr(one, "max_norm", None) is not None for one in modules)


def writes_buffers_unseen(module: nn.Module) -> bool:
    """Return whether ``module`` may write to buffers without moving their versions, as batch norms do."""
    return module.training and bool(getattr(module, "track_running_stats", False) or _class_writes_unseen(type(module)))


def chooses(module: nn.Module) -> bool:
    """Return whether the class of ``module`` names an op that chooses."""
    return _class_chooses(type(module))


def _writes(cls: Any) -> bool:
    return issubclass(cls, nn.RReLU) or _names_one_of(_WRITING, cls)


def _chooses(cls: Any) -> bool:
    return _names_one_of(_CHOOSING, cls)


def _names_one_of(names: frozenset[str], cls: Any) -> bool:
    return any(
        not names.isdisjoint(names_in(code))
        for base in cls.__mro__
        if base.__module__.partition(".")[0] != "torch"
        for code in map(_code_of, vars(base).values())
        if code is not None
    )


def _code_of(value: Any) -> types.CodeType | None:
    function = value.__func__ if type(value) in (classmethod, staticmethod, types.MethodType) else value
    return function.__code__ if type(function) is types.FunctionType else None


_class_writes = by_class(_writes)
_class_chooses = by_class(_chooses)
_class_writes_unseen = by_class(partial(_names_one_of, _WRITING_BUFFERS_UNSEEN))
