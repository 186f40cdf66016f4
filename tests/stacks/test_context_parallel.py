"""torch's context parallelism on two ranks: sharded tokens, attention in a ring."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sac.errors import SacWarning
from tests.stacks.composes import assert_same_gradients
from tests.stacks.composition import gradients_of
from tests.stacks.parallel_claims import assert_full, assert_selective, flops, sent
from tests.stacks.parallel_llama import Sizes, batch, built, cross_entropy
from tests.stacks.ring_attention import context_parallel
from tests.support.ranks import run_ranks
from tests.support.training import new_tensors_in

CP = "ring_attention:context_parallel"


def test_full() -> None:
    assert_full(CP)


def test_selective_keeps_attention_and_sends_no_ring_again() -> None:
    assert_selective(CP)


def test_attention_that_is_recomputed_sends_its_ring_again() -> None:
    """The ring is inside the one attention op that regions see: kept and sent again together with that."""
    assert_same_gradients(CP, "collectives sent again")
    assert sent(CP, "collectives sent again") == sent(CP, "full") != sent(CP, "none")
    assert flops(CP, "collectives sent again") < flops(CP, "full")


def test_a_policy_that_saves_collectives_alone_says_that_it_sees_none() -> None:
    assert (
        run_ranks(2, told, "collectives saved")
        == [
            'activation_checkpointing.policy.rules[0]: rule "c" matched no op in any region of the model\n'
            "    fix: `sac trace` lists the ops there are; mark the rule `optional: true` if it may match nothing"
        ]
        * 2
    )


def told(mode: str) -> str:
    with pytest.warns(SacWarning) as warned:
        context_parallel(mode)
    return "\n".join(str(one.message) for one in warned)


def summed_gradients() -> dict[str, torch.Tensor]:
    with new_tensors_in(torch.float64):
        found = context_parallel("full").gradients
    return {name.removeprefix("step 0 "): _mean(one) for name, one in sorted(found.items()) if "step 0" in name}


def _mean(gradient: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def test_the_ring_is_that_of_the_whole_sequence() -> None:
    """Up to rounding, as a ring adds in another order: the stand-in kernel is what the tests above rest on."""
    ids, labels = batch(Sizes())
    with new_tensors_in(torch.float64):
        model = built(Sizes())
        cross_entropy(model(ids), labels).backward()
    whole, found = gradients_of(model), run_ranks(2, summed_gradients)[0]
    assert whole.keys() == found.keys(), sorted(whole.keys() ^ found.keys())
    for name, expected in whole.items():
        # Not the bound of `assert_nearly_same`: torch's ring merges the parts of its attention in float32 whatever the
        # dtype, which leaves differences of 1e-7 of the numbers. A part that is missing or doubled changes them by far
        # more than this.
        bound = 1e-6 * expected.abs().max().item()
        torch.testing.assert_close(
            found[name], expected, rtol=0, atol=bound, msg=lambda said, name=name: f"{name}: {said}"
        )
