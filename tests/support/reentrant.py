"""Running programs as reentrant regions, next to the plain run and torch's own reentrant checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sac
from sac.errors import RegionError
from tests.support.cases import Run, Seen
from tests.support.stored_regions import differences, plainly
from tests.support.training import new_tensors_in

RUNS = 3  # the first call of a function is run in another way than later ones


def reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return sac.checkpoint(function, *args, use_reentrant=True, **kwargs)


def non_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return sac.checkpoint(function, *args, **kwargs)


def torch_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Torch's takes no keywords in this mode."""
    return torch_checkpoint(lambda *args: function(*args, **kwargs), *args, use_reentrant=True)


def torch_non_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def seeded(program: Callable[[Run], Seen], run: Run) -> Seen:
    torch.manual_seed(5)
    return program(run)


def wrong(
    program: Callable[[Run], Seen], run: Run = reentrant, oracle: Run = plainly, *, exact: bool = True
) -> list[str]:
    """Names of what differs from the oracle's run, in any of some calls; in float64 up to rounding if not `exact`."""
    with new_tensors_in(torch.float32 if exact else torch.float64):
        right = seeded(program, oracle)
        return [name for _ in range(RUNS) for name in differences(right, seeded(program, run), exact=exact)]


def error_of(action: Callable[[], Any]) -> str:
    """The text of the RegionError that `action` raises."""
    try:
        action()
    except RegionError as error:
        return str(error)
    raise AssertionError("no RegionError")
