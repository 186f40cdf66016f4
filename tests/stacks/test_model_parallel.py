"""Tensor, sequence, context, expert and pipeline parallel models on two ranks, and with FSDP2 on four."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sac.errors import RegionError, SacWarning
from tests.stacks.composes import assert_between, assert_same, flops, kept_bytes, outcomes, sent
from tests.stacks.composition import differences, gradients_of
from tests.stacks.model_parallel import tensor_parallel
from tests.stacks.parallel_llama import Sizes, batch, built, cross_entropy
from tests.stacks.pipelines import SCHEDULES
from tests.stacks.ring_attention import context_parallel
from tests.support.ranks import run_ranks
from tests.support.training import new_tensors_in

TP, PP, CP = "model_parallel:tensor_parallel", "pipelines:pipeline", "ring_attention:context_parallel"
FSDP_TP, FSDP_PP = "model_parallel:fsdp_tp", "pipelines:pipeline_dp"
COLLECTIVES, EXPERTS = "model_parallel:collectives", "model_parallel:experts"
KINDS = ("replicated", "sequence", "dtensor")
KIND = [(TP, {"kind": kind}) for kind in KINDS]
FOUR: dict[str, Any] = {"world": 4, "kind": "replicated"}


@pytest.mark.parametrize(("stack", "options"), [*KIND, (CP, {}), (COLLECTIVES, {}), (FSDP_TP, FOUR)], ids=str)
def test_full(stack: str, options: dict[str, Any]) -> None:
    """It runs and sends what torch's full checkpoint does, and keeps less than half of what is kept without."""
    assert_same(stack, "full", **options)
    found = flops(stack, "full", **options)
    assert found == flops(stack, "torch full", **options)
    assert all(map(int.__gt__, found, flops(stack, "none", **options)))
    assert sent(stack, "full", **options) == sent(stack, "torch full", **options)
    assert 2 * kept_bytes(stack, "full", **options) < kept_bytes(stack, "none", **options)


@pytest.mark.parametrize(
    ("stack", "options"), [*KIND, (CP, {}), (FSDP_TP, FOUR), (FSDP_TP, FOUR | {"kind": "sequence"})], ids=str
)
def test_selective(stack: str, options: dict[str, Any]) -> None:
    """It lies between full and none in FLOPs and bytes, and sends what is sent without: attention's ring too."""
    assert_same(stack, "selective", **options)
    modes = ("selective", "none", "full")
    assert_between(*(flops(stack, mode, **options) for mode in modes))
    assert sent(stack, "selective", **options) == sent(stack, "none", **options)
    assert_between(*([kept_bytes(stack, mode, **options)] for mode in ("selective", "full", "none")))


@pytest.mark.parametrize(("stack", "options"), [*KIND, (COLLECTIVES, {})], ids=str)
def test_a_saved_collective_is_not_sent_again(stack: str, options: dict[str, Any]) -> None:
    """A policy that saves collectives sends none of them again in backward; one that saves the products sends all."""
    for mode in ("collectives saved", "collectives sent again"):
        assert_same(stack, mode, **options)
    assert sent(stack, "collectives saved", **options) == sent(stack, "none", **options)
    assert_no_more(flops(stack, "collectives saved", **options), flops(stack, "full", **options))
    assert sent(stack, "collectives sent again", **options) == sent(stack, "full", **options)
    assert sent(stack, "full", **options) != sent(stack, "none", **options)


