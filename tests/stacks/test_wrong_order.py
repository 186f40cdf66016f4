"""`sac.apply` before, after and between everything else that is done to a model: each order works.

Works means: gradients are those of the same steps without us, bit for bit, more FLOPs are run and fewer bytes kept.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from tests.stacks.composition import Outcome, forward_done, outcome
from tests.stacks.orders import APPLY, STEPS, WIDTH, compare, verdict
from tests.support.blocks import llama_stack, policy, save
from tests.support.pairs import in_pairs, rows_of_pairs
from tests.support.ranks import run_ranks

VALUES: dict[str, Any] = {"full": "full", "selective": {"mode": "selective", "policy": policy(save("attention"))}}
RANKED = ("DDP", "fully_shard", "FSDP1", "parallelize_module")
COMPILING = ("compile", "compile blocks", "wrap compiled blocks")
ALONE = tuple(name for name in STEPS if name not in RANKED)
PLAIN = ("get_peft_model", "to(bfloat16)", "load_state_dict", "deepcopy")
LIMIT_SECONDS = 600.0


def with_ours_at(place: int, *steps: str) -> tuple[str, ...]:
    """These steps in this order, with ours after the first `place` of them."""
    return (*steps[:place], APPLY, *steps[place:])


def assert_all_work(found: dict[str, str]) -> None:
    assert {order: text for order, text in found.items() if text != "works"} == {}


@pytest.fixture(autouse=True)
def has_peft() -> None:
    pytest.importorskip("peft", reason="adapters are one of the steps")


@in_pairs(step=ALONE, place={"before": 0, "after": 1}, value=VALUES)
def test_before_and_after(step: str, place: int, value: Any) -> None:
    assert_all_work(compare([with_ours_at(place, step)], value))


def test_before_and_after_in_ranks() -> None:
    for name, place, step in rows_of_pairs(VALUES, (0, 1), RANKED):
        for found in run_ranks(2, compare, [with_ours_at(place, step)], VALUES[name], timeout=LIMIT_SECONDS):
            assert_all_work(found)


@in_pairs(first=PLAIN, second=PLAIN, place={"first": 0, "between": 1, "last": 2}, unless=lambda one, two, _: one == two)
def test_among_two(first: str, second: str, place: int) -> None:
    assert_all_work(compare([with_ours_at(place, first, second)], "full"))


WITH_COMPILE = [
    ("get_peft_model", APPLY, "compile"),
    (APPLY, "compile blocks", "get_peft_model"),
    ("compile blocks", APPLY, "get_peft_model"),
    (APPLY, "compile", "deepcopy"),
    ("compile", APPLY, "deepcopy"),
    ("to(bfloat16)", "wrap compiled blocks", APPLY),
]


@pytest.mark.slow
@pytest.mark.parametrize("order", WITH_COMPILE, ids=" > ".join)
def test_among_two_of_which_one_compiles(order: tuple[str, ...]) -> None:
    assert_all_work(compare([order], "full"))


# What compiles in ranks is in test_compiled_parallel too.
IN_RANKS = [
    (APPLY, "get_peft_model", "DDP"),
    ("get_peft_model", APPLY, "DDP"),
    ("get_peft_model", APPLY, "fully_shard"),
    ("get_peft_model", "fully_shard", APPLY),
    (APPLY, "get_peft_model", "FSDP1"),
    ("get_peft_model", "FSDP1", APPLY),
    (APPLY, "to(bfloat16)", "fully_shard"),
    ("load_state_dict", APPLY, "FSDP1"),
    ("compile", APPLY, "DDP"),
]


@pytest.mark.slow
@pytest.mark.parametrize("order", IN_RANKS, ids=" > ".join)
def test_among_two_in_ranks(order: tuple[str, ...]) -> None:
    for found in run_ranks(2, compare, [order], "full", timeout=LIMIT_SECONDS):
        assert_all_work(found)


@pytest.mark.parametrize("step", [None, *COMPILING])
def test_put_on_and_taken_off_a_model_that_has_trained(step: str | None) -> None:
    """What has been compiled by then was compiled without regions: it must not be used any more."""

    torch._dynamo.reset()
    torch.manual_seed(1)
    model = llama_stack(2, d=WIDTH)
    model = STEPS[step](model) if step else model
    torch.manual_seed(2)
    x = torch.randn(2, 16, WIDTH)

    def train() -> Tensor:
        loss = model(x).square().mean()
        forward_done()
        loss.backward()
        return loss

    def trained() -> Outcome:
        found = outcome(train, model, compiled=step is not None)
        model.zero_grad()
        return found

    reference = trained()
    sac.apply(model, "full")
    assert verdict(trained(), reference) == "works"
    sac.remove(model)
    assert verdict(trained(), reference) == "nothing is recomputed"
