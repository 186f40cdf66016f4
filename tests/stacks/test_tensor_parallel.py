"""Tensor and sequence parallel models on two ranks: DTensor plans, functional collectives, transformers' own plan."""

from __future__ import annotations

import pytest

from sac.errors import RegionError
from tests.stacks.composes import assert_same_gradients, outcomes
from tests.stacks.composition import differences
from tests.stacks.model_parallel import tensor_parallel
from tests.stacks.parallel_claims import (
    assert_flops_between,
    assert_full,
    assert_no_more,
    assert_scattered,
    assert_selective,
    assert_sent_once,
    flops,
    kept_bytes,
    sent,
)
from tests.support.ranks import run_ranks

TP = "model_parallel:tensor_parallel"
KINDS = pytest.mark.parametrize("kind", ["replicated", "sequence", "dtensor"])


@KINDS
def test_full(kind: str) -> None:
    assert_full(TP, kind=kind)


@KINDS
def test_selective(kind: str) -> None:
    assert_selective(TP, kind=kind)


@KINDS
def test_a_saved_collective_is_not_sent_again(kind: str) -> None:
    assert_sent_once(TP, kind=kind)


@pytest.mark.parametrize(
    ("kind", "mode"), [("replicated", "selective"), ("sequence", "full"), ("dtensor", "selective")]
)
def test_before_parallelize_module(kind: str, mode: str) -> None:
    """Names, hooks and weights are put on a model that has regions already; everything is as the other way round."""
    after = {"kind": kind}
    before = {"kind": kind, "order": "before"}
    found, plain = outcomes(TP, mode, **before), outcomes(TP, "none", **after)
    assert [differences(one, reference) for one, reference in zip(found, plain, strict=True)] == [[], []]
    assert flops(TP, mode, **before) == flops(TP, mode, **after)
    assert sent(TP, mode, **before) == sent(TP, mode, **after)


def test_dropout() -> None:
    assert_same_gradients(TP, "selective", kind="dtensor", dropout=0.1)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_replicated_inputs_are_scattered_beside_sharded_weights(mode: str) -> None:
    assert_scattered(TP, mode, kind="replicated")


def test_inputs_that_are_shares_already_are_kept_as_they_are() -> None:
    """A DTensor tells by itself that it is split over the group."""
    assert_same_gradients(TP, "full, scattered", kind="dtensor")
    assert sent(TP, "full, scattered", kind="dtensor") == sent(TP, "full", kind="dtensor")


def test_plain_tensors_that_are_shares_are_found_out_in_forward() -> None:
    mode = {"mode": "full", "distribute_saved_activations": True}
    told = run_ranks(2, refused, mode)
    assert told[0] == told[1]
    assert told[0] == (
        "argument 0: its values differ between the 2 ranks of the group that it is to be scattered over "
        "(is it split between them, as in sequence parallelism?)\n"
        "    fix: scatter what all ranks have whole: choose by `keep`, or keep the inputs of this region whole"
    )


def refused(mode: object) -> str:
    with pytest.raises(RegionError) as error:
        tensor_parallel(mode, kind="sequence")
    return str(error.value)


def test_functional_collectives_are_sent_as_the_policy_says() -> None:
    assert_full("model_parallel:collectives")
    assert_sent_once("model_parallel:collectives")


def test_routed_tokens_are_sent_once_in_every_mode_full_included() -> None:
    """Routing is kept in any case, the all-to-alls with it: uneven ones would not fit if a second run routed anew."""
    stack = "model_parallel:experts"
    for mode in ("full", "collectives saved"):
        assert_same_gradients(stack, mode)
        assert sent(stack, mode) == sent(stack, "none")
        assert_no_more(flops(stack, mode), flops(stack, "torch full"))
        assert kept_bytes(stack, mode) < kept_bytes(stack, "none")
    assert sent(stack, "torch full") == [{"gloo:all_to_all": 9 + 2 * 3}] * 2  # what is spared: three in each block


def test_what_a_mode_is_not_told_to_save_is_not_saved() -> None:
    """The counting itself: were it blind, the tests above would hold of anything."""
    assert sent(TP, "full", kind="replicated") == [{"gloo:all_reduce": 16}] * 2
    assert sent(TP, "none", kind="replicated") == [{"gloo:all_reduce": 14}] * 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders that `from_pretrained` reads, by family."""
    pytest.importorskip("transformers", reason="transformers' own tensor parallel plan")
    pytest.importorskip("transformers.distributed", reason="transformers' own tensor parallel plan")
    from tests.support.model_zoo import tiny

    folders = {}
    for family in ("llama", "qwen3_moe"):
        folders[family] = str(tmp_path_factory.mktemp(family))
        tiny(family)[0].save_pretrained(folders[family])
    return folders


@pytest.mark.slow
def test_the_plan_of_transformers(saved: dict[str, str]) -> None:
    stack, options = "model_parallel:transformers_plan", {"saved": saved["llama"], "family": "llama"}
    assert_full(stack, **options)
    assert_same_gradients(stack, "own policy", **options)
    assert_flops_between(stack, "own policy", **options)
    assert sent(stack, "own policy", **options) == sent(stack, "none", **options)


@pytest.mark.slow
def test_the_plan_of_transformers_for_routed_experts(saved: dict[str, str]) -> None:
    stack, options = "model_parallel:transformers_plan", {"saved": saved["qwen3_moe"], "family": "qwen3_moe"}
    assert_same_gradients(stack, "own policy", **options)
    assert sent(stack, "own policy", **options) == sent(stack, "none", **options)
