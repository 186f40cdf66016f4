"""What people choose without a planner is among what it chooses from, so that no plan is dominated by it."""

from __future__ import annotations

import pytest

from sac.planner.by_hand import ATTENTION_MATMULS, SELECTIVE
from sac.planner.plan_file import make_plan
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from sac.planner.write_policy import baselines, by_hand
from tests.unit.planner.truth import model_named


def planner_of_t5(layers: int) -> Planner:
    """Plan an encoder and a decoder, whose first layers differ from the later ones, after a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sac.planner.planner._MOST_MEASURED", 16)
        return prepare(*model_named("T5", layers))


@pytest.fixture(scope="module")
def t5() -> Planner:
    return planner_of_t5(2)


def test_no_plan_is_dominated_by_what_people_choose(t5: Planner) -> None:
    """For T5, the peak of ``selective`` is below that of each combination of Pareto-optimal save options."""
    for way in baselines(t5):
        plan = make_plan(t5, way.peak).point
        assert plan.peak <= way.peak, way.label
        assert plan.seconds <= way.seconds, way.label


def test_a_plan_does_not_depend_on_what_was_asked_before(t5: Planner) -> None:
    budget = by_hand(t5, SELECTIVE).peak
    make_plan(t5, budget + 4096)
    after, first = make_plan(t5, budget).point, make_plan(planner_of_t5(2), budget).point
    assert (after.peak, after.seconds) == (first.peak, first.seconds)


@pytest.mark.slow
def test_a_choice_that_takes_more_than_composed_does_not_end_the_search() -> None:
    """With more layers than are measured, what the search finds first does not fit; what it found then was slower."""
    t5 = planner_of_t5(6)
    selective = by_hand(t5, SELECTIVE)
    plan = make_plan(t5, selective.peak).point
    assert plan.peak <= selective.peak
    assert plan.seconds < selective.seconds / 2


def test_options_are_in_the_order_of_their_bytes_between_full_and_no_checkpointing(t5: Planner) -> None:
    for choices in t5.choices:
        *saving, none = choices
        assert none.keep is None
        assert saving[0].keep is not None
        assert not saving[0].keep.saved
        sizes = [one.bytes for one in saving]
        assert sizes == sorted(sizes)
        assert len({one.keep.saved for one in saving if one.keep is not None}) == len(saving)


def test_a_choice_by_hand_saves_what_its_save_sets_name(t5: Planner) -> None:
    choice = t5.choice_by_hand(ATTENTION_MATMULS)
    for group, one in zip(t5.groups, choice, strict=True):
        keep = t5.choices[group][one].keep
        assert keep is not None
        ops = [entry.op for entry in t5.profiles[group].entries if entry.number in keep.saved]
        assert "aten.mm.default" in ops
        assert not [op for op in ops if "mm" not in op and "attention" not in op]
