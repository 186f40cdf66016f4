"""Tensor, sequence, context, expert and pipeline parallel models on two ranks, and with FSDP2 on four."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sac.errors import RegionError
from tests.stacks.composition import Outcome, differences, least_kept
from tests.stacks.model_parallel import tensor_parallel
from tests.stacks.registry import row, trained
from tests.support.blocks import policy, save
from tests.support.ranks import run_ranks

TP = "model_parallel:tensor_parallel"
SAVE_COLLECTIVES = {"mode": "selective", "policy": policy(save("collective"))}
SAVE_PRODUCTS = {"mode": "selective", "policy": policy(save("matmul"))}
SCATTERED = {"mode": "full", "distribute_saved_activations": True}


def on_each_rank(function: str, *modes: Any, **options: Any) -> Iterator[tuple[Outcome, ...]]:
    """What each rank has after training in each mode, which is that of the first mode."""
    plain, *found = (trained(row(function, 2, **options), mode) for mode in modes)
    for ours in found:
        assert [differences(one, reference) for one, reference in zip(ours, plain, strict=True)] == [[]] * 2
    return zip(plain, *found, strict=True)


@pytest.mark.parametrize("kind", ["sequence", "dtensor"])  # replicated: TP in the matrix
def test_a_saved_collective_is_not_sent_again(kind: str) -> None:
    """A policy that saves collectives sends none of them again; one that saves the products sends all.

    Full runs and sends what torch's own does; replay runs no product again that only a kept value was made from.
    """
    modes = ("none", "full", "torch full", SAVE_COLLECTIVES, SAVE_PRODUCTS)
    for plain, full, of_torch, saved, again in on_each_rank(TP, *modes, kind=kind):
        assert plain.collectives == saved.collectives != full.collectives == of_torch.collectives == again.collectives
        assert plain.flops < saved.flops <= full.flops == of_torch.flops


def test_inputs_that_are_shares_already_are_kept_as_they_are() -> None:
    """A DTensor tells by itself that it is split over the group."""
    for _, full, scattered in on_each_rank(TP, "none", "full", SCATTERED, kind="dtensor"):
        assert scattered.collectives == full.collectives


def test_plain_tensors_that_are_shares_are_found_out_in_forward() -> None:
    told = run_ranks(2, refused, SCATTERED)
    assert told[0] == told[1]
    assert "argument 0: its shape, strides, dtype or values differ between the 2 ranks of the group" in told[0]


def refused(mode: object) -> str:
    with pytest.raises(RegionError) as error:
        tensor_parallel(mode, kind="sequence")
    return str(error.value)


def test_routed_tokens_are_sent_once_in_every_mode_full_included() -> None:
    """Routing is kept in any case, the all-to-alls with it: uneven ones would not fit if a second run routed anew."""
    modes = ("none", "full", SAVE_COLLECTIVES, "torch full")
    ranks = list(on_each_rank("model_parallel:experts", *modes))
    for plain, full, saved, of_torch in ranks:
        assert of_torch.collectives == {"gloo:all_to_all": 9 + 2 * 3}  # what is spared: three in each block
        for ours in (full, saved):
            assert ours.collectives == plain.collectives
            assert 0 < ours.flops <= of_torch.flops
    plain, *recomputed, _ = ([*outcomes] for outcomes in zip(*ranks, strict=True))
    assert all(least_kept(ours, plain) < 1 for ours in recomputed)


def test_attention_that_is_recomputed_sends_its_ring_again() -> None:
    """The ring is inside the one attention op that regions see: kept and sent again together with that."""
    for plain, full, again in on_each_rank("ring_attention:context_parallel", "none", "full", SAVE_PRODUCTS):
        assert plain.collectives != full.collectives == again.collectives
        assert again.flops < full.flops


def test_two_parts_of_backward_share_what_one_of_them_recomputed() -> None:
    """torch's checkpoint runs a region anew for each group of parameters, and keeps what it made for each."""
    plain, once = total_flops("none", "full", schedule="ScheduleInterleaved1F1B", dropout=0.1)
    region = once - plain
    schedule = "ScheduleInterleavedZeroBubble"
    plain, ours, of_torch = total_flops("none", "full", "torch full", schedule=schedule, dropout=0.1)
    assert region <= ours - plain <= 2 * region < of_torch - plain


def total_flops(*modes: str, **options: Any) -> list[int]:
    """Of all ranks, in each mode."""
    return [
        sum(one.flops for one in ranks)
        for ranks in zip(*on_each_rank("pipelines:pipeline", *modes, **options), strict=True)
    ]
