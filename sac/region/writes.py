"""What a region's ops write to its inputs, and modules that are known to write."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import nn

from sac.errors import Problem, RegionError
from sac.region.fingerprint import by_class, names_in
from sac.tensors import describe, shares_storage

# -- Arguments that a reentrant region has written to: the history that a write without grad mode did not give them

_CLONE = "clone the input inside the region before writing to it"


def give_history(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Let the history of ``tensor``, whose data is right already, be that of ``source``; its base and views follow."""
    _Rewritten.apply(tensor, source)  # type: ignore[no-untyped-call]


class _Rewritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.is_view = tensor._is_view()
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Nothing of what was there before goes on. Of a view, autograd (torch 2.13) wants to hear that in numbers: with
        # None the whole base would get no gradient. See test_a_view_that_the_region_wrote_to.
        return torch.zeros_like(grads[0]) if ctx.is_view else None, grads[0]


def check_writes(written: Mapping[int, torch.Tensor], path: str) -> None:
    """Raise ``RegionError`` if the arguments that a region wrote to, by position, cannot get the history of that."""
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


# -- Modules of which their classes tell that no call of them may go without a recorder

# Note [Known before they run]
#
# Whether a region needs a recorder shows when it runs, but only for the path that it takes then: a layer that is
# skipped in its first call shows nothing. Some things can be known from the code of the region's modules: a name of an
# op that chooses (its result has to be kept, see promise 10), of `rrelu` (it fills what autograd has saved before), and
# layers that write to their own weight (`max_norm`). This costs time where it is wrong, and never a result. What it
# misses is noticed when it happens: see Note [The walk of a region] on unseen writes.

# As the save-set `nondeterministic`, but for `mode`, which is the name of too much else.
_CHOOSING = frozenset(
    {
        *("topk", "sort", "msort", "argsort", "multinomial", "kthvalue", "median", "nanmedian", "argmax", "argmin"),
        *("bincount", "histc", "nonzero", "unique", "unique_consecutive"),
    }
)
_WRITING = frozenset(
    {
        "data",  # what is written through it moves no version
        *("rrelu", "rrelu_", "rrelu_with_noise", "RReLU"),
    }
)


def needs_recorder(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules may choose, fill or write unseen, as far as its class and options tell."""
    modules = tuple(modules)
    return writes_unseen(modules) or any(map(chooses, modules))


def writes_unseen(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules may fill or write unseen, as far as its class and options tell."""
    return any(_class_writes(type(one)) or getattr(one, "max_norm", None) is not None for one in modules)


def chooses(module: nn.Module) -> bool:
    """Return whether the class of ``module`` names an op that chooses."""
    return _class_chooses(type(module))


def _writes(kind: Any) -> bool:
    return issubclass(kind, nn.RReLU) or _names_one_of(_WRITING, kind)


def _chooses(kind: Any) -> bool:
    return _names_one_of(_CHOOSING, kind)


def _names_one_of(names: frozenset[str], kind: Any) -> bool:
    return any(
        not names.isdisjoint(names_in(code))
        for base in kind.__mro__
        if base.__module__.partition(".")[0] != "torch"
        for code in map(_code_of, vars(base).values())
        if code is not None
    )


def _code_of(value: Any) -> types.CodeType | None:
    function = getattr(value, "__func__", value)
    return function.__code__ if type(function) is types.FunctionType else None


_class_writes = by_class(_writes)
_class_chooses = by_class(_chooses)
