"""Programs as regions with a store, and the plain run: what differs."""

from __future__ import annotations

from typing import Any

import torch

import sac
from sac.full import FullConfig
from tests.support.cases import CASES, Case, Run, Seen
from tests.support.training import nearly_same, new_tensors_in, same_bits

HERE = ("whole", "host", "contiguous", "contiguous+host")
OVER_RANKS = ("scattered", "scattered+host", "scattered+contiguous")
MODES = {"non-reentrant": False, "reentrant": True}
SEVERAL_SIZES = ("sizes_that_do_not_divide", "views", "strided", "micro_batches_in_flight")


def plainly(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def as_region(store: str, reentrant: bool, one: Case | None = None, group: Any = None, **more: Any) -> Run:
    config = FullConfig(store=store, num_checkpoints=8 if "contiguous" in store else None, **more)
    tracker = one.tracker if one is not None else None

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        ours = {"use_reentrant": reentrant, "tp_group": group, "get_rng_state_tracker": tracker, "config": config}
        return sac.checkpoint(function, *args, **ours, **kwargs)

    return run


def differences(plain: Seen, ours: Seen, *, exact: bool = True) -> list[str]:
    """Names of what differs."""
    if plain.keys() != ours.keys():
        return sorted(plain.keys() ^ ours.keys())
    return [name for name in plain if not (same_bits if exact else nearly_same)(plain[name], ours[name])]


def compare(name: str, store: str, reentrant: bool, group: Any = None, **more: Any) -> list[str]:
    """Run a case plainly, and thrice as regions: the first call of a function is run in another way than later ones."""
    one = CASES[name]
    exact = not (reentrant and one.rounds)
    run = as_region(store, reentrant, one, group, **more)
    wrong = []
    with new_tensors_in(torch.float32 if exact else torch.float64):
        torch.manual_seed(3)
        plain = one.program(plainly)
        for turn in range(3):
            torch.manual_seed(3)
            found = differences(plain, one.program(run), exact=exact)
            wrong += [f"run {turn}: {what}" for what in found]
    return wrong


def does_not_fit(mode: str, store: str, name: str) -> bool:
    """One buffer has slots of one size: what happens with others is told in test_contiguous."""
    return "contiguous" in store and name in SEVERAL_SIZES
