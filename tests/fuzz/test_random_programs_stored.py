"""Random programs whose inputs are kept elsewhere: everything is as without us, bit for bit, on every rank."""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import hypothesis
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import sac
from sac.errors import SacWarning
from tests.fuzz.programs import Program, programs, values
from tests.fuzz.test_random_programs import BACKWARDS, CALM, needs_grad, trained
from tests.support.ranks import run_ranks
from tests.support.training import Backward, assert_same, built

ONE_PROCESS = ("host",)
OVER_RANKS = ("scattered", "scattered+host")

Example = tuple[Program, dict[str, Any], Backward]


@st.composite
def examples(draw: st.DrawFn, stores: tuple[str, ...]) -> Example:
    """A program, a config value for it, and how its backward is run."""
    program = draw(programs("apply"))
    hypothesis.assume(needs_grad(program))
    value = {**draw(values("apply")), "store": draw(st.sampled_from(stores))}
    value["keep"] = draw(st.sampled_from(["first", "all"]))
    return program, value, draw(st.sampled_from(BACKWARDS))


def assert_same_as_plain(example: Example, group: Any = None) -> None:
    program, value, backward = example
    reference = trained(program, built(program.build), backward, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)  # naming a routing op with recompute warns
        model = sac.apply(built(program.build), value, tp_group=group)
        assert_same(reference, trained(program, model, backward, "cpu"))


@settings(CALM, max_examples=60, derandomize=True)
@given(example=examples(ONE_PROCESS))
def test_in_one_process(example: Example) -> None:
    assert_same_as_plain(example)


def hold_on_rank(batch: list[Example]) -> list[str]:
    """What went wrong, by the example's number."""
    wrong = []
    for number, example in enumerate(batch):
        try:
            assert_same_as_plain(example, dist.group.WORLD)
        except Exception:
            wrong.append(f"{number}: {example}\n{traceback.format_exc()}")
    return wrong


def test_over_two_ranks() -> None:
    batch: list[Example] = []

    @settings(CALM, max_examples=60, derandomize=True)
    @given(example=examples(OVER_RANKS))
    def collect(example: Example) -> None:
        batch.append(example)

    collect()
    assert run_ranks(2, hold_on_rank, batch) == [[], []]
