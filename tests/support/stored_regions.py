"""Programs as regions with a store, and the plain run: what differs."""

from __future__ import annotations

from typing import Any

import torch

import sac
from sac.full import FullConfig
from tests.support.cases import CASES, Program, Run, Seen
from tests.support.training import nearly_same, new_tensors_in, same_bits

HERE = ("whole", "host", "contiguous")
OVER_RANKS = ("scattered", "scattered+host", "scattered+contiguous")
MODES = {"non-reentrant": False, "reentrant": True}
SEVERAL_SIZES = ("sizes_that_do_not_divide", "views", "strided", "micro_batches_in_flight")
RUNS = 3  # the first call of a function is run in another way than later ones


def plainly(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def as_region(store: str, reentrant: bool = False, group: Any = None, *, draws: bool = True, **more: Any) -> Run:
    """Return what calls a function as a region. ``draws``: whether random states are preserved."""
    config = FullConfig(store=store, num_checkpoints=8 if "contiguous" in store else None, **more)

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        ours = {"use_reentrant": reentrant, "tp_group": group, "preserve_rng_state": draws, "config": config}
        return sac.checkpoint(function, *args, **ours, **kwargs)

    return run


def seeded(program: Program, run: Run) -> Seen:
    torch.manual_seed(3)
    return program(run)


def differences(plain: Seen, ours: Seen, *, exact: bool = True) -> list[str]:
    """Names of what differs."""
    if plain.keys() != ours.keys():
        return sorted(plain.keys() ^ ours.keys())
    return [name for name in plain if not (same_bits if exact else nearly_same)(plain[name], ours[name])]


def wrong(program: Program, run: Run, *, exact: bool = True) -> list[str]:
    """Names of what differs from the plain run, in any of some runs; in float64 up to rounding if not ``exact``."""
    with new_tensors_in(torch.float32 if exact else torch.float64):
        right = seeded(program, plainly)
        return [name for _ in range(RUNS) for name in differences(right, seeded(program, run), exact=exact)]


def compare(name: str, store: str, reentrant: bool, group: Any = None, **more: Any) -> list[str]:
    """Run a case plainly and as regions."""
    exact = not (reentrant and CASES[name].rounds)
    return wrong(CASES[name].program, as_region(store, reentrant, group, **more), exact=exact)


def does_not_fit(mode: str, store: str, name: str, keep: str = "first") -> bool:
    """One buffer has slots of one size: what happens with others is told in test_contiguous."""
    return "contiguous" in store and name in SEVERAL_SIZES
