"""Modules of which their classes tell that no call of them may go without a recorder."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from torch import nn

from sac.region.parts import by_class, names_in

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
