"""What a mode owes in a model-parallel stack in addition to equal gradients: exact FLOPs and collectives.

Kept bytes are compared by the rank that saw the fewest: now and then one of gloo's threads frees a buffer, which the
profiler of the training thread does not see.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.stacks.composes import assert_same_gradients, outcomes


def flops(stack: str, mode: str, **options: Any) -> list[int]:
    return [one.flops for one in outcomes(stack, mode, **options)]


def sent(stack: str, mode: str, **options: Any) -> list[dict[str, int]]:
    return [one.collectives for one in outcomes(stack, mode, **options)]


def kept_bytes(stack: str, mode: str, **options: Any) -> int:
    return min(one.kept_bytes for one in outcomes(stack, mode, **options))


def assert_full(stack: str, **options: Any) -> None:
    """Full runs and sends what torch's full checkpoint does, and keeps less than half of what is kept without."""
    assert_same_gradients(stack, "full", **options)
    assert flops(stack, "full", **options) == flops(stack, "torch full", **options)
    assert all(map(int.__gt__, flops(stack, "full", **options), flops(stack, "none", **options)))
    assert sent(stack, "full", **options) == sent(stack, "torch full", **options)
    assert 2 * kept_bytes(stack, "full", **options) < kept_bytes(stack, "none", **options)


def assert_selective(stack: str, **options: Any) -> None:
    """Selective lies between full and none in FLOPs and bytes, and sends what is sent without checkpointing."""
    assert_same_gradients(stack, "selective", **options)
    assert_flops_between(stack, "selective", **options)
    assert sent(stack, "selective", **options) == sent(stack, "none", **options)
    kept = kept_bytes(stack, "selective", **options)
    assert kept_bytes(stack, "full", **options) < kept < kept_bytes(stack, "none", **options)


def assert_flops_between(stack: str, mode: str, **options: Any) -> None:
    """On every rank the mode runs more than no checkpointing and less than full."""
    found = zip(*(flops(stack, one, **options) for one in ("none", mode, "full")), strict=True)
    assert all(plain < ours < full for plain, ours, full in found)


def assert_scattered(stack: str, mode: str, **options: Any) -> None:
    """What is scattered runs what the mode runs, keeps less, and gathers once more for each of the two regions."""
    scattered = f"{mode}, scattered"
    assert_same_gradients(stack, scattered, **options)
    assert flops(stack, scattered, **options) == flops(stack, mode, **options)
    assert kept_bytes(stack, scattered, **options) < kept_bytes(stack, mode, **options)
    more = [Counter(one) + Counter({"gloo:all_gather": 2}) for one in sent(stack, mode, **options)]
    assert [Counter(one) for one in sent(stack, scattered, **options)] == more


def assert_no_more(ours: list[int], theirs: list[int]) -> None:
    """On each rank; replay does not run a product again that only a kept value was made from."""
    assert all(0 < one <= other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


def assert_sent_once(stack: str, **options: Any) -> None:
    """A policy that saves collectives sends none of them again in backward; one that saves the products sends all."""
    for mode in ("collectives saved", "collectives sent again"):
        assert_same_gradients(stack, mode, **options)
    assert sent(stack, "collectives saved", **options) == sent(stack, "none", **options)
    assert_no_more(flops(stack, "collectives saved", **options), flops(stack, "full", **options))
    assert sent(stack, "collectives sent again", **options) == sent(stack, "full", **options)
    assert sent(stack, "full", **options) != sent(stack, "none", **options)
