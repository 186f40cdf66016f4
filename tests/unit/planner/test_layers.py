"""What each layer keeps: the least time within the budget, the same as trying everything."""

import pickle
from itertools import product
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sac.planner import layers as layer_search
from sac.planner.layers import BudgetTooSmallError, MemoryConstraint, assign, assign_alike, peak


def random_case(random, positions, choices, kinds):
    """Return rows, bytes held, seconds and the kind of each position; sums of the seconds are exact."""
    count = random.randint(1, positions)
    tables = []
    for _ in range(kinds):
        width = random.randint(1, choices)
        tables.append(
            (
                tuple(random.choice((0, 1, 2, 5, 9, 17, 1000)) * random.randint(1, 3) for _ in range(width)),
                tuple(random.randint(0, 60) / 64 for _ in range(width)),
            )
        )
    of = [random.randrange(kinds) for _ in range(count)]
    held, seconds = [tables[kind][0] for kind in of], [tables[kind][1] for kind in of]
    rows = [MemoryConstraint(random.randint(0, 30), count)]
    for position in range(count):
        for _ in range(random.randint(0, 2)):
            own = tuple(random.randint(0, 20) for _ in held[position]) if random.random() < 0.8 else None
            rows.append(MemoryConstraint(random.randint(0, 60), position, own))
    return rows, held, seconds, of


def cases(positions, choices, kinds=2):
    return st.integers(0, 2**32 - 1).map(lambda seed: random_case(Random(seed), positions, choices, kinds))


def time_of(seconds, choice):
    return sum(times[picked] for times, picked in zip(seconds, choice, strict=True))


def everything(rows, held, seconds):
    """Return peak and time of all choices."""
    choices = product(*(range(len(sizes)) for sizes in held))
    return [(peak(rows, held, choice)[0], time_of(seconds, choice)) for choice in choices]


def assert_best(found, budget, rows, held, seconds, all_choices):
    fits = [time for most, time in all_choices if most <= budget]
    if not fits:
        with pytest.raises(BudgetTooSmallError) as error:
            found()
        assert error.value.least == min(most for most, _ in all_choices)
        return
    choice = found()
    assert peak(rows, held, choice)[0] <= budget
    assert time_of(seconds, choice) == min(fits)


@pytest.mark.parametrize("first", [1, layer_search.FIRST_OPEN])
@settings(max_examples=150, deadline=None)
@given(case=cases(positions=5, choices=4), share=st.floats(-0.1, 1.1))
def test_the_choice_is_the_best_of_all(first, case, share):
    """Also where the first pass finds little, so that the bounds of the second decide."""
    rows, held, seconds, _ = case
    all_choices = everything(rows, held, seconds)
    low, high = min(all_choices)[0], max(all_choices)[0]
    budget = int(low + share * (high - low))
    with patch.object(layer_search, "FIRST_OPEN", first):
        assert_best(lambda: assign(rows, held, seconds, budget), budget, rows, held, seconds, all_choices)


@settings(max_examples=100, deadline=None)
@given(case=cases(positions=6, choices=4), share=st.floats(-0.1, 1.1))
def test_one_choice_for_a_kind_is_the_best_of_those(case, share):
    rows, held, seconds, kinds = case
    widths = {kind: range(len(held[position])) for position, kind in enumerate(kinds)}
    alike = [dict(zip(widths, picks, strict=True)) for picks in product(*widths.values())]
    choices = [[picks[kind] for kind in kinds] for picks in alike]
    all_choices = [(peak(rows, held, choice)[0], time_of(seconds, choice)) for choice in choices]
    low, high = min(all_choices)[0], max(all_choices)[0]
    budget = int(low + share * (high - low))
    assert_best(lambda: assign_alike(rows, held, seconds, budget, kinds), budget, rows, held, seconds, all_choices)


@pytest.mark.parametrize("seed", range(100))
def test_more_budget_is_never_slower_and_never_exceeded(seed):
    """Ten budgets for each of a hundred cases, the lowest possible one among them."""
    rows, held, seconds, _ = random_case(Random(seed), positions=16, choices=8, kinds=2)
    with pytest.raises(BudgetTooSmallError) as error:
        assign(rows, held, seconds, -1)
    low = error.value.least
    high = max(peak(rows, held, [max(range(len(sizes)), key=sizes.__getitem__) for sizes in held])[0], low)
    before = float("inf")
    for step in range(10):
        budget = low + (high - low) * step // 9
        choice = assign(rows, held, seconds, budget)
        assert peak(rows, held, choice)[0] <= budget
        assert time_of(seconds, choice) <= before
        before = time_of(seconds, choice)


def test_layers_that_hold_more_come_last():
    rows, held, seconds = [MemoryConstraint(0, 4)], [(0, 10)] * 4, [(1.0, 0.0)] * 4
    assert assign(rows, held, seconds, 20) == (0, 0, 1, 1)


def test_layers_that_hold_more_come_first_where_only_that_fits():
    """The last layer's own choice would not fit in addition to what those before it hold."""
    rows = [MemoryConstraint(0, 2), MemoryConstraint(0, 1, (0, 100))]
    assert assign(rows, [(0, 10)] * 2, [(1.0, 0.0)] * 2, 50) == (1, 0)


def test_a_budget_that_is_too_small_names_the_least_and_the_row():
    rows = [MemoryConstraint(5, 1), MemoryConstraint(70, 0, (0, 9))]
    with pytest.raises(BudgetTooSmallError) as error:
        assign(rows, [(0, 10)], [(1.0, 0.0)], 60)
    assert str(error.value) == "budget: 60 bytes\n    legal: at least 70 bytes (row 1)"
    assert (error.value.budget, error.value.least, error.value.constraint) == (60, 70, 1)
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.least, again.constraint) == (str(error.value), 70, 1)


def test_the_least_budget_may_need_a_choice_that_holds_more():
    rows = [MemoryConstraint(0, 1), MemoryConstraint(0, 0, (100, 0))]
    assert assign(rows, [(0, 10)], [(0.0, 1.0)], 10) == (1,)


def test_the_peak_is_that_of_the_first_row_that_has_it():
    rows = [MemoryConstraint(1, 0), MemoryConstraint(4, 1, (1, 6)), MemoryConstraint(3, 2), MemoryConstraint(0, 2)]
    assert peak(rows, [(0, 4), (7, 3)], (1, 1)) == (14, 1)
    assert peak(rows, [(0, 4), (7, 3)], (1, 0)) == (14, 2)


def test_what_is_found_when_not_all_is_followed_is_within_the_budget(monkeypatch):
    monkeypatch.setattr(layer_search, "MOST_OPEN", 2)
    for seed in range(30):
        rows, held, seconds, _ = random_case(Random(seed), positions=12, choices=8, kinds=2)
        high = peak(rows, held, [0] * len(held))[0]
        choice = assign(rows, held, seconds, high)
        assert peak(rows, held, choice)[0] <= high
        assert time_of(seconds, choice) <= time_of(seconds, [0] * len(held))
