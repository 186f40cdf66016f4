"""What a mode owes in a stack of several ranks: equal training, and the FLOPs, bytes and collectives that are due.

A stack is `module:function` below tests/stacks; the function trains in one mode on each rank and returns an `Outcome`.
Kept bytes are compared by the rank that saw the fewest: now and then one of gloo's threads frees a buffer, which the
profiler of the training thread does not see.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from tests.stacks.composition import Outcome, differences
from tests.support.ranks import run_ranks


@functools.cache
def outcomes(stack: str, mode: str, world: int = 2, **options: Any) -> list[Outcome]:
    """What each rank has after training in `mode`."""
    return run_ranks(world, _train, stack, mode, options)


def _train(stack: str, mode: str, options: dict[str, Any]) -> Outcome:
    module, _, function = stack.partition(":")
    found: Outcome = getattr(importlib.import_module(f"tests.stacks.{module}"), function)(mode, **options)
    return found


def flops(stack: str, mode: str, **options: Any) -> list[int]:
    return [one.flops for one in outcomes(stack, mode, **options)]


def sent(stack: str, mode: str, **options: Any) -> list[dict[str, int]]:
    return [one.collectives for one in outcomes(stack, mode, **options)]


def kept_bytes(stack: str, mode: str, **options: Any) -> int:
    return min(one.kept_bytes for one in outcomes(stack, mode, **options))


def assert_same(stack: str, mode: str, **options: Any) -> None:
    """All that every rank shows is, bit for bit, that of the same run without checkpointing."""
    plain, ours = outcomes(stack, "none", **options), outcomes(stack, mode, **options)
    assert [differences(one, reference) for one, reference in zip(ours, plain, strict=True)] == [[]] * len(plain)


def assert_between(found: list[int], least: list[int], most: list[int]) -> None:
    assert all(a <= b < c for a, b, c in zip(least, found, most, strict=True)), (least, found, most)


def assert_composes(stack: str, mode: str, **options: Any) -> None:
    """Training is that without checkpointing, and the figures are those of the mode, which its name tells.

    Full runs, keeps and sends what torch's own full checkpoint does. Saving everything runs, keeps and sends what there
    is without checkpointing: no weight is gathered again. Selective lies between the two in FLOPs and bytes, and sends
    no more than full. Inputs on the host cost no FLOPs; scattered ones fewer bytes besides.
    """
    assert_same(stack, mode, **options)
    how, _, where = mode.partition(", ")
    all_flops, all_sent = flops(stack, mode, **options), sent(stack, mode, **options)
    kept = kept_bytes(stack, mode, **options)
    if where in ("scattered", "inputs on the host"):
        assert all_flops == flops(stack, how, **options)
        assert where != "scattered" or kept < kept_bytes(stack, how, **options)
        return
    none, full = ((flops(stack, one, **options), kept_bytes(stack, one, **options)) for one in ("none", "torch full"))
    if how == "full":
        assert all_flops == full[0] != none[0]
        assert kept <= full[1] < none[1]
        assert all_sent == sent(stack, "torch full", **options)
    elif where == "everything":
        assert all_flops == none[0]
        assert kept <= none[1]
        assert all_sent == sent(stack, "none", **options)
    else:
        if how == "whole modules":
            assert all_flops == none[0] != full[0], "all products are in saved modules"
        else:
            assert_between(all_flops, none[0], full[0])
        if how != "whole modules" or "bf16" not in options:  # activations of that size are below the random states
            assert full[1] < kept < none[1]
        for ours, of_torch in zip(all_sent, sent(stack, "torch full", **options), strict=True):
            assert all(count <= of_torch.get(name, 0) for name, count in ours.items())
