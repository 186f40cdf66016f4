"""That a stack composes with us: the gradients without us, and the FLOPs, bytes and collectives that are due."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from tests.stacks.composition import Outcome, differences
from tests.support.ranks import run_ranks


@functools.cache
def outcomes(stack: str, mode: str, world: int = 2, **options: Any) -> list[Outcome]:
    """What each rank has after training in `mode`; `stack` is a function of `data_parallel`, or `module:function`."""
    return run_ranks(world, _train, stack, mode, options)


def _train(stack: str, mode: str, options: dict[str, Any]) -> Outcome:
    module, _, function = stack.rpartition(":")
    train = getattr(importlib.import_module(f"tests.stacks.{module or 'data_parallel'}"), function)
    found: Outcome = train(mode, **options)
    return found


def assert_same_gradients(stack: str, mode: str, **options: Any) -> None:
    """Losses and gradients of every step and rank are, bit for bit, those of the same run without checkpointing."""
    plain, ours = outcomes(stack, "none", **options), outcomes(stack, mode, **options)
    assert [differences(one, reference) for one, reference in zip(ours, plain, strict=True)] == [[]] * len(plain)


def assert_composes(stack: str, mode: str, **options: Any) -> None:
    """Gradients are those without checkpointing, and the figures those of `mode`, "full" or "selective".

    Full runs, keeps and sends what torch's own full checkpoint does; selective runs less and keeps more than that,
    runs more and keeps less than no checkpointing, and sends no more than full.
    """
    assert_same_gradients(stack, mode, **options)
    assert_full_figures(stack, mode, **options) if mode == "full" else assert_figures_between(stack, mode, **options)


def least_kept(of_ranks: list[Outcome]) -> int:
    """The bytes that ranks with equal parts keep. What gloo's thread is the last to release is not seen to be freed."""
    return min(one.kept_bytes for one in of_ranks)


def assert_full_figures(stack: str, mode: str, **options: Any) -> None:
    """A mode that recomputes everything runs and sends what torch's full checkpoint does, and keeps no more."""
    of_torch, ours = outcomes(stack, "torch full", **options)[0], outcomes(stack, mode, **options)[0]
    assert ours.flops == of_torch.flops > outcomes(stack, "none", **options)[0].flops
    assert least_kept(outcomes(stack, mode, **options)) <= least_kept(outcomes(stack, "torch full", **options))
    assert ours.collectives == of_torch.collectives


def assert_figures_between(stack: str, mode: str, **options: Any) -> None:
    """A selective mode lies between no checkpointing and torch's full one, and sends no more than that does."""
    plain, of_torch = outcomes(stack, "none", **options)[0], outcomes(stack, "torch full", **options)[0]
    ours = outcomes(stack, mode, **options)[0]
    assert plain.flops < ours.flops < of_torch.flops
    modes = ("torch full", mode, "none")
    full, selective, nothing = (least_kept(outcomes(stack, one, **options)) for one in modes)
    assert full < selective < nothing
    assert all(count <= of_torch.collectives.get(name, 0) for name, count in ours.collectives.items())


def assert_everything_figures(stack: str, mode: str, **options: Any) -> None:
    """A policy that saves all runs, keeps and sends what there is without checkpointing: nothing is gathered again."""
    plain, ours = outcomes(stack, "none", **options)[0], outcomes(stack, mode, **options)[0]
    assert ours.flops == plain.flops
    assert least_kept(outcomes(stack, mode, **options)) <= least_kept(outcomes(stack, "none", **options))
    assert ours.collectives == plain.collectives
