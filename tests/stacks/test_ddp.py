"""DistributedDataParallel: regions before and after it, unused parameters, static graphs, accumulated gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stacks.composes import assert_composes, assert_full_figures, assert_same_gradients, outcomes
from tests.support.ranks import RankError

UNUSED: dict[str, Any] = {"block": "two ways", "find_unused_parameters": True}


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("full", {}),
        ("selective", {}),
        ("full", {"static_graph": True}),
        ("selective", {"micro_batches": 2}),
        ("selective", {"static_graph": True, "order": "after"}),
        ("full", {"find_unused_parameters": True}),
        ("full", {"gradient_as_bucket_view": True, "order": "after"}),
        ("selective", {"frozen": ("embed", "blocks.0", "mlp")}),
    ],
    ids=str,
)
def test_composes(mode: str, options: dict[str, Any]) -> None:
    assert_composes("ddp", mode, **options)


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("full", {}),
        ("full, inputs on the host", {}),
        ("selective", {"order": "after", "micro_batches": 2}),
        ("full", {"order": "after", "micro_batches": 2}),
    ],
    ids=str,
)
def test_branches_that_ranks_choose_apart_and_parameters_that_nothing_uses(mode: str, more: dict[str, Any]) -> None:
    options = UNUSED | more
    assert_same_gradients("ddp", mode, **options)
    ours, plain = outcomes("ddp", mode, **options)[0], outcomes("ddp", "none", **options)[0]
    assert ours.flops > plain.flops if mode == "full" else ours.flops >= plain.flops
    assert ours.collectives == plain.collectives
    assert not any("unused" in name for name in ours.gradients)
    assert {"left", "right"} <= {part for name in ours.gradients for part in name.split(".")}


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"micro_batches": 2}], ids=str)
def test_reentrant(options: dict[str, Any]) -> None:
    assert_same_gradients("ddp", "full, reentrant", **options)
    assert_full_figures("ddp", "full, reentrant", **options)


def test_reentrant_with_unused_parameters_is_refused_by_ddp_itself() -> None:
    """DDP looks for unused parameters in the graph after forward, in which a reentrant region has none: its error."""
    with pytest.raises(RankError, match="has been marked as ready twice"):
        outcomes("ddp", "full, reentrant", **UNUSED)


def test_inputs_scattered_over_the_ranks() -> None:
    """The ranks have the same data, as tensor-parallel ones do; each keeps its half of the inputs."""
    assert_same_gradients("ddp", "selective, scattered", same_data=True)
    ours, kept_whole = (outcomes("ddp", mode, same_data=True)[0] for mode in ("selective, scattered", "selective"))
    assert ours.kept_bytes < kept_whole.kept_bytes
    assert ours.flops == kept_whole.flops
