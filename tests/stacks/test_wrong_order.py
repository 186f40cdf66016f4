"""`sac.apply` before, after and between everything else that is done to a model: each order works.

Works means: gradients are those of the same steps without us, bit for bit, more FLOPs are run and fewer bytes kept.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from tests.stacks.composition import Outcome, forward_done, outcome
from tests.stacks.orders import APPLY, STEPS, WIDTH, compare, verdict
from tests.support.blocks import llama_stack, policy, save
from tests.support.ranks import run_ranks

VALUES: dict[str, Any] = {"full": "full", "selective": {"mode": "selective", "policy": policy(save("attention"))}}
ON_EACH_VALUE = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
RANKED = ("DDP", "fully_shard", "FSDP1", "parallelize_module")
COMPILING = ("compile", "compile blocks", "wrap compiled blocks")
ALONE = tuple(name for name in STEPS if name not in RANKED)
LIMIT_SECONDS = 600.0


def around(*steps: str) -> list[tuple[str, ...]]:
    """These steps in this order, with ours at every place."""
    return [(*steps[:place], APPLY, *steps[place:]) for place in range(len(steps) + 1)]


def assert_all_work(found: dict[str, str]) -> None:
    assert {order: text for order, text in found.items() if text != "works"} == {}


@pytest.fixture(autouse=True)
def has_peft() -> None:
    pytest.importorskip("peft", reason="adapters are one of the steps")


@pytest.mark.parametrize("step", ALONE)
@ON_EACH_VALUE
def test_before_and_after(step: str, value: Any) -> None:
    assert_all_work(compare(around(step), value))


@ON_EACH_VALUE
def test_before_and_after_in_ranks(value: Any) -> None:
    orders = [order for step in RANKED for order in around(step)]
    for found in run_ranks(2, compare, orders, value, timeout=LIMIT_SECONDS):
        assert_all_work(found)


PLAIN = ("get_peft_model", "to(bfloat16)", "load_state_dict", "deepcopy")
WITH_COMPILE = [
    ("get_peft_model", "compile"),
    ("compile blocks", "get_peft_model"),
    ("compile", "deepcopy"),
    ("to(bfloat16)", "wrap compiled blocks"),
]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [*itertools.permutations(PLAIN, 2), *WITH_COMPILE], ids=" then ".join)
def test_among_two(steps: tuple[str, str]) -> None:
    assert_all_work(compare(around(*steps), "full"))


PAIRS_IN_RANKS = [
    ("get_peft_model", "DDP"),
    ("get_peft_model", "fully_shard"),
    ("get_peft_model", "FSDP1"),
    ("to(bfloat16)", "fully_shard"),
    ("load_state_dict", "FSDP1"),
    ("compile blocks", "fully_shard"),
    ("compile", "DDP"),
    ("DDP", "compile"),
]


@pytest.mark.slow
@pytest.mark.parametrize("steps", PAIRS_IN_RANKS, ids=" then ".join)
def test_among_two_in_ranks(steps: tuple[str, str]) -> None:
    for found in run_ranks(2, compare, around(*steps), "full", timeout=LIMIT_SECONDS):
        assert_all_work(found)


@pytest.mark.parametrize("step", [None, *COMPILING])
def test_put_on_and_taken_off_a_model_that_has_trained(step: str | None) -> None:
    """What has been compiled by then was compiled without regions: it must not be used any more."""

    def run(change: Any) -> Outcome:
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

        for _ in range(2):
            train()
            model.zero_grad()
        change(model, train)
        return outcome(train, model, compiled=step is not None)

    def put_on(model: Any, train: Any) -> None:
        sac.apply(model, "full")

    def put_on_and_off(model: Any, train: Any) -> None:
        put_on(model, train)
        train()
        model.zero_grad()
        sac.remove(model)

    reference = run(lambda model, train: None)
    assert verdict(run(put_on), reference) == "works"
    assert verdict(run(put_on_and_off), reference) == "nothing is recomputed"
