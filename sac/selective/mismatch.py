"""The message for a saved value that recomputation cannot be matched with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sac.errors import Problem
from sac.region.advice import OTHER_PATH, OTHER_VALUE
from sac.region.storages import describe
from sac.selective.record import SavedValue
from sac.selective.table import Plan, plan_name


def unmatched_problem(path: str, value: SavedValue, rivals: Sequence[tuple[Plan, Any]]) -> Problem:
    """Return the problem that ``value``'s call did not come again in recomputation; ``rivals`` came instead."""
    module = value.plan.path or "the region itself"
    forward = ", ".join(_argument(part) for part in value.description)
    if rivals:
        seen = f"in recomputation with ({', '.join(_argument(part) for part in rivals[0][1])})"
    else:
        seen = "in recomputation not at all"
    return Problem(
        where=path or "region",
        found=f"call {value.call} of {plan_name(value.plan)} in {module} ran in forward with ({forward}) and {seen}",
        fix=OTHER_VALUE if rivals else OTHER_PATH,
    )


def swapped_problem(
    path: str, place: int, tensor: torch.Tensor, forward: Plan | None, recomputed: Plan | None
) -> Problem:
    """Return the problem that recomputation saves another value than forward did as the ``place``-th.

    ``forward`` and ``recomputed`` are the plans of the ops that made the two, where an op did.
    """
    return Problem(
        where=path or "region",
        found=f"saved tensor {place} was {_made_by(forward)} in forward; in recomputation it is "
        f"{_made_by(recomputed)}, "
        f"{describe(tensor)}, computed from other values",
        fix=OTHER_VALUE,
    )


def overwritten_problem(path: str, op: Any) -> Problem:
    """Return the problem that a result of ``op``, which chooses, was overwritten unseen, and that it chooses anew."""
    return Problem(
        where=path or "region",
        found=f"what {op} returned in forward was overwritten afterwards by something that is not an op (NumPy, or a "
        "kernel on raw pointers), and the op returns something else in recomputation",
        fix="write to a copy of it",
    )


def _made_by(plan: Plan | None) -> str:
    if plan is None:
        return "an input, a parameter or a part of an op's result"
    return f"the result of {plan_name(plan)} in {plan.path or 'the region itself'}"


def _argument(description: Any) -> str:
    if _is_tensor(description):
        label, foreign, _ = description
        shape, dtype = _sort(description)
        origin = "from outside" if foreign else f"value {label & 0xFFFF:04x}"
        return f"{str(dtype).removeprefix('torch.')}{shape if isinstance(shape, str) else list(shape)} {origin}"
    if isinstance(description, tuple):
        return "[" + ", ".join(_argument(part) for part in description) + "]"
    return str(description)


def agree(forward: Any, recomputed: Any, *, closely: bool = True) -> bool:
    """Return whether two argument descriptions may mean the same call: equal but for labels that are foreign.

    Not ``closely``: tensors need only have the same shapes and dtypes.
    """
    if len(forward) != len(recomputed):
        return False
    for one, other in zip(forward, recomputed, strict=True):
        if _is_tensor(one) and _is_tensor(other):
            if not (_may_be_same(one, other) if closely else _sort(one) == _sort(other)):
                return False
        elif isinstance(one, tuple) and isinstance(other, tuple):
            if not agree(one, other, closely=closely):
                return False
        elif one != other:
            return False
    return True


def _may_be_same(one: Any, other: Any) -> bool:
    return bool(one[2] == other[2] and (one[0] == other[0] or one[1] or other[1]))


def _sort(description: Any) -> tuple[Any, torch.dtype]:
    metadata = description[2]
    return metadata[0], next(part for part in metadata if isinstance(part, torch.dtype))


def _is_tensor(description: Any) -> bool:
    return isinstance(description, tuple) and len(description) == 3 and isinstance(description[1], bool)
