"""What to do about a recomputation that is not like its forward: one text per kind of difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from sac.errors import RegionError
from sac.region.settings import Settings

OTHER_PATH = (
    "recomputation took another path through the region's Python than forward did: look for a branch that reads a "
    "counter, a cache or a global, and pass what it reads as an argument"
)
OTHER_KIND = (
    "the region found another tensor than in forward, or one of another shape, dtype or device: do not move, cast or "
    "exchange between forward and backward what it uses (modules, attributes, globals)"
)
OTHER_VALUE = (
    "the region computed with other tensors than in forward, or in another order: do not exchange between forward and "
    "backward what it uses (data of a weight, attributes, globals), or pass it as an argument"
)
OTHER_WRITE = "let the region write in both passes or in neither: look for a branch in front of the write"
OTHER_LAYOUT = "let the region make its results in the same way in both passes: look for a branch that decides how"
WRITTEN_LATER = "do not write to the region's result, nor to what it is a view of, before backward"
_NO_RANDOM_STATE = "; preserve_rng_state is off: turn it on if the region draws random numbers"

Bound = tuple[tuple[str, CellType, int], ...]


def closure_of(function: Callable[..., Any]) -> Bound:
    """Return the variables that a Python function closes over, with what identifies their values now."""
    inner: Any = function
    while type(inner) is partial:
        inner = inner.func
    if type(inner) is MethodType:
        inner = inner.__func__
    cells = inner.__closure__ if type(inner) is FunctionType else None
    if not cells:
        return ()
    return tuple((name, cell, _identity_of(cell)) for name, cell in zip(inner.__code__.co_freevars, cells, strict=True))


def _identity_of(cell: CellType) -> int:
    try:
        return id(cell.cell_contents)
    except ValueError:  # not yet bound
        return 0


def _rebound(closure: Bound) -> Iterator[str]:
    return (name for name, cell, identity in closure if _identity_of(cell) != identity)


def advised(error: RegionError, path: str, closure: Bound, settings: Settings) -> RegionError:
    """Return ``error`` of the region ``path`` with advice that fits what is known of the call besides.

    ``closure``: what ``closure_of`` returned in the forward.
    """
    names = ", ".join(f"`{name}`" for name in _rebound(closure))
    general = (OTHER_PATH, OTHER_KIND, OTHER_VALUE)
    problems = []
    for problem in error.problems:
        fix = problem.fix
        if problem.where == (path or "region") and fix in general:
            if names:
                fix = (
                    f"{names} of the function's closure is something else now than in forward: bind it when the "
                    "function is made, by functools.partial or a default argument (lambda x, layer=layer: …)"
                )
            elif not settings.preserve_rng_state:
                fix += _NO_RANDOM_STATE
        problems.append(replace(problem, fix=fix))
    return error if tuple(problems) == error.problems else type(error)(problems)