def assert_no_more(ours: list[int], theirs: list[int]) -> None:
    """On each rank; replay does not run a product again that only a kept value was made from."""
    assert all(0 < one <= other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize(
    ("stack", "mode", "options", "order"),
    [
        (TP, "selective", {"kind": "replicated"}, "before"),
        (TP, "full", {"kind": "sequence"}, "before"),
        (TP, "selective", {"kind": "dtensor"}, "before"),
        (FSDP_TP, "selective", FOUR, "before"),
        (FSDP_TP, "selective", FOUR, "after"),
    ],
    ids=str,
)
def test_any_order_of_apply_and_sharding(stack: str, mode: str, options: dict[str, Any], order: str) -> None:
    """By default regions are put on after `parallelize_module` and before `fully_shard`."""
    found, usual = outcomes(stack, mode, **options, order=order), outcomes(stack, mode, **options)
    for one, other in zip(found, usual, strict=True):
        assert differences(one, other) == []
        assert (one.flops, one.collectives) == (other.flops, other.collectives)


def test_dropout() -> None:
    assert_same(TP, "selective", kind="dtensor", dropout=0.1)


@pytest.mark.parametrize(
    ("stack", "mode", "options"),
    [(TP, "full", {"kind": "replicated"}), (TP, "selective", {"kind": "replicated"}), (FSDP_TP, "full", FOUR)],
    ids=str,
)
def test_scattered_inputs(stack: str, mode: str, options: dict[str, Any]) -> None:
    """They cost no FLOPs, keep less, and are gathered once for each of the two regions."""
    scattered = f"{mode}, scattered"
    assert_same(stack, scattered, **options)
    assert flops(stack, scattered, **options) == flops(stack, mode, **options)
    assert kept_bytes(stack, scattered, **options) < kept_bytes(stack, mode, **options)
    more = [Counter(one) + Counter({"gloo:all_gather": 2}) for one in sent(stack, mode, **options)]
    assert [Counter(one) for one in sent(stack, scattered, **options)] == more


def test_inputs_that_are_shares_already_are_kept_as_they_are() -> None:
    """A DTensor tells by itself that it is split over the group."""
    assert_same(TP, "full, scattered", kind="dtensor")
    assert sent(TP, "full, scattered", kind="dtensor") == sent(TP, "full", kind="dtensor")


def test_plain_tensors_that_are_shares_are_found_out_in_forward() -> None:
    told = run_ranks(2, refused, {"mode": "full", "distribute_saved_activations": True})
    assert told[0] == told[1]
    assert "argument 0: its values differ between the 2 ranks of the group that it is to be scattered over" in told[0]


def refused(mode: object) -> str:
    with pytest.raises(RegionError) as error:
        tensor_parallel(mode, kind="sequence")
    return str(error.value)


def test_routed_tokens_are_sent_once_in_every_mode_full_included() -> None:
    """Routing is kept in any case, the all-to-alls with it: uneven ones would not fit if a second run routed anew."""
    for mode in ("full", "collectives saved"):
        assert_same(EXPERTS, mode)
        assert sent(EXPERTS, mode) == sent(EXPERTS, "none")
        assert_no_more(flops(EXPERTS, mode), flops(EXPERTS, "torch full"))
        assert kept_bytes(EXPERTS, mode) < kept_bytes(EXPERTS, "none")
    assert sent(EXPERTS, "torch full") == [{"gloo:all_to_all": 9 + 2 * 3}] * 2  # what is spared: three in each block


def test_collectives_are_counted() -> None:
    """Were the counting blind, the tests above would hold of anything."""
    assert sent(TP, "full", kind="replicated") == [{"gloo:all_reduce": 16}] * 2
    assert sent(TP, "none", kind="replicated") == [{"gloo:all_reduce": 14}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_plan_of_transformers(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("transformers.distributed", reason="transformers' own tensor parallel plan")
    from tests.support.model_zoo import tiny

    stack, folder = "model_parallel:transformers_plan", str(tmp_path_factory.mktemp(family))
    tiny(family)[0].save_pretrained(folder)
    options = {"saved": folder, "family": family}
    assert_same(stack, "own policy", **options)
    assert sent(stack, "own policy", **options) == sent(stack, "none", **options)
    if family == "llama":
        test_full(stack, options)
        assert_between(*(flops(stack, mode, **options) for mode in ("own policy", "none", "full")))


# -- Context parallelism: sharded tokens, attention in a ring


def test_attention_that_is_recomputed_sends_its_ring_again() -> None:
    """The ring is inside the one attention op that regions see: kept and sent again together with that."""
    assert_same(CP, "collectives sent again")
    assert sent(CP, "collectives sent again") == sent(CP, "full") != sent(CP, "none")
    assert flops(CP, "collectives sent again") < flops(CP, "full")


def test_a_policy_that_saves_collectives_alone_says_that_it_sees_none() -> None:
    assert all('rule "c" matched no op in any region of the model' in one for one in run_ranks(2, told, CP))


def told(stack: str) -> str:
    with pytest.warns(SacWarning) as warned:
        context_parallel("collectives saved")
    return "\n".join(str(one.message) for one in warned)


def summed_gradients() -> dict[str, torch.Tensor]:
    with new_tensors_in(torch.float64):
        found = context_parallel("full").gradients
    summed = {}
    for name, gradient in sorted(found.items()):
        dist.all_reduce(gradient)
        summed[name] = gradient / dist.get_world_size()
    return {name.removeprefix("step 0 "): one for name, one in summed.items() if "step 0" in name}


def test_the_ring_is_that_of_the_whole_sequence() -> None:
    """Up to rounding, as a ring adds in another order: the stand-in kernel is what the tests above rest on.

    torch's ring merges the parts of its attention in float32 whatever the dtype, which leaves differences of 1e-7.
    """
    ids, labels = batch(Sizes())
    with new_tensors_in(torch.float64):
        model = built(Sizes())
        cross_entropy(model(ids), labels).backward()
    whole, found = gradients_of(model), run_ranks(2, summed_gradients)[0]
    assert whole.keys() == found.keys(), sorted(whole.keys() ^ found.keys())
    for name, expected in whole.items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6 * expected.abs().max().item())


# -- Pipelines: micro-batches in flight, and backward in two parts for zero-bubble schedules

RUN: dict[str, Any] = {"dropout": 0.1}  # several micro-batches have drawn before the first of them is recomputed
SHARDED = {"world": 4, "schedule": "ScheduleInterleavedZeroBubble"}


@pytest.mark.parametrize(
    ("stack", "mode", "options"),
    [
        *((PP, "full", RUN | {"schedule": schedule}) for schedule in SCHEDULES),
        *((PP, "selective", RUN | {"schedule": schedule}) for schedule in SCHEDULES[1::2]),
        (FSDP_PP, "full", SHARDED),
        (FSDP_PP, "selective", SHARDED),
    ],
    ids=str,
)
def test_pipelines(stack: str, mode: str, options: dict[str, Any]) -> None:
    """What is sent is what stages send each other; the peak is that of all micro-batches that are in flight.

    Sharded stages are gathered as often as without checkpointing: they stay gathered for all micro-batches of a step.
    """
    assert_same(stack, mode, **options)
    assert kept_bytes(stack, mode, **options) < 0.9 * kept_bytes(stack, "none", **options)
    assert sent(stack, mode, **options) == sent(stack, "none", **options)
    if mode == "selective":
        assert_between(*(flops(stack, one, **options) for one in ("selective", "none", "full")))


def test_full_runs_each_region_of_a_stage_once_more() -> None:
    once = flops(PP, "full", **RUN, schedule="Schedule1F1B")
    assert once == flops(PP, "torch full", **RUN, schedule="Schedule1F1B")
    assert once == flops(PP, "full", **RUN, schedule="ScheduleGPipe")


@pytest.mark.parametrize("schedule", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_two_parts_of_backward_share_what_one_of_them_recomputed(schedule: str) -> None:
    """torch's checkpoint runs a region anew for each group of parameters, and keeps what it made for each."""
    options, unsplit = RUN | {"schedule": schedule}, RUN | {"schedule": "ScheduleInterleaved1F1B"}
    plain, ours, of_torch = (sum(flops(PP, mode, **options)) for mode in ("none", "full", "torch full"))
    region = sum(flops(PP, "full", **unsplit)) - sum(flops(PP, "none", **unsplit))
    assert region <= ours - plain <= 2 * region < of_torch - plain
    assert kept_bytes(PP, "full", **options) < kept_bytes(PP, "torch full", **options)


def test_stages_without_layers_train_beside_stages_with_some() -> None:
    """Four stages of a model of two layers: the rank with both ends has no block, and the same two lines of code."""
    options = {"schedule": "ScheduleZBVZeroBubble", "layers": 2}
    assert_same(PP, "full", **options)
    (ends, middle), (our_ends, our_middle) = (flops(PP, mode, **options) for mode in ("none", "full"))
    assert ends == our_ends
    assert middle < our_middle
